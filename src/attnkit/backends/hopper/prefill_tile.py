"""One K/V tile in a consumer of the prefill kernel, and the rows that it writes in the end.

In: Q, a slot of the rings, and the running softmax of 64 rows. Out: that softmax one tile further. The
consumers take turns at issuing products. Device code of `prefill`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import (
    gl,
    gluon,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnkit.backends.hopper.tile import faded, finish_scores, mask_scores, online_softmax

FIRST_TURN = gl.constexpr(8)
"""Named barrier of consumer 0; consumer i waits for its turn at FIRST_TURN + i."""


# Consumers issue their products in turns, so that one's run while the other's softmax does.


@gluon.jit
def take_turn(x, ME: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    if CONFIG.turns:
        named_barrier_sync(x, FIRST_TURN + ME, 256)


@gluon.jit
def pass_turn(x, ME: gl.constexpr, CONFIG: gl.constexpr):
    """Let the next consumer issue its products."""
    if CONFIG.turns:
        named_barrier_arrive(x, FIRST_TURN + (ME + 1) % CONFIG.num_consumers, 256)


@gluon.jit
def start_scores(q, q_index, k_tiles, slot, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Issue Q.K of one tile. q: this row tile's in registers, or all in shared memory."""
    PARTS: gl.constexpr = CONFIG.parts
    BLOCK_N: gl.constexpr = CONFIG.block_n
    q_tiles = q
    s = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    for c in gl.static_range(PARTS):
        if not CONFIG.q_in_registers:
            q = q_tiles.index(q_index * PARTS + c)
        k = k_tiles.index(slot * PARTS + c).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def sum_weights(weights, CONFIG: gl.constexpr):
    """(rows, 8): sums over every eighth column, each within a thread; the other eight are added last.
    (rows,) where registers are short."""
    if CONFIG.score.linear:
        weights = weights.reshape([weights.shape[0], weights.shape[1] // 8, 8])
    return gl.sum(weights, 1)


@gluon.jit
def add_weights(total, fade, weights, CONFIG: gl.constexpr):
    """Sums of `sum_weights`, faded, with those of one more tile."""
    sums = sum_weights(weights, CONFIG)
    if CONFIG.score.linear:
        fade = gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))
        fade = gl.expand_dims(fade, 1)
    return total * fade + sums


@gluon.jit
def attend_tile(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,
    q,
    q_slot,
    k_tiles,
    v_tiles,
    k_full,
    v_full,
    empty,
    step,
    tile,
    acc,
    weights,
    fade,
    top,
    total,
    sight,
    slopes,
    factors,
):
    """Issue Q.K of `tile` and weights.V of the tile before; softmax of `tile` while the latter runs.

    The wait for V stands between the softmax and the wait for weights.V because its loop ends a basic
    block: without it ptxas lifts the second wait above the softmax, and nothing overlaps.
    """
    slot = step & (CONFIG.stages - 1)
    phase = (step // CONFIG.stages) & 1
    slot_before = (step - 1) & (CONFIG.stages - 1)
    # Opaque, so that ptxas 12.8 cannot share the address between consecutive loops: it then leaves it in
    # front of the first, and a second one reads a stale register where the first runs zero times.
    q_index = ME
    if CONFIG.q_stages > 1:
        q_index = opaque(q_slot) * CONFIG.num_consumers + ME
    p = gl.convert_layout(weights.to(v_tiles.dtype), P_LAYOUT)
    mbarrier.wait(k_full.index(slot), phase)
    take_turn(step, ME, CONFIG)
    s = start_scores(q, q_index, k_tiles, slot, S_LAYOUT, CONFIG)
    acc = faded(acc, gl.convert_layout(fade, gl.SliceLayout(1, P_LAYOUT.parent)))
    acc = warpgroup_mma(p, v_tiles.index(slot_before), acc, is_async=True)
    pass_turn(step, ME, CONFIG)
    s = warpgroup_mma_wait(1, deps=(s,))
    s = finish_scores(s, tile, sight, slopes, factors, S_LAYOUT, CONFIG)
    if MASKED:
        s = mask_scores(s, tile, sight, S_LAYOUT, CONFIG)
    weights, fade, top = online_softmax(s, top, factors[0], MASKED, True)
    total = add_weights(total, fade, weights, CONFIG)
    mbarrier.wait(v_full.index(slot), phase)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(empty.index(slot), count=1)
    return acc, weights, fade, top, total


@gluon.jit
def store_rows(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    ROW_LAYOUT: gl.constexpr,
    ACC_LAYOUT: gl.constexpr,
    acc,
    factor,
    lse,
    token,
    head_tile,
    num_tokens,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
):
    """Write this consumer's rows, through a layout in which a warp writes whole lines."""
    PACK: gl.constexpr = CONFIG.pack
    if CONFIG.score.lse:
        row = ME * 64 + gl.arange(0, 64, ROW_LAYOUT)
        place = (token + row // PACK).to(gl.int64) * lse_stride_token
        place = place + (head_tile * PACK + row % PACK)
        gl.store(lse_ptr + place, lse, mask=row < num_tokens * PACK)
    out = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, ACC_LAYOUT)), 1)
    if out_ptr.dtype.element_ty == gl.float32:
        # Neighbouring threads write whole sectors as it is; and memory is short for another layout.
        LAYOUT: gl.constexpr = ACC_LAYOUT
    else:
        LANES: gl.constexpr = 16 if CONFIG.value_size >= 128 else 8
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    row = ME * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, CONFIG.value_size, gl.SliceLayout(0, LAYOUT))
    place = (token + row // PACK).to(gl.int64) * out_stride_token
    place = place + (head_tile * PACK + row % PACK) * out_stride_head
    gl.store(
        out_ptr + gl.expand_dims(place, 1) + gl.expand_dims(column, 0),
        out,
        mask=gl.expand_dims(row < num_tokens * PACK, 1),
    )
