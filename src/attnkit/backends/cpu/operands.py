"""Operands of the native library: a batch, a layer, a cache's format, a weight, as C structs.

In: tensors and a layer's variant. Out: addresses of structs that mirror those of `visible.h`, `call.h`
and `linear.c`, held together with the tensors their pointers point into.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.contract import AttentionVariant
from attnkit.kvcache.codecs import PerTokenHeadCodec
from attnkit.kvcache.formats import CacheFormat, layer_scale

_KINDS = {
    "fp8": 0,
    "fp8_e4m3": 0,
    "fp8_per_token_head": 0,
    "fp8_e5m2": 1,
    "int8_per_token_head": 2,
    "int4_per_token_head": 3,
    "nvfp4": 4,
}
"""Formats whose codes the library reads and writes, by the names `codes.h` gives these."""

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_served", _INT),
        ("served", _POINTER),
        ("query_start_loc", _POINTER),
        ("seq_lens", _POINTER),
        ("causal", _POINTER),
        ("block_table", _POINTER),
        ("table_stride", _INT),
        ("spans", _POINTER),
        ("prefix_lens", _POINTER),
        ("tree", _POINTER),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_size", _INT),
        ("head_size_v", _INT),
        ("window", _INT),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("slopes", _POINTER),
        ("sinks", _POINTER),
        ("alibi_sqrt", _INT),
    )


class _Codes(ctypes.Structure):
    _fields_ = (
        ("kind", _INT),
        ("token_scales", _INT),
        ("k_scale", _POINTER),
        ("v_scale", _POINTER),
        ("k_stride", _INT),
        ("v_stride", _INT),
    )


LINEAR_BLOCK = 32
"""Columns of a block of `linear.c`, and what a weight's channels are a multiple of."""

CODED_COLUMNS, CODED_GROUP = 16, 32
"""Columns of a block of `coded.c`, and channels that share a scale."""


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("columns", _INT),
        ("channels", _INT),
    )


class _Coded(ctypes.Structure):
    _fields_ = (
        ("codes", _POINTER),
        ("bias", _POINTER),
        ("bits", _INT),
        ("columns", _INT),
        ("channels", _INT),
    )


@dataclass(frozen=True, eq=False)
class NativeBatch:
    """A batch as `attend.c` reads it; holds the tensors its pointers point into."""

    address: int
    table_width: int
    _struct: _Batch
    _tensors: tuple[torch.Tensor | None, ...]

    @classmethod
    def pack(
        cls,
        served: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        causal: torch.Tensor,
        block_table: torch.Tensor | None,
        spans: torch.Tensor | None = None,
        prefix_lens: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
    ) -> NativeBatch:
        """Pack rows `served` of a batch of R requests.

        Args:
            served: int32 (n,), the requests a call serves; each has at least one query token.
            query_start_loc: int32 (R + 1,).
            seq_lens: int32 (R,).
            causal: bool (R,).
            block_table: int32 (R, W), rows of any stride; None: the keys of a request are the rows
                of K and V at its own tokens, and `seq_lens` is not read.
            spans: int32 (T, 2), keys [start, end) that a token sees beside the layer's mask.
            prefix_lens: int32 (R,), keys below are not left of any window.
            tree: int64 (T,), which of its request's tokens a token sees, bit by bit; 0: no tree.
        """
        for tensor, dtype in (
            (served, torch.int32),
            (query_start_loc, torch.int32),
            (seq_lens, torch.int32),
            (causal, torch.bool),
        ):
            assert tensor.dtype == dtype, f"expected {dtype}, got {tensor.dtype}"
            assert tensor.is_contiguous(), "expected a dense vector"
        if block_table is not None:
            assert block_table.dtype == torch.int32, "block table is not int32"
            dense = block_table.stride(1) == 1 or block_table.shape[1] <= 1
            assert dense or not block_table.numel(), "block table rows are not dense"
        for tensor in (spans, prefix_lens):
            assert tensor is None or tensor.dtype == torch.int32, "a mask is not int32"
            assert tensor is None or tensor.is_contiguous(), "a mask is not dense"
        assert tree is None or tree.dtype == torch.int64, "a tree is not int64"
        assert tree is None or tree.is_contiguous(), "a tree is not dense"
        struct = _Batch(
            served.shape[0],
            served.data_ptr(),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            causal.data_ptr(),
            None if block_table is None else block_table.data_ptr(),
            0 if block_table is None else block_table.stride(0),
            None if spans is None else spans.data_ptr(),
            None if prefix_lens is None else prefix_lens.data_ptr(),
            None if tree is None else tree.data_ptr(),
        )
        return cls(
            ctypes.addressof(struct),
            0 if block_table is None else block_table.shape[1],
            struct,
            (served, query_start_loc, seq_lens, causal, block_table, spans, prefix_lens, tree),
        )


@dataclass(frozen=True, eq=False)
class NativeLayer:
    """A layer's score, mask and sizes as `attend.c` reads them."""

    address: int
    _struct: _Layer
    _tensors: tuple[torch.Tensor | None, ...]

    @classmethod
    def pack(
        cls,
        variant: AttentionVariant,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int,
    ) -> NativeLayer:
        slopes, sinks = variant.alibi_slopes, variant.sinks
        struct = _Layer(
            num_heads,
            num_kv_heads,
            head_size,
            head_size_v,
            variant.sliding_window or 0,
            variant.scale,
            variant.logits_soft_cap or 0.0,
            None if slopes is None else slopes.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            int(variant.use_alibi_sqrt),
        )
        return cls(ctypes.addressof(struct), struct, (slopes, sinks))

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeLayer:
        return self  # Nothing in it changes, and an address cannot be copied.


@dataclass(frozen=True, eq=False)
class NativeCodes:
    """How a quantised cache stores K and V, with the layer's scales of the moment.

    Attributes:
        address: of the struct.
        value_offset: bytes from a key to its value.
    """

    address: int
    value_offset: int
    _struct: _Codes
    _tensors: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def pack(
        cls,
        stored: CacheFormat,
        head_size: int,
        head_size_v: int,
        num_kv_heads: int,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> NativeCodes:
        """Pack a format that has codes.

        Args:
            stored: the format.
            head_size, head_size_v: that fit it.
            num_kv_heads: of the layer.
            k_scale, v_scale: one number or (num_kv_heads,), the layer's.

        Raises:
            ConfigurationError: a scale has another shape.
        """
        scales = [
            layer_scale(name, scale, num_kv_heads)
            for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
        ]
        read = stored.reads_layer_scales
        struct = _Codes(
            _KINDS[stored.name],
            isinstance(stored.codec, PerTokenHeadCodec),
            *(scale.data_ptr() if read else None for scale in scales),
            *(0 if scale.numel() == 1 else 1 for scale in scales),
        )
        offset = stored.layout(head_size, head_size_v).v_codes
        return cls(ctypes.addressof(struct), offset, struct, (scales[0], scales[1]))


@dataclass(frozen=True, eq=False)
class NativeLinear:
    """A packed weight as `linear.c` reads it; holds the tensors its pointers point into."""

    address: int
    _struct: _Linear
    _tensors: tuple[torch.Tensor | None, ...]

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear:
        """
        Args:
            weight: bfloat16 (out_features, in_features), multiples of 32, in the blocks that `linear.c`
                describes, packed so by oneDNN or dense: the caller's promise.
            bias: bfloat16 (out_features,), dense; None: there is none.
        """
        address = torch.ops.mkldnn.data_ptr(weight) if weight.is_mkldnn else weight.data_ptr()
        struct = _Linear(
            weight=address,
            bias=None if bias is None else bias.data_ptr(),
            columns=weight.shape[0],
            channels=weight.shape[1],
        )
        return cls(ctypes.addressof(struct), struct, (weight, bias))


@dataclass(frozen=True, eq=False)
class NativeCodedLinear:
    """A weight in codes as `coded.c` reads it; holds the tensors its pointers point into."""

    address: int
    _struct: _Coded
    _tensors: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(
        cls, codes: torch.Tensor, bias: torch.Tensor | None, bits: int, in_features: int
    ) -> NativeCodedLinear:
        """
        Args:
            codes: uint8, dense: the blocks that `coded.c` describes.
            bias: float32 (out_features,), dense; None: there is none.
            bits: 4 or 8, of a code.
            in_features: multiples of 32.
        """
        group_bytes = CODED_COLUMNS * (CODED_GROUP * bits // 8 + 4)
        struct = _Coded(
            codes=codes.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            bits=bits,
            columns=codes.numel() // group_bytes * CODED_GROUP // in_features * CODED_COLUMNS,
            channels=in_features,
        )
        return cls(ctypes.addressof(struct), struct, (codes, bias))
