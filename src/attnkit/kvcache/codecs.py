"""Codecs: one vector of K or V (one token, one KV head) as bytes, and back.

In: numbers (..., num_kv_heads, size) and the layer's scale. Out: uint8 (..., num_kv_heads,
code_bytes + scale_bytes): the codes, then the scales that are stored beside them; and float32 again.
All arithmetic is float32, rounded to nearest, ties to even; bytes are little-endian. Which format
uses which codec, and where the bytes of a page lie, is `formats`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

SCALE_FLOOR = 2.0**-126
"""Least scale per token and head: float32's smallest normal number. So a scale is never zero or
denormal, and a vector of zeros needs no rule of its own."""

MAGNITUDE_CAP = 2.0**127
"""Larger magnitudes count as this in a scale per token and head, infinities too. Twice as much would
do for codes of 7 and 448, but 127 * (float32's largest / 127) rounds to infinity."""

FP8_TILE = 128
"""Elements of a latent that share one float32 scale in DeepSeek's fp8 rows."""

NVFP4_BLOCK = 16
"""Elements that share one nvfp4 block scale."""

NVFP4_BLOCK_SCALE_FLOOR = 2.0**-9
"""Least nvfp4 block scale: float8_e4m3fn's smallest number."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the eight 3-bit codes of e2m1; bit 3 of a code is the sign."""


class Codec(ABC):
    """How one vector is stored.

    Attributes:
        granule: sizes are multiples of it, so that codes fill whole bytes and scales stored beside
            them are aligned.
        reads_layer_scale: the layer's `_k_scale` or `_v_scale` takes part; else it is ignored.
    """

    granule: ClassVar[int]
    reads_layer_scale: ClassVar[bool]

    @abstractmethod
    def code_bytes(self, size: int) -> int:
        """Bytes of the codes of a vector of `size` numbers."""

    @abstractmethod
    def scale_bytes(self, size: int) -> int:
        """Bytes of the scales stored after the codes."""

    @abstractmethod
    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Bytes of vectors.

        Args:
            x: (..., num_kv_heads, size), any floating dtype.
            scale: float32, (1, 1) or (num_kv_heads, 1), the layer's.

        Returns:
            uint8 (..., num_kv_heads, code_bytes + scale_bytes).
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        """float32 (..., num_kv_heads, size) from what `encode` gave."""


@dataclass(frozen=True, slots=True)
class Fp8Codec(Codec):
    """One float8 code a number: x / scale, scale from the layer.

    Magnitudes beyond the format's largest (448 for e4m3, 57344 for e5m2), infinities too, become that;
    NaN becomes the code 0x7F; zeros keep their sign. Quotients below the smallest normal number become
    denormal codes, and at or below half of the smallest denormal zero.
    """

    dtype: torch.dtype
    granule: ClassVar[int] = 1
    reads_layer_scale: ClassVar[bool] = True

    def code_bytes(self, size: int) -> int:
        return size

    def scale_bytes(self, size: int) -> int:
        return 0

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return _to_fp8(x.float() / scale, self.dtype).view(torch.uint8)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        return data.view(self.dtype).float() * scale


class PerTokenHeadCodec(Codec):
    """Codes and one float32 scale after them, chosen from the vector itself.

    scale = max(min(largest magnitude, MAGNITUDE_CAP) / largest code, SCALE_FLOOR); the codes are
    x / scale, rounded, saturating. The layer's scale is not read. A NaN anywhere makes the scale NaN
    (0x7FC00000) and every code zero, so that the whole vector reads back as NaN: int codes have none
    of their own.
    """

    granule: ClassVar[int] = 4
    reads_layer_scale: ClassVar[bool] = False
    largest: ClassVar[float]
    """The largest code."""

    def scale_bytes(self, size: int) -> int:
        return 4

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x.float()
        magnitude = x.abs().amax(dim=-1, keepdim=True).clamp(max=MAGNITUDE_CAP)
        # By a tensor, not by a number: on CUDA torch multiplies by a number's rounded reciprocal, which
        # is off by a bit from the quotient that every other writer of these pages stores.
        own = (magnitude / magnitude.new_tensor(self.largest)).clamp(min=SCALE_FLOOR)
        own.masked_fill_(own.isnan(), torch.nan)  # Last: CUDA's quotients have a NaN of their own.
        quotients = (x / own).clamp(-self.largest, self.largest).nan_to_num(nan=0.0)
        return torch.cat([self._pack(quotients), own.view(torch.uint8)], dim=-1)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        codes, own = data.split([self.code_bytes(size), 4], dim=-1)
        return self._unpack(codes) * own.contiguous().view(torch.float32)

    @abstractmethod
    def _pack(self, quotients: torch.Tensor) -> torch.Tensor:
        """Round finite quotients within +-largest to codes, as uint8."""

    @abstractmethod
    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        """The codes as float32 numbers."""


class Int8PerTokenHeadCodec(PerTokenHeadCodec):
    """Two's complement codes from -127 to 127; -128 is never written."""

    largest: ClassVar[float] = 127.0

    def code_bytes(self, size: int) -> int:
        return size

    def _pack(self, quotients: torch.Tensor) -> torch.Tensor:
        return quotients.round().to(torch.int8).view(torch.uint8)

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


class Fp8PerTokenHeadCodec(PerTokenHeadCodec):
    """float8_e4m3fn codes; the vector's largest magnitude becomes 448."""

    largest: ClassVar[float] = 448.0

    def code_bytes(self, size: int) -> int:
        return size

    def _pack(self, quotients: torch.Tensor) -> torch.Tensor:
        return _to_fp8(quotients, torch.float8_e4m3fn).view(torch.uint8)

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class Int4PerTokenHeadCodec(PerTokenHeadCodec):
    """Codes from -7 to 7, stored as code + 8 in four bits: elements 2i and 2i + 1 are the low and the
    high half of byte i. Zero is 8; 0 is never written."""

    granule: ClassVar[int] = 8
    largest: ClassVar[float] = 7.0

    def code_bytes(self, size: int) -> int:
        return size // 2

    def _pack(self, quotients: torch.Tensor) -> torch.Tensor:
        return _pack_nibbles((quotients.round() + 8).to(torch.uint8))

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        return _unpack_nibbles(codes).float() - 8


class Fp8TileCodec(Codec):
    """float8_e4m3fn codes, then one float32 scale per FP8_TILE of them, chosen as by
    `PerTokenHeadCodec` from each tile. A NaN makes its own tile NaN."""

    granule: ClassVar[int] = FP8_TILE
    reads_layer_scale: ClassVar[bool] = False

    def code_bytes(self, size: int) -> int:
        return size

    def scale_bytes(self, size: int) -> int:
        return size // FP8_TILE * 4

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tiles = Fp8PerTokenHeadCodec().encode(x.unflatten(-1, (-1, FP8_TILE)), scale)
        codes, own = tiles.split([FP8_TILE, 4], dim=-1)
        return torch.cat([codes.flatten(-2), own.flatten(-2)], dim=-1)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        codes, own = data.split([self.code_bytes(size), self.scale_bytes(size)], dim=-1)
        tiles = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, FP8_TILE))
        return (tiles * own.contiguous().view(torch.float32)[..., None]).flatten(-2)


class BFloat16Codec(Codec):
    """The numbers, rounded to bfloat16."""

    granule: ClassVar[int] = 2
    reads_layer_scale: ClassVar[bool] = False

    def code_bytes(self, size: int) -> int:
        return 2 * size

    def scale_bytes(self, size: int) -> int:
        return 0

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        # Not `contiguous`: it leaves the strides of an empty tensor as they are.
        rows = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device).copy_(x)
        return rows.view(torch.uint8)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        return data.contiguous().view(torch.bfloat16).float()


class Nvfp4Codec(Codec):
    """e2m1 codes in halves of bytes as `Int4PerTokenHeadCodec` packs them, then one float8_e4m3fn
    scale per NVFP4_BLOCK elements; a number is (code * block scale) * the layer's scale.

    block scale = e4m3(largest magnitude in the block / (6 * layer's scale)), between
    NVFP4_BLOCK_SCALE_FLOOR and 448. Codes are x / (block scale * layer's scale), rounded, saturating
    at +-6; zeros keep their sign. A NaN makes its block's scale NaN and the block's codes zero. Layout
    and rounding are those of NVIDIA's format, except that a block of zeros has the least scale
    instead of zero.
    """

    granule: ClassVar[int] = NVFP4_BLOCK
    reads_layer_scale: ClassVar[bool] = True

    def code_bytes(self, size: int) -> int:
        return size // 2

    def scale_bytes(self, size: int) -> int:
        return size // NVFP4_BLOCK

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
        own = blocks.abs().amax(dim=-1) / (6 * scale)
        own = _to_fp8(own.clamp(min=NVFP4_BLOCK_SCALE_FLOOR), torch.float8_e4m3fn)
        quotients = (blocks / (own.float() * scale)[..., None]).nan_to_num(nan=0.0)
        codes = _pack_nibbles(_to_e2m1(quotients.flatten(-2)))
        return torch.cat([codes, own.view(torch.uint8)], dim=-1)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        codes, own = data.split([self.code_bytes(size), self.scale_bytes(size)], dim=-1)
        magnitudes = torch.tensor(E2M1_VALUES, device=data.device)
        table = torch.cat([magnitudes, -magnitudes])
        blocks = table[_unpack_nibbles(codes).long()].unflatten(-1, (-1, NVFP4_BLOCK))
        block_scales = own.contiguous().view(torch.float8_e4m3fn).float()
        return (blocks * block_scales[..., None]).flatten(-2) * scale


class Nvfp4LatentCodec(Codec):
    """Codes and block scales of `Nvfp4Codec` for a layer's scale of one, which is not read. The scales
    lie as a kernel wants them: that of block s of n at byte (n / 4) * (s % 4) + s // 4."""

    granule: ClassVar[int] = 4 * NVFP4_BLOCK
    reads_layer_scale: ClassVar[bool] = False

    def code_bytes(self, size: int) -> int:
        return size // 2

    def scale_bytes(self, size: int) -> int:
        return size // NVFP4_BLOCK

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        data = Nvfp4Codec().encode(x, torch.ones_like(scale))
        size = x.shape[-1]
        codes, own = data.split([self.code_bytes(size), self.scale_bytes(size)], dim=-1)
        own = own.unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2)
        return torch.cat([codes, own], dim=-1)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        codes, own = data.split([self.code_bytes(size), self.scale_bytes(size)], dim=-1)
        own = own.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)
        return Nvfp4Codec().decode(torch.cat([codes, own], dim=-1), size, torch.ones_like(scale))


class Fp8UnscaledCodec(Codec):
    """The numbers, rounded to float8_e4m3fn as by `Fp8Codec` with a scale of one."""

    granule: ClassVar[int] = 1
    reads_layer_scale: ClassVar[bool] = False

    def code_bytes(self, size: int) -> int:
        return size

    def scale_bytes(self, size: int) -> int:
        return 0

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return _to_fp8(x.float(), torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, data: torch.Tensor, size: int, scale: torch.Tensor) -> torch.Tensor:
        return data.contiguous().view(torch.float8_e4m3fn).float()


def _to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturating cast. The bare cast makes NaN or infinity of what is too large."""
    largest = torch.finfo(dtype).max
    return _one_nan(x.clamp(-largest, largest)).to(dtype)


def _one_nan(x: torch.Tensor) -> torch.Tensor:
    """Every NaN as the same one: signs and payloads of NaN differ between processors."""
    return torch.where(x.isnan(), torch.nan, x)


def _to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code, ties to the even code, saturating; uint8 below 16."""
    code = torch.signbit(x).to(torch.uint8) * 8
    x = x.abs()
    for lower, (a, b) in enumerate(itertools.pairwise(E2M1_VALUES)):
        middle = (a + b) / 2
        code += (x > middle) if lower % 2 == 0 else (x >= middle)
    return code


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def _unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
