"""The kernel that turns lists of positions into rows of the cache, for layers over chosen keys.

In: per query a list of positions, lengths and block tables. Out: per query a block table over pages of
one token, and its length: what `mla.sparse.ChosenRows` says, in one launch. Device code; `mla_launch`
starts it.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from attnkit.backends.queries import seen_by_query


@triton.jit(
    do_not_specialize=["num_reqs", "size", "lists_stride", "table_stride", "rows_apart"],
    do_not_specialize_on_alignment=[
        "lists_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "table_ptr",
        "rows_ptr",
        "num_chosen_ptr",
    ],
)
def choose_rows_kernel(
    lists_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    table_ptr,
    rows_ptr,
    num_chosen_ptr,
    num_reqs,
    size,
    lists_stride,
    table_stride,
    rows_apart,
    PAGE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program a query: those of its positions that name a key move to the front, in order; zeros
    behind them."""
    query = tl.program_id(0)
    request, num_seen = seen_by_query(query_start_loc_ptr, seq_lens_ptr, num_reqs, query, BLOCK_R)
    table = table_ptr + request.to(tl.int64) * table_stride
    lists = lists_ptr + query.to(tl.int64) * lists_stride
    rows = rows_ptr + query.to(tl.int64) * size
    num_chosen = 0
    for first in range(0, size, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        position = tl.load(lists + k, mask=k < size, other=-1)
        names = (position >= 0) & (position < num_seen)
        block = tl.load(table + position // PAGE_SIZE, mask=names, other=0)
        place = num_chosen + tl.cumsum(names.to(tl.int32), 0) - 1
        tl.store(rows + place, block * rows_apart + position % PAGE_SIZE, mask=names)
        num_chosen += tl.sum(names.to(tl.int32), 0)
    for first in range(0, size, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        tl.store(rows + k, tl.zeros([BLOCK_K], tl.int32), mask=(k >= num_chosen) & (k < size))
    tl.store(num_chosen_ptr + query, num_chosen)
