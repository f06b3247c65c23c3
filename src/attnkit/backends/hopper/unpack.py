"""The unpack kernel: pages of float8 codes as pages of 16-bit numbers, for the prefill kernel.

In: the pool, and which pages of which requests. Out: a pool of those pages alone, in that order. The
numbers are the codes themselves, exactly: the layer's scales are left to who reads them. Against a
prompt's products the copy is small (4 bytes a number, once for all heads of a group and row tiles).
Device code, in plain Triton; `cache_launch.unpack_call` starts it.
"""

import triton
import triton.language as tl

from attnkit.backends.codes import e4m3_numbers


@triton.jit(
    do_not_specialize=["num_pages", "table_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "table_ptr", "seq_lens_ptr"],
)
def unpack_kernel(
    k_ptr,
    v_ptr,
    pool_ptr,
    pages_ptr,
    num_pages,
    table_ptr,
    table_stride,
    seq_lens_ptr,
    k_stride_page,
    k_stride_head,
    k_stride_row,
    v_stride_page,
    v_stride_head,
    v_stride_row,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (page, head) copies one KV head of a page, ROWS tokens at a time."""
    i = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.load(pages_ptr + i)
    index = tl.load(pages_ptr + num_pages + i)
    if index * PAGE_SIZE >= tl.load(seq_lens_ptr + request):
        return
    page = tl.load(table_ptr + request.to(tl.int64) * table_stride + index).to(tl.int64)
    columns = tl.arange(0, HEAD_SIZE)[None, :]
    for first in range(0, PAGE_SIZE, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        key = tl.load(
            k_ptr + page * k_stride_page + head * k_stride_head + row * k_stride_row + columns
        )
        value = tl.load(
            v_ptr + page * v_stride_page + head * v_stride_head + row * v_stride_row + columns
        )
        place = (i.to(tl.int64) * NUM_KV_HEADS + head) * PAGE_SIZE + row
        place = pool_ptr + place * (2 * HEAD_SIZE) + columns
        tl.store(place, e4m3_numbers(key).to(pool_ptr.dtype.element_ty))
        tl.store(place + HEAD_SIZE, e4m3_numbers(value).to(pool_ptr.dtype.element_ty))
