"""QuantizedOutput: where a layer writes its attention as codes instead of numbers.

In: a `QuantKey` of `OUTPUT_KEYS` and the next layer's scale. Out: codes, and scales beside them where
the values choose their own; equal to the bit to quantising what the layer would have returned.

    kFp8StaticTensorSym    float8_e4m3fn codes (num_tokens, width); scale is given: float32, one number
    kFp8Dynamic128Sym      likewise; block_scale is written: float32, one per 128 codes
    kFp8Dynamic64Sym       likewise, one per 64
    kNvfp4Dynamic          uint8 (num_tokens, width / 2), two e2m1 codes in a byte; scale is given, and
                           block_scale written: float8_e4m3fn, one per 16 codes, in order

width is num_heads * head_size_v; a value is code * block_scale * scale, whichever of these there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.contract import (
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from attnkit.errors import BatchError, ConfigurationError
from attnkit.kvcache.codecs import Codec, Fp8Codec, Fp8PerTokenHeadCodec, Nvfp4Codec

OUTPUT_KEYS = (kFp8StaticTensorSym, kFp8Dynamic128Sym, kFp8Dynamic64Sym, kNvfp4Dynamic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedOutput:
    """Tensors of a quantised output, as engines pass them to an impl.

    Attributes:
        codes: what `output` is, contiguous.
        scale: `output_scale`, float32, one number; None: the format has none.
        block_scale: `output_block_scale`, written; None: the format has none.

    Raises:
        BatchError: the tensors are those of none of `OUTPUT_KEYS`.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    block_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, x in (("codes", self.codes), ("block_scale", self.block_scale)):
            if x is None and name == "block_scale":
                continue
            if not isinstance(x, torch.Tensor) or x.dim() not in (2, 3) or not x.is_contiguous():
                raise BatchError(
                    f"{name} of a quantised output is {_sketch(x)}; give a contiguous tensor of two or "
                    "three dimensions, tokens first, as QuantizedOutput.empty makes it"
                )
        codes, block, key, (num_tokens, width) = self.codes, self.block_scale, self.key, self.shape
        ok = codes.dtype == key.dtype and (block is None or block.dtype == key.scale.dtype)
        if block is not None:
            ok = ok and block.shape == (num_tokens, width // key.scale.group_shape.col)
        scale = self.scale
        if scale is not None and not (
            isinstance(scale, torch.Tensor)
            and (scale.numel(), scale.dtype, scale.device) == (1, torch.float32, codes.device)
        ):
            raise BatchError(
                f"the scale of a quantised output is {_sketch(scale)}; give one float32 number on "
                f"{codes.device}, where its codes are"
            )
        if not ok:
            raise BatchError(
                f"a quantised output of {codes.dtype} {tuple(codes.shape)} with "
                f"scale {_sketch(self.scale)} and block scales {_sketch(block)} is none of the formats "
                "of attnkit.output_quant; make one with QuantizedOutput.empty"
            )

    @property
    def key(self) -> QuantKey:
        """Which format this is, from dtypes and shapes."""
        if self.codes.dtype == torch.uint8:
            return kNvfp4Dynamic
        if self.block_scale is None:
            return kFp8StaticTensorSym
        groups = self.codes.flatten(1).shape[1] // max(1, self.block_scale.shape[-1])
        return kFp8Dynamic64Sym if groups == 64 else kFp8Dynamic128Sym

    @property
    def shape(self) -> tuple[int, int]:
        """Of the numbers: (num_tokens, width)."""
        num_tokens, stored = self.codes.flatten(1).shape
        return num_tokens, 2 * stored if self.codes.dtype == torch.uint8 else stored

    @classmethod
    def empty(
        cls,
        key: QuantKey,
        num_tokens: int,
        width: int,
        *,
        scale: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> QuantizedOutput:
        """Memory for an output.

        Args:
            key: one of `OUTPUT_KEYS`.
            num_tokens: rows.
            width: num_heads * head_size_v.
            scale: one number above zero, for formats that are given one.
            device: of the layer.

        Raises:
            ConfigurationError: no such format, a width its groups do not divide, or a scale too few or
                too many.
        """
        if key not in OUTPUT_KEYS:
            raise ConfigurationError(
                f"outputs are not quantised as {key!r}; use one of OUTPUT_KEYS: kFp8StaticTensorSym, "
                "kFp8Dynamic128Sym, kFp8Dynamic64Sym or kNvfp4Dynamic"
            )
        group = key.scale.group_shape.col
        if group > 0 and width % group:
            raise ConfigurationError(
                f"rows of {width} numbers do not divide into groups of {group}; use another format"
            )
        wants = key in (kFp8StaticTensorSym, kNvfp4Dynamic)
        if (scale is not None) != wants:
            raise ConfigurationError(
                f"this format takes {'one scale' if wants else 'no scale, since it chooses its own'}; "
                f"given: {_sketch(scale)}"
            )
        packed = width // 2 if key.dtype == torch.uint8 else width
        block = None
        if group > 0:
            shape = (num_tokens, width // group)
            block = torch.empty(shape, dtype=key.scale.dtype, device=device)
        codes = torch.empty(num_tokens, packed, dtype=key.dtype, device=device)
        return cls(codes=codes, scale=scale, block_scale=block)

    def write(self, rows: torch.Tensor) -> None:
        """Quantise the first rows.

        Args:
            rows: (n, num_heads, head_size_v), or the last two flattened; n at most num_tokens.

        Raises:
            BatchError: rows of another width.
        """
        x, n, key = rows.flatten(1), rows.shape[0], self.key
        codes = self.codes.flatten(1).view(torch.uint8)
        codec: Codec = Fp8Codec(torch.float8_e4m3fn)
        if key == kNvfp4Dynamic:
            codec = Nvfp4Codec()
        if x.shape[1] != self.shape[1] or n > self.shape[0]:
            raise BatchError(
                f"{n} rows of {x.shape[1]} numbers do not fit an output of {self.shape} numbers"
            )
        scale = x.new_ones(1, dtype=torch.float32) if self.scale is None else self.scale.view(1)
        group = key.scale.group_shape.col
        if key in (kFp8Dynamic64Sym, kFp8Dynamic128Sym):
            codec, x = Fp8PerTokenHeadCodec(), x.unflatten(1, (-1, group))
        made = codec.encode(x, scale)
        own = codec.scale_bytes(x.shape[-1])
        made, scales = made.split([made.shape[-1] - own, own], dim=-1)
        codes[:n] = made.flatten(1)
        if self.block_scale is not None:
            self.block_scale.view(torch.uint8)[:n] = scales.flatten(1)

    def decode(self) -> torch.Tensor:
        """The numbers that the codes stand for, float32 (num_tokens, width)."""
        codes = self.codes.flatten(1)
        if self.key == kNvfp4Dynamic:
            assert self.scale is not None
            assert self.block_scale is not None
            data = torch.cat([codes, self.block_scale.view(torch.uint8)], dim=-1)
            return Nvfp4Codec().decode(data, 2 * codes.shape[1], self.scale.view(1))
        x = codes.float()
        if self.block_scale is not None:
            return (
                x.unflatten(1, (self.block_scale.shape[1], -1)) * self.block_scale[..., None]
            ).flatten(1)
        return x if self.scale is None else x * self.scale


def attend_then_quantize(
    forward: Callable[..., Any],
    head_size_v: int,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: QuantizedOutput,
) -> Any:
    """`forward` of an impl whose kernels write numbers: attends in the layer's dtype, then writes the
    plan's rows as codes. Padding rows stay.

    Returns:
        As `forward`, with the codes as the output.
    """
    rows = query.new_zeros(*query.shape[:2], head_size_v)
    result = forward(layer, query, key, value, kv_cache, attn_metadata, rows)
    written = rows.shape[0] if attn_metadata is None else attn_metadata.num_actual_tokens
    output.write(rows[:written])
    return (output.codes, result[1]) if isinstance(result, tuple) else output.codes


def _sketch(x: object) -> str:
    if not isinstance(x, torch.Tensor):
        return "none" if x is None else type(x).__name__
    apart = "" if x.is_contiguous() else f" with strides {x.stride()}"
    return f"{x.dtype} {tuple(x.shape)} on {x.device}{apart}"
