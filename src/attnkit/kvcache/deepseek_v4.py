"""Pages of DeepSeek-V4's caches, byte by byte: float8 codes whose scales are powers of two.

In: numbers of tokens, or pages of somebody who runs that model (KV transfer, a cache on disk). Out: the
bytes of a token, and where they lie in a page. A scale is one byte, ue8m0: its exponent + 127.

                 codes                                       scales                       bytes
    V4_ROWS      448 float8_e4m3fn, 64 rotated bfloat16      7, one per 64 codes, a zero    584
    V41Codec     512 float8_e4m3fn, rotated ones among them  16, one per 32 codes           528

Rows of V4.1 follow one another. A page of V4 has the 576 bytes of codes of all its tokens first, then
the 8 bytes of scales of all of them, and ends at a multiple of 576 (`v4_page_bytes`, `v4_parts`). No
backend attends over these; `decode` gives the numbers.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attnkit.arguments import check_count
from attnkit.contract import KVQuantMode
from attnkit.errors import CacheError
from attnkit.kvcache.codecs import (
    MAGNITUDE_CAP,
    SCALE_FLOOR,
    BFloat16Codec,
    Codec,
    Fp8UnscaledCodec,
)
from attnkit.kvcache.formats import CacheFormat

CODE_BYTES, SCALE_BYTES = 576, 8
"""Of a token in a page of V4."""


class Fp8PowerTileCodec(Codec):
    """float8_e4m3fn codes, then one byte per `granule` of them: e + 127 of the scale 2 ** e.

    The scale is the least power of two, but no less than SCALE_FLOOR, for which the tile's largest
    magnitude has a code. A NaN makes its own tile NaN, whose scale is the byte 255.
    """

    reads_layer_scale: ClassVar[bool] = False

    align: ClassVar[int] = 1
    """Scales fill a multiple of so many bytes; those behind the last are zero."""

    def code_bytes(self, size: int) -> int:
        return size

    def scale_bytes(self, size: int) -> int:
        return -(-(size // self.granule) // self.align) * self.align

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tiles = x.float().unflatten(-1, (-1, self.granule))
        largest = tiles.abs().amax(dim=-1).clamp(max=MAGNITUDE_CAP) / 448
        fraction, exponent = torch.frexp(largest.clamp(min=SCALE_FLOOR))
        exponent = exponent - (fraction == 0.5).int()
        powers = torch.where(largest.isnan(), 255, exponent + 127).to(torch.uint8)
        one = torch.ones_like(largest)
        quotients = tiles / torch.where(largest.isnan(), one, torch.ldexp(one, exponent))[..., None]
        codes = Fp8UnscaledCodec().encode(quotients.flatten(-2), scale)
        unused = self.scale_bytes(x.shape[-1]) - powers.shape[-1]
        return torch.cat([codes, torch.nn.functional.pad(powers, (0, unused))], dim=-1)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        numbers = Fp8UnscaledCodec().decode(data[..., :size], size, scale)
        powers = data[..., size : size + size // self.granule].int()
        scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers - 127)
        scales = torch.where(powers == 255, torch.nan, scales)
        return (numbers.unflatten(-1, (-1, self.granule)) * scales[..., None]).flatten(-2)


class V4Codec(Fp8PowerTileCodec):
    """Of the 448 numbers of V4 that are not rotated."""

    granule: ClassVar[int] = 64
    align: ClassVar[int] = SCALE_BYTES


class V41Codec(Fp8PowerTileCodec):
    """Of all 512 numbers of V4.1."""

    granule: ClassVar[int] = 32


V4_ROWS = CacheFormat(
    name="DeepSeek-V4",
    dtype=torch.uint8,
    mode=KVQuantMode.FP8_DS_MLA,
    codec=V4Codec(),
    value_codec=BFloat16Codec(),
    scales_last=True,
)


def v4_page_bytes(block_size: int) -> int:
    """Bytes of a page of V4.

    Raises:
        ConfigurationError: block_size is no whole number of at least 1.
    """
    check_count("block_size", block_size)
    return -(-block_size * (CODE_BYTES + SCALE_BYTES) // CODE_BYTES) * CODE_BYTES


def v4_parts(pages: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of pages of V4: together, side by side, the contents of `V4_ROWS`.

    Args:
        pages: uint8 (num_blocks, v4_page_bytes(block_size)); any stride of the first.
        block_size: tokens in a page.

    Returns:
        Views (num_blocks, block_size, 576) and (num_blocks, block_size, 8).

    Raises:
        CacheError: these are no such pages.
    """
    num_bytes = v4_page_bytes(block_size)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != num_bytes:
        raise CacheError(
            f"pages are {pages.dtype} {tuple(pages.shape)}; give uint8 (num_blocks, {num_bytes}) for "
            f"{block_size} tokens in a page"
        )
    end = block_size * CODE_BYTES
    codes, scales = pages[:, :end], pages[:, end : end + block_size * SCALE_BYTES]
    return codes.unflatten(1, (block_size, -1)), scales.unflatten(1, (block_size, -1))
