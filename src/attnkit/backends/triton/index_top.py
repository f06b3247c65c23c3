"""The kernels that list the best positions of each query, by scores.

In: float32 scores (rows, width) of which a row holds as many as its query sees, and the highest rank
that each program that scored has met. Out: lists of positions, ascending, of equal scores the lower
ones. Device code; `index_launch` starts it.

A row's scores are cut into slices, a program each. Ranks are sorted into bins, thirty-two for a power of
two, counted down from the row's best. How many of each slice are in which bin (`index_count_kernel`)
tells in which one the k-th best is, and where each slice's part of the list and of the ranks in that
bin begins (`index_sift_kernel`). Among these few every program finds the k-th best, and lists its own
slice (`index_list_kernel`). So nothing waits for another program inside a launch, and no bit depends on
which came first.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from attnkit.backends.codes import bits_of
from attnkit.backends.queries import seen_by_query

BINS = tl.constexpr(256)
"""Bins of a slice. The last one holds what is 2^8 times smaller than the best, and less."""
BIN_BITS = tl.constexpr(18)
"""Bits of a rank that differ inside a bin: all but sign, exponent and five bits of the fraction."""
COUNT_BITS = tl.constexpr(21)
"""Of one of three counts in an int64. Rows have fewer scores than that counts."""
COUNT_MASK = tl.constexpr((1 << 21) - 1)
PLAN_SIZE = tl.constexpr(8)
"""Numbers that `index_sift_kernel` leaves of a slice: the bin of the k-th best, scores above that bin,
of these in earlier slices, ranks of that bin in earlier slices and in all, and where its ranks begin."""


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
def best_of(best_ptr, num_splits, num_seen, SCORE_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """The highest rank of a row, whose scores `num_splits` programs have left."""
    num_splits = tl.minimum(num_splits, tl.cdiv(num_seen, SCORE_BLOCK))
    best = tl.zeros([BLOCK], tl.uint32)
    for first in tl.range(0, num_splits, BLOCK):
        split = first + tl.arange(0, BLOCK)
        ranks = tl.load(best_ptr + split, mask=split < num_splits, other=0)
        best = tl.maximum(best, ranks.to(tl.uint32, bitcast=True))
    return tl.max(best, 0)


@triton.jit
def my_slice(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, first_query, max_seen, BLOCK_R: tl.constexpr
):
    """The program's row, which slice of it, among all slices of the launch, and how many keys the row's
    query sees."""
    row = tl.program_id(0).to(tl.int64)
    query = first_query + tl.program_id(0)
    _, num_seen = seen_by_query(query_start_loc_ptr, seq_lens_ptr, num_reqs, query, BLOCK_R)
    num_seen = tl.minimum(tl.maximum(num_seen, 0), max_seen)
    return row, tl.program_id(1), row * tl.num_programs(1) + tl.program_id(1), num_seen


@triton.jit
def bins_of(ranks, best):
    """Of ranks up to the best, which is in bin 0."""
    return tl.minimum((best >> BIN_BITS) - (ranks >> BIN_BITS), BINS - 1).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_reqs", "first_query", "max_seen", "k", "num_splits", "scores_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr"],
)
def index_count_kernel(
    scores_ptr,
    best_ptr,
    counts_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_reqs,
    first_query,
    max_seen,
    k,
    num_splits,
    scores_stride,
    SCORE_BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (row, slice): how many of its ranks are in each bin, int32 (rows, slices, BINS)."""
    row, part, place, num_seen = my_slice(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, first_query, max_seen, BLOCK_R
    )
    if (num_seen <= k) | (part * SLICE >= num_seen):
        return
    best = best_of(best_ptr + row * num_splits, num_splits, num_seen, SCORE_BLOCK, 512)
    keys = part * SLICE + tl.arange(0, SLICE)
    ranks = load_ranks(scores_ptr + row * scores_stride, keys, num_seen)
    counts = tl.histogram(bins_of(ranks, best), BINS, mask=keys < num_seen)
    tl.store(counts_ptr + place * BINS + tl.arange(0, BINS), counts.to(tl.int32))


@triton.jit(
    do_not_specialize=["num_reqs", "first_query", "max_seen", "k", "num_splits", "scores_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr"],
)
def index_sift_kernel(
    scores_ptr,
    best_ptr,
    counts_ptr,
    sifted_ptr,
    plans_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_reqs,
    first_query,
    max_seen,
    k,
    num_splits,
    scores_stride,
    SCORE_BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (row, slice): its ranks in the bin of the k-th best, behind those of earlier slices, as
    differences from the lowest of that bin, and what `PLAN_SIZE` names."""
    row, part, place, num_seen = my_slice(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, first_query, max_seen, BLOCK_R
    )
    if (num_seen <= k) | (part * SLICE >= num_seen):
        return
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    counts_ptr += (place - part) * BINS
    used = tl.cdiv(num_seen, SLICE)
    for first in tl.range(0, used, BLOCK_S):
        other = first + tl.arange(0, BLOCK_S)[:, None]
        counts = tl.load(counts_ptr + other * BINS + bins[None, :], mask=other < used, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < part, counts, 0), 0)
    up_to = tl.cumsum(total, 0)
    limit = tl.sum((up_to < k).to(tl.int32), 0)
    num_above = tl.sum(tl.where(bins < limit, total, 0), 0)
    above_before = tl.sum(tl.where(bins < limit, before, 0), 0)
    num_sifted = tl.sum(tl.where(bins == limit, total, 0), 0)
    sifted_before = tl.sum(tl.where(bins == limit, before, 0), 0)

    best = best_of(best_ptr + row * num_splits, num_splits, num_seen, SCORE_BLOCK, 512)
    lowest = ((best >> BIN_BITS) - limit.to(tl.uint32)) << BIN_BITS
    lowest = tl.where(limit == BINS - 1, 0, lowest)
    keys = part * SLICE + tl.arange(0, SLICE)
    ranks = load_ranks(scores_ptr + row * scores_stride, keys, num_seen)
    inside = (keys < num_seen) & (bins_of(ranks, best) == limit)
    places = sifted_before + tl.cumsum(inside.to(tl.int32), 0) - 1
    sifted = (ranks - lowest).to(tl.int32, bitcast=True)
    tl.store(sifted_ptr + row * scores_stride + places, sifted, mask=inside)
    plan = plans_ptr + place * PLAN_SIZE
    tl.store(plan, limit)
    tl.store(plan + 1, num_above)
    tl.store(plan + 2, above_before)
    tl.store(plan + 3, sifted_before)
    tl.store(plan + 4, num_sifted)
    tl.store(plan + 5, lowest.to(tl.int32, bitcast=True))


@triton.jit
def load_sifted(sifted_ptr, places, num_sifted):
    ranks = tl.load(sifted_ptr + places, mask=places < num_sifted, other=0)
    return ranks.to(tl.uint32, bitcast=True)


@triton.jit
def count_from(sifted_ptr, num_sifted, least, step, BLOCK: tl.constexpr):
    """How many ranks are `least` or more, `least + step` or more, and `least + 2 * step` or more. The
    three counts are added up as one number, which crosses warps once."""
    counts = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, num_sifted, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ranks = load_sifted(sifted_ptr, places, num_sifted)
        there = places < num_sifted
        counts += (there & (ranks >= least)).to(tl.int64)
        counts += (there & (ranks >= least + step)).to(tl.int64) << COUNT_BITS
        counts += (there & (ranks >= least + 2 * step)).to(tl.int64) << 2 * COUNT_BITS
    counts = tl.sum(counts, 0)
    return counts & COUNT_MASK, (counts >> COUNT_BITS) & COUNT_MASK, counts >> 2 * COUNT_BITS


@triton.jit(
    do_not_specialize=["num_reqs", "first_query", "max_seen", "k", "scores_stride", "lists_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr"],
)
def index_list_kernel(
    scores_ptr,
    sifted_ptr,
    plans_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    lists_ptr,
    num_reqs,
    first_query,
    max_seen,
    k,
    scores_stride,
    lists_stride,
    SLICE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (row, slice) lists those of its positions that are among the k best; all where the query
    sees no more, and then -1.

    The rank of the k-th best is found by two bits at a time: the most with which there are enough ranks.
    Of ranks equal to it there are as many listed as there is room for, the lower positions.
    """
    row, part, place, num_seen = my_slice(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, first_query, max_seen, BLOCK_R
    )
    lists = lists_ptr + (first_query + row) * lists_stride
    lanes = tl.arange(0, SLICE)
    keys = part * SLICE + lanes
    if num_seen <= k:
        tl.store(lists + keys, tl.where(keys < num_seen, keys, -1), mask=keys < k)
        return
    if part * SLICE >= num_seen:
        return

    plan = plans_ptr + place * PLAN_SIZE
    bin_of_limit = tl.load(plan)
    room = k - tl.load(plan + 1)
    end = tl.load(plan + 2)
    sifted_before = tl.load(plan + 3)
    num_sifted = tl.load(plan + 4)
    lowest = tl.load(plan + 5).to(tl.uint32, bitcast=True)
    sifted_ptr += row * scores_stride
    limit = tl.zeros([], tl.uint32)
    num_digits = tl.where(bin_of_limit == BINS - 1, 16, BIN_BITS // 2)
    for i in tl.range(0, num_digits):
        step = tl.full([], 1, tl.uint32) << (2 * (num_digits - 1 - i)).to(tl.uint32)
        one, two, three = count_from(sifted_ptr, num_sifted, limit + step, step, SLICE)
        digit = (one >= room).to(tl.uint32) + (two >= room).to(tl.uint32)
        limit += step * (digit + (three >= room).to(tl.uint32))
    above, _, _ = count_from(sifted_ptr, num_sifted, limit + 1, 0, SLICE)
    room -= above.to(tl.int32)

    # What earlier slices list of that bin.
    equal_before = tl.zeros([], tl.int32)
    for start in tl.range(0, sifted_before, SLICE):
        ranks = load_sifted(sifted_ptr, start + lanes, sifted_before)
        there = start + lanes < sifted_before
        equal_before += tl.sum((there & (ranks == limit)).to(tl.int32), 0)
        end += tl.sum((there & (ranks > limit)).to(tl.int32), 0)
    end += tl.minimum(equal_before, room)

    ranks = load_ranks(scores_ptr + row * scores_stride, keys, num_seen)
    seen = (keys < num_seen) & (ranks >= lowest)  # In the bin or above it.
    over = ranks - lowest
    equal = seen & (over == limit)
    turn = equal_before + tl.cumsum(equal.to(tl.int32), 0)
    taken = (seen & (over > limit)) | (equal & (turn <= room))
    places = end + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(lists + places, keys, mask=taken)
