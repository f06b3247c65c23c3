"""Calls into the native library: tensors in, one foreign call a layer out.

In: a batch and a layer, packed once into the C structs of `attend.c` and `call.h` (which this file
mirrors), and per call the tensors. Out: attention in `output`, or K/V in the cache. Shapes are the
caller's promise; what would make the C code read or write outside a tensor (block ids, slots) it
checks itself, before anything is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.contract import AttentionVariant
from attnkit.errors import BatchError
from attnkit.kvcache.codecs import PerTokenHeadCodec
from attnkit.kvcache.formats import CacheFormat, layer_scale

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes the library reads and writes, by the names `vector.h` gives them."""

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
_ATTEND_ARGUMENTS = (
    [_POINTER, _POINTER]  # batch, layer
    + [_POINTER, _INT, _INT, _INT]  # query: dtype, token stride, head stride
    + 2 * [_POINTER, _INT, _INT, _INT]  # keys, values: block, token, head stride
    + [_INT, _POINTER, _INT, _INT, _INT]  # their dtype, codes, num_blocks, block_size, table_width
    + [_POINTER, _INT, _INT, _INT]  # output, as the query
    + [_POINTER, _INT, _INT, _POINTER]  # lse, its token stride, num_threads, GOMP_parallel
)
_WRITE_ARGUMENTS = (
    2 * [_POINTER, _INT, _INT]  # key, value: token, head stride in bytes
    + [_INT, _INT, _INT]  # their dtype, head_size, head_size_v
    + [_POINTER, _INT, _INT, _INT, _POINTER]  # cache: block, token, head stride in bytes; codes
    + [_POINTER, _INT, _INT]  # slots, num_tokens, num_heads
    + [_INT, _INT, _INT, _POINTER]  # num_blocks, block_size, num_threads, GOMP_parallel
)


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


class NativeKernels:
    """The loaded library. Calls release the GIL and run on torch's own threads."""

    def __init__(self, path: str, parallel: int | None) -> None:
        """Load a library built from `attend.c` and `write.c`.

        Args:
            path: of the shared library.
            parallel: address of GOMP_parallel in the OpenMP runtime torch runs on; None: calls run
                on the calling thread alone.

        Raises:
            OSError: the file cannot be loaded.
            AttributeError: it is not such a library.
        """
        library = ctypes.CDLL(path)
        self._attend: Callable[..., int] = _function(library.attnkit_attend, _ATTEND_ARGUMENTS)
        self._write_kv: Callable[..., int] = _function(library.attnkit_write_kv, _WRITE_ARGUMENTS)
        self._parallel = parallel

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeKernels:
        return self  # A library is loaded once.

    def attend_paged(
        self,
        batch: NativeBatch,
        layer: NativeLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        codes: NativeCodes | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attend to pages.

        Args:
            query: (num_tokens, num_heads, head_size).
            kv_cache: (num_blocks, num_kv_heads, block_size, head_size + head_size_v), K first; with
                codes the last dimension is that of the format, in elements of a byte.
            codes: None: the elements are the numbers.
            output: (num_tokens, num_heads, head_size_v); rows of the served requests are written.
            lse: float32 (num_tokens, num_heads), likewise; None: not wanted.

        The last dimension of every tensor is dense.

        Raises:
            BatchError: a block id a request needs is outside the cache, or its row is too short.
        """
        num_blocks, _, block_size, _ = kv_cache.shape
        block_stride, head_stride, token_stride, _ = kv_cache.stride()
        keys = kv_cache.data_ptr()
        offset = query.shape[2] * kv_cache.element_size() if codes is None else codes.value_offset
        q_token, q_head, _ = query.stride()
        out_token, out_head, _ = output.stride()
        self._check(
            self._attend(
                batch.address,
                layer.address,
                query.data_ptr(),
                DTYPE_CODES[query.dtype],
                q_token,
                q_head,
                keys,
                block_stride,
                token_stride,
                head_stride,
                keys + offset,
                block_stride,
                token_stride,
                head_stride,
                DTYPE_CODES[kv_cache.dtype] if codes is None else 0,
                None if codes is None else codes.address,
                num_blocks,
                block_size,
                batch.table_width,
                output.data_ptr(),
                DTYPE_CODES[output.dtype],
                out_token,
                out_head,
                None if lse is None else lse.data_ptr(),
                0 if lse is None else lse.stride(0),
                torch.get_num_threads(),
                self._parallel,
            ),
            num_blocks,
        )

    def attend_pages(
        self,
        batch: NativeBatch,
        layer: NativeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        codes: NativeCodes | None,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """`attend_paged` where keys and values are tensors of their own, or the values lie inside the
        keys.

        Args:
            key: (num_blocks, num_kv_heads, block_size, head_size), of any strides but the last; with
                codes, of bytes.
            value: likewise with head_size_v.
        """
        num_blocks, _, block_size, _ = key.shape
        k_block, k_head, k_token, _ = key.stride()
        v_block, v_head, v_token, _ = value.stride()
        q_token, q_head, _ = query.stride()
        out_token, out_head, _ = output.stride()
        self._check(
            self._attend(
                batch.address,
                layer.address,
                query.data_ptr(),
                DTYPE_CODES[query.dtype],
                q_token,
                q_head,
                key.data_ptr(),
                k_block,
                k_token,
                k_head,
                value.data_ptr(),
                v_block,
                v_token,
                v_head,
                DTYPE_CODES[key.dtype] if codes is None else 0,
                None if codes is None else codes.address,
                num_blocks,
                block_size,
                batch.table_width,
                output.data_ptr(),
                DTYPE_CODES[output.dtype],
                out_token,
                out_head,
                None if lse is None else lse.data_ptr(),
                0 if lse is None else lse.stride(0),
                torch.get_num_threads(),
                self._parallel,
            ),
            num_blocks,
        )

    def attend_tokens(
        self,
        batch: NativeBatch,
        layer: NativeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attend to K and V of this step's own tokens, (num_tokens, num_kv_heads, size) each; the
        batch was packed without a block table."""
        q_token, q_head, _ = query.stride()
        k_token, k_head, _ = key.stride()
        v_token, v_head, _ = value.stride()
        out_token, out_head, _ = output.stride()
        self._check(
            self._attend(
                batch.address,
                layer.address,
                query.data_ptr(),
                DTYPE_CODES[query.dtype],
                q_token,
                q_head,
                key.data_ptr(),
                0,
                k_token,
                k_head,
                value.data_ptr(),
                0,
                v_token,
                v_head,
                DTYPE_CODES[key.dtype],
                None,
                0,
                1,
                0,
                output.data_ptr(),
                DTYPE_CODES[output.dtype],
                out_token,
                out_head,
                None if lse is None else lse.data_ptr(),
                0 if lse is None else lse.stride(0),
                torch.get_num_threads(),
                self._parallel,
            ),
            0,
        )

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        codes: NativeCodes | None,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write K and V of tokens to their slots; -1 is skipped.

        Args:
            key: (num_tokens, num_kv_heads, head_size), in the dtype of the cache unless that has codes.
            value: (num_tokens, num_kv_heads, head_size_v), likewise.
            kv_cache: as in `attend_paged`.
            codes: None: the elements are the numbers.
            slot_mapping: int64 (n,), dense, n <= num_tokens.

        Raises:
            BatchError: a slot is outside the cache.
        """
        num_blocks, num_heads, block_size, _ = kv_cache.shape
        block_stride, head_stride, token_stride, _ = kv_cache.stride()
        cache_size, size = kv_cache.element_size(), key.element_size()
        k_token, k_head, _ = key.stride()
        v_token, v_head, _ = value.stride()
        status = self._write_kv(
            key.data_ptr(),
            k_token * size,
            k_head * size,
            value.data_ptr(),
            v_token * size,
            v_head * size,
            DTYPE_CODES[key.dtype],
            key.shape[2],
            value.shape[2],
            kv_cache.data_ptr(),
            block_stride * cache_size,
            token_stride * cache_size,
            head_stride * cache_size,
            None if codes is None else codes.address,
            slot_mapping.data_ptr(),
            slot_mapping.shape[0],
            num_heads,
            num_blocks,
            block_size,
            torch.get_num_threads(),
            self._parallel,
        )
        if status:
            raise BatchError(
                f"slot_mapping has a slot outside the cache of {num_blocks} blocks of {block_size}; "
                f"give slots from 0 to {num_blocks * block_size - 1}, or -1 to skip a token"
            )

    @staticmethod
    def _check(status: int, num_blocks: int) -> None:
        if status == 1:
            raise MemoryError("the CPU attention kernel could not allocate its partial sums")
        if status == 2:
            raise BatchError(
                f"a request needs a block that its block table row does not have or that is outside "
                f"the cache; block ids are 0 to {num_blocks - 1} and a row needs "
                "ceil(seq_len / block_size) of them"
            )


def _function(function: Any, argtypes: list[Any]) -> Callable[..., int]:
    function.argtypes = argtypes
    function.restype = _INT
    return function
