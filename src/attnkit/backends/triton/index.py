"""The kernels of an indexer: keys into pages, scores of a step's queries, and the best positions.

In: small keys and queries, and pages of keys, numbers or float8 codes with a float32 scale per token.
Out: the pages; float32 scores (rows, width), of which a row holds as many as its query sees, or none
where all of these are listed; lists of positions, ascending. Device code; `index_launch` starts it. How
many keys a query sees is read here, so one launch serves every batch of as many queries.
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
from attnkit.backends.triton.tile import load_rows, offsets_of, pages_of
from attnkit.backends.triton.write import encode_vectors, slots_of

E4M3 = tl.constexpr(int(Encoding.E4M3))
BINS = tl.constexpr(256)
"""Values of a digit of a score's bits."""


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
        x = key.to(tl.float32)
        encode_vectors(
            x, None, codes_ptr, scales_ptr, places, written, HEAD_SIZE, BLOCK_D, E4M3, UNIT
        )


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
    """Program s of `num_splits` scores every num_splits-th tile of the keys that a query sees: its heads
    are the rows of a product. Scores lie from the `first_query` on, queries from their first; a query
    that sees no more than k has none. Strides of pages count UNIT elements."""
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
    page = pages_of(table, split * BLOCK_N, num_seen, PAGE_SIZE, BLOCK_N)
    for start in tl.range(split * BLOCK_N, num_seen, num_splits * BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        keys = start + tl.arange(0, BLOCK_N)
        seen = keys < num_seen
        offsets = offsets_of(table, page, keys, 0, stride_page, stride_row, PAGE_SIZE)
        key = load_rows(codes_ptr, offsets * UNIT, seen, HEAD_SIZE, BLOCK_D, True)
        page = pages_of(table, start + num_splits * BLOCK_N, num_seen, PAGE_SIZE, BLOCK_N)
        key = numbers(key, CODES, q.dtype)
        s = tl.dot(q, tl.trans(key), input_precision="ieee")
        # Not `maximum`, which would make NaN of a bad key 0. Rows past the last head are no scores.
        s = tl.where((s < 0) | (head >= NUM_HEADS)[:, None], 0.0, s)
        score = tl.sum(s * weights[:, None], 0)
        if scales_ptr is not None:
            score = score * tl.load(scales_ptr + offsets, mask=seen, other=0.0)
        tl.store(scores_ptr + row.to(tl.int64) * scores_stride + keys, score, mask=seen)


@triton.jit
def ranks_of(scores):
    """uint32 that are ordered as float32 scores are: equal for zeros of both signs, and NaN as -inf."""
    scores = tl.where(scores == scores, scores, float("-inf"))
    bits = bits_of(tl.where(scores == 0, 0.0, scores))
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def load_ranks(scores_ptr, keys, num_seen):
    return ranks_of(tl.load(scores_ptr + keys, mask=keys < num_seen, other=float("-inf")))


@triton.jit
def next_digit(scores, num_seen, limit, room, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The next digit of the rank of the room-th best of those that begin as `limit` does; what is left
    of the room where ranks with a greater one are taken."""
    BEFORE: tl.constexpr = (0xFFFFFF00 << SHIFT) & 0xFFFFFFFF
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, num_seen, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        ranks = load_ranks(scores, keys, num_seen)
        alike = (keys < num_seen) & ((ranks & BEFORE) == limit)
        digits = ((ranks >> SHIFT) & 0xFF).to(tl.int32)
        counts += tl.histogram(digits, BINS, mask=alike).to(tl.int32)
    bins = tl.arange(0, BINS)
    enough = tl.cumsum(counts, 0, reverse=True) >= room
    digit = tl.max(tl.where(enough, bins, 0), 0)
    room -= tl.sum(tl.where(bins > digit, counts, 0), 0)
    return limit | (digit.to(tl.uint32) << SHIFT), room


@triton.jit(
    do_not_specialize=["num_reqs", "first_query", "max_seen", "k", "scores_stride", "lists_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr"],
)
def index_top_kernel(
    scores_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    lists_ptr,
    num_reqs,
    first_query,
    max_seen,
    k,
    scores_stride,
    lists_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program lists the k best positions of a query, all where it sees no more; then -1.

    The rank of the k-th best is found digit by digit: how many ranks that begin as it does have each
    next digit. Positions of better ranks are listed, and of equal ones as many as there is room for,
    the lower first.
    """
    row = tl.program_id(0)
    query = first_query + row
    scores = scores_ptr + row.to(tl.int64) * scores_stride
    lists = lists_ptr + query.to(tl.int64) * lists_stride
    _, num_seen = seen_by_query(query_start_loc_ptr, seq_lens_ptr, num_reqs, query, BLOCK_R)
    num_seen = tl.minimum(tl.maximum(num_seen, 0), max_seen)
    num_listed = tl.minimum(num_seen, k)
    lanes = tl.arange(0, BLOCK_N)
    for start in tl.range(num_listed // BLOCK_N * BLOCK_N, k, BLOCK_N):
        places = start + lanes
        tl.store(lists + places, -1, mask=(places >= num_listed) & (places < k))

    limit = tl.zeros([], tl.uint32)
    room = num_listed
    # Where all are listed there are no scores; every rank is above 0, and there is nothing to find.
    num_scored = tl.where(num_seen > k, num_seen, 0)
    if num_seen > k:
        limit, room = next_digit(scores, num_seen, limit, room, 24, BLOCK_N)
        limit, room = next_digit(scores, num_seen, limit, room, 16, BLOCK_N)
        limit, room = next_digit(scores, num_seen, limit, room, 8, BLOCK_N)
        limit, room = next_digit(scores, num_seen, limit, room, 0, BLOCK_N)

    num_equal = tl.zeros([], tl.int32)
    end = tl.zeros([], tl.int32)
    for start in tl.range(0, num_seen, BLOCK_N):
        keys = start + lanes
        ranks = load_ranks(scores, keys, num_scored)
        seen = keys < num_seen
        equal = seen & (ranks == limit)
        turn = num_equal + tl.cumsum(equal.to(tl.int32), 0)
        taken = (seen & (ranks > limit)) | (equal & (turn <= room))
        places = end + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(lists + places, keys, mask=taken)
        num_equal += tl.sum(equal.to(tl.int32), 0)
        end += tl.sum(taken.to(tl.int32), 0)
