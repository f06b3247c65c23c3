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

# ruff: noqa: RUF005, SIM102 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    let_next_start,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnkit.backends.hopper.row_tiles import (
    first_tile_of,
    place_of_rows,
    read_request,
    read_rows,
    read_sight,
)
from attnkit.backends.hopper.tile import (
    copy_tile,
    faded,
    finish_rows,
    finish_scores,
    first_key_of,
    mask_scores,
    online_softmax,
    pages_of_tile,
    zero_before_window,
    zero_past_end,
)

FIRST_TURN = gl.constexpr(8)
"""Named barrier of consumer 0; consumer i waits for its turn at FIRST_TURN + i."""


@gluon.jit
def copy_rows(q_desc, q_buffer, q_full, buffer, token, head_tile, CONFIG: gl.constexpr):
    """Start the copies of one row tile of Q into a buffer of its ring."""
    STRIPS: gl.constexpr = CONFIG.head_size // 64
    CONSUMERS: gl.constexpr = CONFIG.num_consumers
    TOKENS: gl.constexpr = 64 // CONFIG.pack
    full = q_full.index(buffer)
    mbarrier.expect(full, CONSUMERS * 64 * STRIPS * 128)
    for c in gl.static_range(STRIPS):
        for w in gl.static_range(CONSUMERS):
            place = q_buffer.index((buffer * CONSUMERS + w) * STRIPS + c)
            tma_load(q_desc, [token + w * TOKENS, head_tile, 0, c * 64], full, place)


@gluon.jit
def boxes_of_tile(table_ptr, tile, first_key, end_key, num_pages, CONFIG: gl.constexpr):
    """Pages of the boxes of a tile, as `tile.pages_of_tile`; without pages, the row of its only box."""
    if CONFIG.ragged:
        key = tile * CONFIG.block_n
        seen = (key + CONFIG.block_n > first_key) & (key < end_key)
        boxes = (gl.where(seen, gl.load(table_ptr) + key, num_pages),)
    else:
        boxes = pages_of_tile(table_ptr, tile, first_key, end_key, num_pages, CONFIG)
    return boxes


@gluon.jit
def produce(
    LOADS_Q: gl.constexpr,
    CONFIG: gl.constexpr,
    TILE: gl.constexpr,
    desc,
    buffer,
    full,
    empty,
    q_desc,
    q_buffer,
    q_full,
    starts_ptr,
    tiles_ptr,
    table_ptr,
    table_stride,
    num_pages,
    window,
):
    """One warp that feeds K (and Q) or V, in tiles of TILE. Pages of the next tile are looked up one
    tile ahead."""
    AHEAD: gl.constexpr = CONFIG.q_stages - 1
    first = gl.load(starts_ptr + gl.program_id(0))
    end = gl.load(starts_ptr + gl.program_id(0) + 1)
    step = 0
    if LOADS_Q:
        if AHEAD == 1:
            token, head_tile, num_tokens = read_rows(tiles_ptr, first)
            copy_rows(q_desc, q_buffer, q_full, 0, token, head_tile, CONFIG)
    for i in range(first, end):
        request = read_request(tiles_ptr, i)
        token, head_tile, num_tokens = read_rows(tiles_ptr, i)
        position, reach, num_keys, num_tiles = read_sight(tiles_ptr, i)
        kv_head = head_tile * CONFIG.pack // CONFIG.group_size
        table = table_ptr + request.to(gl.int64) * table_stride
        end_key = gl.maximum(gl.minimum(position + reach + num_tokens, num_keys), 0)
        first_key = first_key_of(position, window, CONFIG)
        first_tile = first_tile_of(tiles_ptr, i, first_key, CONFIG)
        pages = boxes_of_tile(
            table, first_tile + num_tiles - 1, first_key, end_key, num_pages, CONFIG
        )
        for n in range(0, num_tiles):
            tile = first_tile + num_tiles - 1 - n
            slot = step & (CONFIG.stages - 1)
            now = pages
            # Before the first tile this finds pages that nobody copies.
            pages = boxes_of_tile(table, tile - 1, first_key, end_key, num_pages, CONFIG)
            # The step that frees this slot: of K the last that used it, of V the one after that.
            free = step
            if not LOADS_Q:
                free = step + 1
            mbarrier.wait(
                empty.index(free & (CONFIG.stages - 1)), ((free // CONFIG.stages) & 1) ^ 1
            )
            copy_tile(desc, buffer, full.index(slot), now, tile, kv_head, 0, slot, TILE)
            if LOADS_Q:
                if (n == 0) & (i + AHEAD < end):
                    # The row tile before was done with its Q when its last step was over.
                    before = step - 1
                    mbarrier.wait(
                        empty.index(before & (CONFIG.stages - 1)),
                        (before // CONFIG.stages) & 1,
                        pred=i > first,
                    )
                    token, head_tile, num_tokens = read_rows(tiles_ptr, i + AHEAD)
                    q_slot = (i + AHEAD - first) & AHEAD
                    copy_rows(q_desc, q_buffer, q_full, q_slot, token, head_tile, CONFIG)
            step += 1


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
