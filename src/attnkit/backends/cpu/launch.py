"""Calls into the native library: tensors in, one foreign call a layer out.

In: a batch and a layer (`operands`), and per call the tensors. Out: attention in `output`, or K/V in
the cache. Shapes are the caller's promise; what would make the C code read or write outside a tensor
(block ids, slots) it checks itself, before anything is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnkit.backends.cpu.operands import (
    NativeBatch,
    NativeCodedLinear,
    NativeCodes,
    NativeLayer,
    NativeLinear,
)
from attnkit.errors import BatchError

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes the library reads and writes, by the names `vector.h` gives them."""

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
_LINEAR_ARGUMENTS = [
    _POINTER,
    _POINTER,
    _POINTER,
    _INT,
    _INT,
    _POINTER,
]  # linear, x, y, rows; as above
_CODED_ARGUMENTS = [_POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER]
# weights, y, their number, x, its dtype, rows; as above


class NativeKernels:
    """The loaded library. Calls release the GIL and run on torch's own threads."""

    def __init__(self, path: str, parallel: int | None) -> None:
        """Load a library built from `native.SOURCES`.

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
        self._linear: Callable[..., int] = _function(library.attnkit_linear, _LINEAR_ARGUMENTS)
        self._multiply_codes = _function(library.attnkit_multiply_codes, _CODED_ARGUMENTS)
        self._parallel = parallel
        self.has_code_products = bool(_function(library.attnkit_has_code_products, [])())
        self.has_matrix_unit = bool(_function(library.attnkit_has_matrix_unit, [])())
        self.has_vector_products = bool(_function(library.attnkit_has_vector_products, [])())

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
        block, head, token, _ = kv_cache.stride()
        strides = block, token, head
        value = query.shape[2] if codes is None else codes.value_offset
        address = kv_cache.data_ptr()
        self._call(
            batch,
            layer,
            query,
            (address, *strides),
            (address + value * kv_cache.element_size(), *strides),
            DTYPE_CODES[kv_cache.dtype] if codes is None else 0,
            codes,
            (num_blocks, block_size, batch.table_width),
            output,
            lse,
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
        strides = [x.stride() for x in (key, value)]
        k, v = (
            (x.data_ptr(), block, token, head)
            for x, (block, head, token, _) in zip((key, value), strides, strict=True)
        )
        dtype = DTYPE_CODES[key.dtype] if codes is None else 0
        cache = (num_blocks, block_size, batch.table_width)
        self._call(batch, layer, query, k, v, dtype, codes, cache, output, lse)

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
        k, v = ((x.data_ptr(), 0, x.stride(0), x.stride(1)) for x in (key, value))
        dtype = DTYPE_CODES[key.dtype]
        self._call(batch, layer, query, k, v, dtype, None, (0, 1, 0), output, lse)

    def _call(
        self,
        batch: NativeBatch,
        layer: NativeLayer,
        query: torch.Tensor,
        key: tuple[int, int, int, int],
        value: tuple[int, int, int, int],
        dtype: int,
        codes: NativeCodes | None,
        cache: tuple[int, int, int],
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """The call. Keys and values are an address and the strides of blocks, tokens and heads;
        `cache` is its number of blocks, their size, and the width of the block table."""
        status = self._attend(
            batch.address,
            layer.address,
            query.data_ptr(),
            DTYPE_CODES[query.dtype],
            *query.stride()[:2],
            *key,
            *value,
            dtype,
            None if codes is None else codes.address,
            *cache,
            output.data_ptr(),
            DTYPE_CODES[output.dtype],
            *output.stride()[:2],
            None if lse is None else lse.data_ptr(),
            0 if lse is None else lse.stride(0),
            torch.get_num_threads(),
            self._parallel,
        )
        if status == 1:
            raise MemoryError("the CPU attention kernel could not allocate its partial sums")
        if status == 2:
            raise BatchError(
                f"a request needs a block that its block table row does not have or that is outside "
                f"the cache; block ids are 0 to {cache[0] - 1} and a row needs "
                "ceil(seq_len / block_size) of them"
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

    def multiply(
        self, linears: Sequence[NativeLinear], x: torch.Tensor, outputs: Sequence[torch.Tensor]
    ) -> None:
        """Products of the same rows with the weights of linear layers, where vectors multiply any number
        of rows (`has_vector_products`) or a matrix unit few (`has_matrix_unit`).

        Args:
            linears: of in_features each.
            x: bfloat16 (num_rows, in_features), dense, any number of dimensions before the last.
            outputs: likewise (num_rows, out_features), one for each.
        """
        pointers = _POINTER * len(linears)
        status = self._linear(
            pointers(*(linear.address for linear in linears)),
            pointers(*(output.data_ptr() for output in outputs)),
            len(linears),
            x.data_ptr(),
            x.numel() // x.shape[-1],
            torch.get_num_threads(),
            self._parallel,
        )
        if status:
            raise MemoryError("a product could not allocate its rows in float32")

    def multiply_codes(
        self,
        linears: Sequence[NativeCodedLinear],
        x: torch.Tensor,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Products of the same rows with weights in codes, where the processor has them
        (`has_code_products`).

        Args:
            linears: of in_features each.
            x: (num_rows, in_features) of `DTYPE_CODES`, dense; any dimensions before the last.
            outputs: likewise (num_rows, out_features), one for each.
        """
        pointers = _POINTER * len(linears)
        status = self._multiply_codes(
            pointers(*(linear.address for linear in linears)),
            pointers(*(output.data_ptr() for output in outputs)),
            len(linears),
            x.data_ptr(),
            DTYPE_CODES[x.dtype],
            x.numel() // x.shape[-1],
            torch.get_num_threads(),
            self._parallel,
        )
        if status:
            raise MemoryError("a product with codes could not allocate codes of its rows")


def _function(function: Any, argtypes: list[Any]) -> Callable[..., int]:
    function.argtypes = argtypes
    function.restype = _INT
    return function
