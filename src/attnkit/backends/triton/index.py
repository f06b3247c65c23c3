"""The kernels of an indexer's keys: into pages, and their scores.

In: small keys and queries, and pages of keys, numbers or float8 codes with a float32 scale per token.
Out: the pages; float32 scores (rows, width), of which a row holds as many as its query sees, or none
where all of these are listed. Device code; `index_launch` starts it. How many keys a query sees is read
here, so one launch serves every batch of as many queries.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from attnkit.backends.codes import bits_of, numbers
from attnkit.backends.queries import seen_by_query
from attnkit.backends.stored import Encoding
from attnkit.backends.triton.index_top import ranks_of
from attnkit.backends.triton.tile import load_rows, offsets_of, pages_of
from attnkit.backends.triton.write import encode_vectors, slots_of

E4M3 = tl.constexpr(int(Encoding.E4M3))


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_mapping_ptr"],
)
def index_write_kernel(
    key_ptr,
    codes_ptr,
    scales_ptr,
    slot_mapping_ptr,
    num_tokens,
    key_stride,
    stride_page,
    stride_row,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
):
    """One program writes BLOCK_T keys; slot -1 writes nothing. Strides of pages count UNIT elements."""
    token, written, page, row = slots_of(slot_mapping_ptr, num_tokens, PAGE_SIZE, BLOCK_T)
    key = load_rows(key_ptr, token * key_stride, written, HEAD_SIZE, BLOCK_D, True)
    places = page * stride_page + row * stride_row
    if scales_ptr is None:
        columns = tl.arange(0, BLOCK_D)
        tl.store(
            codes_ptr + places[:, None] + columns[None, :],
            key.to(codes_ptr.dtype.element_ty),
            mask=written[:, None] & (columns < HEAD_SIZE)[None, :],
        )
    else:
        encode_vectors(
            key.to(tl.float32),
            None,
            codes_ptr,
            scales_ptr,
            places,
            written,
            HEAD_SIZE,
            BLOCK_D,
            E4M3,
            UNIT,
            HAS_FLOAT8,
        )


@triton.jit
def as_float16(q):
    """Rows of bfloat16 as float16, and the powers of two that they were divided by. Exact but for what
    is 2^32 times smaller than a row's largest number: a code becomes a float16 in half the
    instructions."""
    bits = bits_of(tl.max(tl.abs(q.to(tl.float32)), 1))
    # The largest number gets the exponent 14; of a row with infinities no finite one may overflow.
    exponent = tl.minimum(tl.maximum(bits >> 23, 15), 254)
    factors = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * inverse[:, None]).to(tl.float16), factors


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "first_query",
        "max_seen",
        "k",
        "num_splits",
        "table_stride",
        "scores_stride",
    ],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "table_ptr"],
)
def index_score_kernel(
    q_ptr,
    weights_ptr,
    codes_ptr,
    scales_ptr,
    scores_ptr,
    best_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    table_ptr,
    num_reqs,
    first_query,
    max_seen,
    k,
    num_splits,
    q_stride_token,
    q_stride_head,
    weights_stride,
    stride_page,
    stride_row,
    table_stride,
    scores_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program s of `num_splits` scores every num_splits-th tile of the keys that a query sees. Its heads
    are the columns of a product, so that a thread adds up most of a key's by itself.

    Scores lie from the `first_query` on, queries from their first; a query that sees no more than k has
    none. `best_ptr`: the program's highest rank, (rows, num_splits). Strides of pages count UNIT
    elements."""
    split = tl.program_id(0) % num_splits
    row = tl.program_id(0) // num_splits
    query = first_query + row
    request, num_seen = seen_by_query(query_start_loc_ptr, seq_lens_ptr, num_reqs, query, BLOCK_R)
    num_seen = tl.minimum(num_seen, max_seen)
    if (num_seen <= k) | (split * BLOCK_N >= num_seen):
        return
    table = table_ptr + request.to(tl.int64) * table_stride
    head = tl.arange(0, BLOCK_H)
    live = head < NUM_HEADS
    token = query.to(tl.int64)
    q_offsets = token * q_stride_token + head.to(tl.int64) * q_stride_head
    q = load_rows(q_ptr, q_offsets, live, HEAD_SIZE, BLOCK_D, True)
    weights = tl.load(weights_ptr + token * weights_stride + head, mask=live, other=0.0)
    weights = weights.to(tl.float32)
    if scales_ptr is not None and q.dtype == tl.bfloat16:
        q, factors = as_float16(q)
        weights = weights * factors
    best = tl.zeros([BLOCK_N], tl.uint32)
    page = pages_of(table, split * BLOCK_N, num_seen, PAGE_SIZE, BLOCK_N)
    for start in tl.range(split * BLOCK_N, num_seen, num_splits * BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        keys = start + tl.arange(0, BLOCK_N)
        seen = keys < num_seen
        offsets = offsets_of(table, page, keys, 0, stride_page, stride_row, PAGE_SIZE)
        key = load_rows(codes_ptr, offsets * UNIT, seen, HEAD_SIZE, BLOCK_D, True)
        page = pages_of(table, start + num_splits * BLOCK_N, num_seen, PAGE_SIZE, BLOCK_N)
        key = numbers(key, CODES, q.dtype)
        s = tl.dot(key, tl.trans(q), input_precision="ieee")
        # A bad key's NaN stays; heads past the last one are no scores, whatever they make of infinity.
        s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if NUM_HEADS < BLOCK_H:
            s = tl.where(live[None, :], s, 0.0)
        score = tl.sum(s * weights[None, :], 1)
        if scales_ptr is not None:
            score = score * tl.load(scales_ptr + offsets, mask=seen, other=0.0)
        tl.store(scores_ptr + row.to(tl.int64) * scores_stride + keys, score, mask=seen)
        best = tl.maximum(best, tl.where(seen, ranks_of(score), 0))
    tl.store(best_ptr + tl.program_id(0), tl.max(best, 0).to(tl.int32, bitcast=True))
