"""The prefill kernel: prompts and chunks of prompts over paged keys and values.

In: packed queries, the paged pool, and a list of row tiles for each program (`prefill_plan`). Out:
output and LSE of the rows of those tiles. Device code; `launch.launch_prefill` starts it.

One program a multiprocessor lives as long as the kernel. Its warps have roles: consumers are warpgroups
of 64 query rows each, one warp copies K and Q, one copies V, and rings of barriers join them: one that
a K tile is there, one that a V tile is, and one that a step is over, which frees its K tile and the V
tile of the step before. One, because each arrival costs a barrier of the whole warpgroup. K and V
come straight from the pages, by copies of page-sized boxes. While a consumer computes the softmax of
one tile, its product of the previous weights with V runs, and the other consumers' products. Rows of a
tile are `pack` heads of one KV head side by side, token by token.

The accumulator is scaled only where a row's maximum has risen by much (`tile.online_softmax`): to scale
it in every step took 64 of 446 instructions at head size 128.

Where row tiles are fewer than programs, they come in splits (`split`), which `merge` puts together.

Keys and values that have no pages (`ragged`) are copied from the request's first row on.

Keys run backwards, so that the tiles cut by the diagonal or the end come first, those cut by the left
edge of a window last, and all between need no mask.
"""

# ruff: noqa: RUF005 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    let_next_start,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnkit.backends.hopper.prefill_copies import produce
from attnkit.backends.hopper.prefill_tile import (
    attend_tile,
    pass_turn,
    start_scores,
    store_rows,
    sum_weights,
    take_turn,
)
from attnkit.backends.hopper.row_tiles import (
    first_tile_of,
    place_of_rows,
    read_rows,
    read_sight,
)
from attnkit.backends.hopper.tile import (
    faded,
    finish_rows,
    finish_scores,
    first_key_of,
    mask_scores,
    online_softmax,
    zero_before_window,
    zero_past_end,
)


@gluon.jit
def consume(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    q_tiles,
    k_tiles,
    v_tiles,
    v_rows,
    q_full,
    k_full,
    v_full,
    empty,
    starts_ptr,
    tiles_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    slopes_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale_stride,
    window,
    log2_scale,
    score_factor,
    cap_log2,
):
    """One warpgroup that attends for 64 rows of each row tile."""
    BLOCK_N: gl.constexpr = CONFIG.block_n
    VALUES: gl.constexpr = CONFIG.values
    VALUE_SIZE: gl.constexpr = CONFIG.value_size
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_SIZE, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # Tokens of this consumer's first and last row, counted from the row tile's first.
    NEAR: gl.constexpr = ME * 64 // CONFIG.pack
    FAR: gl.constexpr = (ME * 64 + 63) // CONFIG.pack
    row = ME * 64 + gl.arange(0, 64, ROW_LAYOUT)
    row_token = row // CONFIG.pack
    base_scale = log2_scale
    factors = (base_scale, score_factor, cap_log2)
    first = gl.load(starts_ptr + gl.program_id(0))
    end = gl.load(starts_ptr + gl.program_id(0) + 1)
    step = 0
    if CONFIG.num_consumers - 1 == ME:
        pass_turn(step, ME, CONFIG)
    position, reach, num_keys, num_tiles = read_sight(tiles_ptr, first)
    for i in range(first, end):
        first_key = first_key_of(position, window, CONFIG)
        first_tile = first_tile_of(tiles_ptr, i, first_key, CONFIG)
        tile = first_tile + num_tiles - 1
        sight = (row_token, position, reach, num_keys, window)
        slopes = row_token.to(gl.float32)
        if CONFIG.scaled:
            _, head_tile, _ = read_rows(tiles_ptr, i)
            kv_head = head_tile * CONFIG.pack // CONFIG.group_size
            k_scale = gl.load(k_scale_ptr + kv_head * scale_stride)
            if CONFIG.score.linear:
                base_scale = log2_scale * k_scale
                factors = (base_scale, score_factor, cap_log2)
            else:
                factors = (base_scale, score_factor * k_scale, cap_log2)
        if CONFIG.score.alibi != 0:
            _, head_tile, _ = read_rows(tiles_ptr, i)
            head = head_tile * CONFIG.pack + row % CONFIG.pack
            slopes = gl.load(slopes_ptr + head) * 1.4426950408889634

        # The first K tile: there is no product with V beside it.
        q_slot = (i - first) & (CONFIG.q_stages - 1)
        slot = step & (CONFIG.stages - 1)
        phase = (step // CONFIG.stages) & 1
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.wait(q_full.index(q_slot), ((i - first) // CONFIG.q_stages) & 1)
        take_turn(step, ME, CONFIG)
        q_index = q_slot * CONFIG.num_consumers + ME
        q = q_tiles
        if CONFIG.q_in_registers:
            q = q_tiles.index(q_index).load(Q_LAYOUT)
        s = start_scores(q, q_index, k_tiles, slot, S_LAYOUT, CONFIG)
        pass_turn(step, ME, CONFIG)
        s = warpgroup_mma_wait(0, deps=(s,))
        # This says too that the row tile before is done with its last V tile.
        mbarrier.arrive(empty.index(slot), count=1)
        s = finish_scores(s, tile, sight, slopes, factors, S_LAYOUT, CONFIG)
        s = mask_scores(s, tile, sight, S_LAYOUT, CONFIG)
        top = gl.full([64], float("-inf"), gl.float32, ROW_LAYOUT)
        weights, fade, top = online_softmax(s, top, base_scale, True)
        total = sum_weights(weights, CONFIG)
        mbarrier.wait(v_full.index(slot), phase)
        zero_past_end(v_rows, slot, tile, num_keys, VALUES)
        step += 1

        # The others: cut by the diagonal or the end, seen whole by all rows, cut by the window.
        end_whole = gl.maximum(gl.minimum(position + reach + NEAR + 1, num_keys), 0) // BLOCK_N
        num_cut = gl.minimum(tile - gl.maximum(end_whole, first_tile), num_tiles - 1)
        num_cut = gl.maximum(num_cut, 0)
        num_whole = num_tiles - 1 - num_cut
        if CONFIG.score.window:
            first_whole = first_key_of(position + FAR, window, CONFIG)
            first_whole = (first_whole + BLOCK_N - 1) // BLOCK_N
            num_whole = gl.maximum(gl.minimum(num_whole, tile - num_cut - first_whole), 0)
        acc = gl.zeros([64, VALUE_SIZE], gl.float32, ACC_LAYOUT)
        for part in gl.static_range(3 if CONFIG.score.window else 2):
            count = num_cut
            if part == 1:
                count = num_whole
            if part == 2:
                count = num_tiles - 1 - num_cut - num_whole
            for _ in range(0, count):
                tile -= 1
                acc, weights, fade, top, total = attend_tile(
                    ME,
                    CONFIG,
                    S_LAYOUT,
                    P_LAYOUT,
                    part != 1,
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
                )
                step += 1

        # The last product with V, while what comes next is on its way. What was not needed so far is
        # read only now: registers are short inside the loops.
        token, head_tile, num_tokens = read_rows(tiles_ptr, i)
        position2, reach2, num_keys2, num_tiles2 = read_sight(tiles_ptr, gl.minimum(i + 1, end - 1))
        slot = (step - 1) & (CONFIG.stages - 1)
        if CONFIG.score.window:
            zero_before_window(v_rows, slot, first_tile, first_key, VALUES)
        acc = faded(acc, gl.convert_layout(fade, gl.SliceLayout(1, ACC_LAYOUT)))
        p = gl.convert_layout(weights.to(v_tiles.dtype), P_LAYOUT)
        acc = warpgroup_mma(p, v_tiles.index(slot), acc, is_async=True)
        sinks = top
        if CONFIG.score.sinks:
            sinks = gl.load(sinks_ptr + head_tile * CONFIG.pack + row % CONFIG.pack)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        if CONFIG.score.linear:
            total = gl.convert_layout(gl.sum(total, 1), ROW_LAYOUT)
        factor, lse = finish_rows(top, total, sinks, base_scale, CONFIG)
        if CONFIG.scaled:
            kv_head = head_tile * CONFIG.pack // CONFIG.group_size
            factor = factor * gl.load(v_scale_ptr + kv_head * scale_stride)
        token, head_tile = place_of_rows(tiles_ptr, i, token, head_tile, CONFIG)
        store_rows(
            ME,
            CONFIG,
            ROW_LAYOUT,
            ACC_LAYOUT,
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
        )
        position = position2
        reach = reach2
        num_keys = num_keys2
        num_tiles = num_tiles2
    if ME == 0:
        # The last turn that was passed on comes back to the first consumer.
        take_turn(step, ME, CONFIG)


@gluon.jit(
    do_not_specialize=["num_pages", "window", "table_stride", "lse_stride_token", "scale_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "tiles_ptr", "table_ptr"],
)
def prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    starts_ptr,
    tiles_ptr,
    table_ptr,
    table_stride,
    num_pages,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    slopes_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale_stride,
    window,
    log2_scale,
    score_factor,
    cap_log2,
    CONFIG: gl.constexpr,
):
    """Set up rings and roles; see `launch.prefill_call` for the arguments."""
    DTYPE: gl.constexpr = q_desc.dtype
    PACK: gl.constexpr = CONFIG.pack
    BLOCK_N: gl.constexpr = CONFIG.block_n
    ROWS: gl.constexpr = CONFIG.rows
    STAGES: gl.constexpr = CONFIG.stages
    CONSUMERS: gl.constexpr = CONFIG.num_consumers
    STRIPS: gl.constexpr = CONFIG.head_size // 64
    K_BOXES: gl.constexpr = STAGES * STRIPS * (BLOCK_N // ROWS)
    VALUE_SIZE: gl.constexpr = CONFIG.value_size
    V_BOXES: gl.constexpr = STAGES * (VALUE_SIZE // 64) * (BLOCK_N // ROWS)
    Q_STAGES: gl.constexpr = CONFIG.q_stages
    Q_BOXES: gl.constexpr = Q_STAGES * CONSUMERS * STRIPS
    PARTS: gl.constexpr = CONFIG.parts
    PART: gl.constexpr = CONFIG.head_size // PARTS
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_boxes = gl.allocate_shared_memory(DTYPE, [Q_BOXES, 64 // PACK, 1, PACK, 64], q_desc.layout)
    k_boxes = gl.allocate_shared_memory(DTYPE, [K_BOXES] + k_desc.block_shape, k_desc.layout)
    v_boxes = gl.allocate_shared_memory(DTYPE, [V_BOXES] + v_desc.block_shape, v_desc.layout)
    v_rows = reinterpret(v_boxes, DTYPE, [V_BOXES, 1, 1, ROWS, 64], v_desc.layout)
    q_tiles = reinterpret(q_boxes, DTYPE, [Q_STAGES * CONSUMERS * PARTS, 64, PART], MATRIX)
    k_tiles = reinterpret(k_boxes, DTYPE, [STAGES * PARTS, BLOCK_N, PART], MATRIX)
    v_tiles = reinterpret(v_boxes, DTYPE, [STAGES, BLOCK_N, VALUE_SIZE], MATRIX)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(s), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    fence_async_shared()
    barrier()
    # Decodes may take the multiprocessors that have no program of this kernel.
    let_next_start(num_pages)

    rings = (q_full, k_full, v_full, empty)
    consumer = (q_tiles, k_tiles, v_tiles, v_rows) + rings
    consumer = consumer + (starts_ptr, tiles_ptr, out_ptr, out_stride_token, out_stride_head)
    consumer = consumer + (lse_ptr, lse_stride_token, slopes_ptr, sinks_ptr)
    consumer = consumer + (k_scale_ptr, v_scale_ptr, scale_stride)
    consumer = consumer + (window, log2_scale, score_factor, cap_log2)
    lists = (q_desc, q_boxes, q_full, starts_ptr, tiles_ptr, table_ptr, table_stride)
    lists = lists + (num_pages, window)
    keys = (k_desc, k_boxes, k_full, empty) + lists
    values = (v_desc, v_boxes, v_full, empty) + lists
    VALUES: gl.constexpr = CONFIG.values
    MINE: gl.constexpr = CONFIG.consumer_registers
    THEIRS: gl.constexpr = CONFIG.producer_registers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), CONFIG) + consumer),
                (consume, (gl.constexpr(1), CONFIG) + consumer),
                (produce, (gl.constexpr(True), CONFIG, CONFIG) + keys),
                (produce, (gl.constexpr(False), CONFIG, VALUES) + values),
            ],
            [4, 1, 1],
            [MINE, THEIRS, THEIRS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (gl.constexpr(0), CONFIG) + consumer),
                (consume, (gl.constexpr(1), CONFIG) + consumer),
                (consume, (gl.constexpr(2), CONFIG) + consumer),
                (produce, (gl.constexpr(True), CONFIG, CONFIG) + keys),
                (produce, (gl.constexpr(False), CONFIG, VALUES) + values),
            ],
            [4, 4, 1, 1],
            [MINE, MINE, THEIRS, THEIRS],
        )
