"""Scores of float8 latents: the warpgroup that multiplies keys with Q, and weighs them for the others.

In: blocks of codes in shared memory, and Q, which becomes float16 there, each of its rows times a power
of two (`coded_queries`). Out: per block weights (float16, keys by queries) and what earlier sums are
multiplied by; per piece the maxima and sums of its queries. Device code: a role of `latent_codes`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from attnkit.backends.hopper.coded_queries import beside_queries, make_float16
from attnkit.backends.hopper.gluon_api import (
    fence_async_shared,
    float16_of_codes,
    gl,
    gluon,
    mbarrier,
    opaque,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnkit.backends.hopper.pieces import my_share, read_piece, read_unit


@gluon.jit
def multiply_keys(
    q_numbers, k_strips, rope_strips, slot, LAYOUT: gl.constexpr, CONFIG: gl.constexpr
):
    """q.k of one block, raw: (keys, queries). A strip is made numbers while the one before it is
    multiplied."""
    STRIPS: gl.constexpr = CONFIG.head_size // 64
    BLOCK_N: gl.constexpr = CONFIG.block_n
    QUERIES: gl.constexpr = CONFIG.tile_rows
    CODES: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    s = gl.zeros([BLOCK_N, QUERIES], gl.float32, LAYOUT)
    # From an index that the compiler knows it makes descriptors before the loop, more than it can hold.
    nil = opaque(slot * 0)
    codes = k_strips.index(slot * STRIPS).load(CODES)
    k = beside_queries(float16_of_codes(codes), LAYOUT)
    s = warpgroup_mma(k, q_numbers.index(nil).permute((1, 0)), s, use_acc=False, is_async=True)
    for c in gl.static_range(1, STRIPS + 1):
        before = k
        if c < STRIPS:
            codes = k_strips.index(slot * STRIPS + c).load(CODES)
        else:
            codes = rope_strips.index(slot).load(CODES)
        k = beside_queries(float16_of_codes(codes), LAYOUT)
        s = warpgroup_mma(k, q_numbers.index(nil + c).permute((1, 0)), s, is_async=True)
        s, before = warpgroup_mma_wait(1, deps=(s, before))
    s, k = warpgroup_mma_wait(0, deps=(s, k))
    return s


@gluon.jit
def of_own_rows(x):
    """(keys, queries) in registers as (warps, two of a thread, lanes, queries)."""
    return gl.reshape(x, [4, 2, x.shape[0] // 8, x.shape[1]])


@gluon.jit
def highest(x):
    """The largest of (keys, queries), each thread's own first."""
    x = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    x = gl.max(gl.max(gl.max(x, 5), 3), 1)
    return gl.max(gl.reshape(x, [128]), 0)


@gluon.jit
def score(
    CONFIG: gl.constexpr,
    q_strips,
    q_numbers,
    k_strips,
    rope_strips,
    scales,
    bases,
    p_tiles,
    fades,
    rises_of,
    ends,
    q_full,
    q_empty,
    full,
    empty,
    p_full,
    p_empty,
    ends_full,
    ends_empty,
    share_ptr,
    pieces_ptr,
    k_scale_ptr,
    log2_scale,
):
    """The warpgroup that scores each block and leaves its weights, and what earlier sums are multiplied
    by, to those that accumulate; and in the end maxima and sums."""
    QUERIES: gl.constexpr = CONFIG.tile_rows
    BLOCK_N: gl.constexpr = CONFIG.block_n
    STAGES: gl.constexpr = CONFIG.stages
    STRIPS: gl.constexpr = CONFIG.row.head_size // 64
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    base_scale = log2_scale * gl.load(k_scale_ptr)
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        _, _, _, _, position, reach, num_keys, first_block, num_blocks = read_piece(record)
        unit = read_unit(record)
        # Blocks before this key are seen whole by all queries.
        end_whole = gl.minimum(position + reach + 1, num_keys)
        bases.store(gl.zeros([QUERIES], gl.float32, OF_QUERY))
        none = gl.zeros([BLOCK_N, QUERIES], gl.float32, LAYOUT)
        # A query's keys are spread over threads: each adds up its own until the end.
        total = gl.sum(of_own_rows(none), 1)
        mbarrier.wait(q_full, num_done & 1)
        inverse = make_float16(q_strips, q_numbers, OF_QUERY, QUERIES, STRIPS)
        # These and the bases are kept in shared memory: registers are scarce.
        scales.store(inverse * base_scale)
        for n in range(0, num_blocks):
            block = first_block + n
            slot = step % STAGES
            turn = step & 1
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            s = multiply_keys(q_numbers, k_strips, rope_strips, slot, LAYOUT, CONFIG)
            mbarrier.arrive(empty.index(slot), count=1)
            if n == num_blocks - 1:
                mbarrier.arrive(q_empty, count=1)
            scale = gl.expand_dims(scales.load(OF_QUERY), 0)
            if block * BLOCK_N + BLOCK_N > end_whole:
                # Made in place, for the same reason.
                nil = opaque(block * 0)
                last = (gl.arange(0, QUERIES, OF_QUERY) + nil) // CONFIG.pack
                last = gl.minimum(position + reach + last, num_keys - 1)
                key = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
                s = gl.where(gl.expand_dims(key, 1) <= gl.expand_dims(last, 0), s, float("-inf"))
            mbarrier.wait(p_empty.index(turn), ((step >> 1) & 1) ^ 1)
            # Bases stay what they were until a maximum would rise by more than 8 powers of 2: a weight
            # is then at most 256, which rounds alike, and hardly a block fades what was summed before.
            power = s * scale - gl.expand_dims(bases.load(OF_QUERY), 0)
            rises = (highest(power) > 8.0) | (n == 0)
            if rises:
                base = bases.load(OF_QUERY)
                power = power + gl.expand_dims(base, 0)
                base = gl.where(n == 0, float("-inf"), base)
                new_base = gl.maximum(base, gl.max(power, 0))
                # A query that sees no key here sees none in the blocks behind it.
                new_base = gl.where(new_base == float("-inf"), 0.0, new_base)
                power = power - gl.expand_dims(new_base, 0)
                fade = gl.exp2(base - new_base)
                bases.store(new_base)
                total = total * gl.max(of_own_rows(none + gl.expand_dims(fade, 0)), 1)
                fades.index(turn).store(fade)
            rise = gl.where(rises, 1.0, 0.0)
            rises_of.index(turn).store(gl.full([1], rise, gl.float32, ONE))
            weights = gl.exp2(power)
            total = total + gl.sum(of_own_rows(weights), 1)
            p_tiles.index(turn).store(weights.to(gl.float16))
            fence_async_shared()
            mbarrier.arrive(p_full.index(turn), count=1)
            step += 1

        mbarrier.wait(ends_empty, (num_done & 1) ^ 1)
        total = gl.convert_layout(gl.sum(gl.sum(total, 0), 0), OF_QUERY)
        top = bases.load(OF_QUERY) / base_scale
        ends.index(0).store(gl.where(total == 0.0, float("-inf"), top))
        ends.index(1).store(total)
        mbarrier.arrive(ends_full, count=1)
        at += num_blocks
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1
