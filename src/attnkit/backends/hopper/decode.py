"""The decode kernel: requests with few queries against long contexts, shared out evenly.

In: packed queries, the paged pool, and pieces of work (`decode_plan`): all K/V tiles of the batch in
one row, cut into one equal share for each program. Out: output and LSE. Device code;
`launch.launch_decode` starts it.

A unit is one request, KV head and tile of up to 16 or 64 rows (query tokens times the heads of the
group). A program walks through the pieces of its share: whole units, and the ends of units that it
shares with its neighbours. A unit in several pieces leaves its states in memory. Of 16 rows whoever
comes last folds them, eight at a time and always in the order of the keys, so the bits do not depend on
who came last; of 64 rows, which would take one program as long as the keys take all, `fold` does.

One warp copies K and Q, one copies V, one warpgroup attends. The copies run ahead over the borders
between pieces, so memory is never idle.
"""

# ruff: noqa: RUF005, SIM102 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.coded_queries import beside_codes, make_float16
from attnkit.backends.hopper.gluon_api import (
    barrier,
    fence_async_shared,
    float16_of_codes,
    float16_of_pairs,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    reinterpret,
    tma_load,
    wait_for_kernel_before,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnkit.backends.hopper.pieces import my_share, read_piece, read_split, read_unit
from attnkit.backends.hopper.states import merge_unit, place_of_state, store_out, store_state
from attnkit.backends.hopper.tile import (
    copy_tile,
    finish_scores,
    first_key_of,
    free_before,
    mask_scores,
    online_softmax,
    pages_of_tile,
    zero_before_window,
    zero_past_end,
)


@gluon.constexpr_function
def product_layout(CONFIG, columns):
    """Of a product's result with `columns` columns.

    64 rows: a warp has 16 of them and all columns. 16 rows: each warp has all of them and a quarter of
    the columns, so maxima and weights cross warps, through shared memory.
    """
    if CONFIG.tile_rows == 64:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    return gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])


@gluon.jit
def multiply_keys(q, k_tile, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """q.k of one tile, raw."""
    TILE_ROWS: gl.constexpr = CONFIG.tile_rows
    BLOCK_N: gl.constexpr = CONFIG.block_n
    s = gl.zeros([TILE_ROWS, BLOCK_N], gl.float32, LAYOUT)
    if CONFIG.tile_rows == 64:
        s = warpgroup_mma(q, k_tile.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
    elif CONFIG.element_bytes == 2:
        s = mma_v2(q, k_tile.permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 2)), s)
    else:
        # Four codes, that is 32 bits, side by side in a thread; Q likewise.
        codes = k_tile.permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 4))
        s = mma_v2(q, float16_of_codes(codes), s)
    return s


@gluon.jit
def add_values(p, v_tile, acc, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """acc + p.v of one tile."""
    if CONFIG.tile_rows == 64:
        acc = warpgroup_mma(p, v_tile, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    else:
        acc = mma_v2(p, v_tile.load(gl.DotOperandLayout(1, LAYOUT, 2)), acc)
    return acc


@gluon.jit
def add_coded_values(p, v_tile, even, odd, LAYOUT: gl.constexpr):
    """even + p.v of the even columns, odd + p.v of the odd ones.

    A load that transposes has elements of 16 bits, so two codes side by side come as one, and what is in
    its halves goes to two products.
    """
    v_even, v_odd = float16_of_pairs(v_tile.load(gl.DotOperandLayout(1, LAYOUT, 2)))
    return mma_v2(p, v_even, even), mma_v2(p, v_odd, odd)


@gluon.jit
def produce(
    LOADS_Q: gl.constexpr,
    CONFIG: gl.constexpr,
    desc,
    buffer,
    full,
    empty,
    q_desc,
    q_buffer,
    q_full,
    q_empty,
    share_ptr,
    pieces_ptr,
    table_ptr,
    table_stride,
    num_pages,
    window,
):
    """One warp that feeds K (and Q) or V. Pages are looked up two tiles ahead, since the first tiles of
    a launch are copied as fast as they are found."""
    STRIPS: gl.constexpr = CONFIG.head_size // 64
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        request, token, kv_head, num_tokens, position, reach, num_keys, first_tile, num_tiles = (
            read_piece(record)
        )
        unit = read_unit(record)
        table = table_ptr + request.to(gl.int64) * table_stride
        end_key = gl.maximum(gl.minimum(position + reach + num_tokens, num_keys), 0)
        first_key = first_key_of(position, window, CONFIG)
        pages = pages_of_tile(table, first_tile, first_key, end_key, num_pages, CONFIG)
        later = pages_of_tile(table, first_tile + 1, first_key, end_key, num_pages, CONFIG)
        for n in range(0, num_tiles):
            tile = first_tile + n
            slot = step % CONFIG.stages
            now = pages
            pages = later
            # Past the last tile this finds pages that nobody copies.
            later = pages_of_tile(table, tile + 2, first_key, end_key, num_pages, CONFIG)
            mbarrier.wait(empty.index(slot), ((step // CONFIG.stages) & 1) ^ 1)
            copy_tile(desc, buffer, full.index(slot), now, tile, kv_head, 0, slot, CONFIG)
            if LOADS_Q:
                if n == 0:
                    mbarrier.wait(q_empty, (num_done & 1) ^ 1)
                    mbarrier.expect(q_full, CONFIG.tile_rows * STRIPS * 128)
                    for c in gl.static_range(STRIPS):
                        tma_load(q_desc, [token, kv_head, 0, c * 64], q_full, q_buffer.index(c))
            step += 1
        at += num_tiles
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit
def consume(
    CONFIG: gl.constexpr,
    q_tile,
    q_strips,
    q_numbers,
    p_tile,
    k_tiles,
    v_tiles,
    v_boxes,
    q_full,
    q_empty,
    k_full,
    v_full,
    empty,
    share_ptr,
    pieces_ptr,
    states_ptr,
    sums_ptr,
    counters_ptr,
    num_states,
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
    """The warpgroup that attends for the rows of each piece."""
    TILE_ROWS: gl.constexpr = CONFIG.tile_rows
    BLOCK_N: gl.constexpr = CONFIG.block_n
    HEAD_SIZE: gl.constexpr = CONFIG.head_size
    S_LAYOUT: gl.constexpr = product_layout(CONFIG, BLOCK_N)
    CODED: gl.constexpr = CONFIG.element_bytes == 1
    # Of coded values, the even and the odd columns are accumulated apart.
    PARTS: gl.constexpr = 2 if CODED else 1
    COLUMNS: gl.constexpr = HEAD_SIZE // PARTS
    ACC_LAYOUT: gl.constexpr = product_layout(CONFIG, COLUMNS)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, ACC_LAYOUT)
    row = gl.arange(0, TILE_ROWS, ROW_LAYOUT)
    row_token = row // CONFIG.pack
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        _, token, kv_head, num_tokens, position, reach, num_keys, first_tile, num_tiles = (
            read_piece(record)
        )
        base_scale = log2_scale
        factor = score_factor
        out_scale = log2_scale
        if CONFIG.scaled:
            k_scale = gl.load(k_scale_ptr + kv_head * scale_stride)
            out_scale = gl.load(v_scale_ptr + kv_head * scale_stride)
            if CONFIG.score.linear:
                base_scale = log2_scale * k_scale
            else:
                factor = score_factor * k_scale
        factors = (base_scale, factor, cap_log2)
        first_key = first_key_of(position, window, CONFIG)
        sight = (row_token, position, reach, num_keys, window)
        # Tiles from first_whole to end_whole are seen whole by all rows.
        end_whole = gl.minimum(position + reach + 1, num_keys)
        first_whole = first_key_of(position + num_tokens - 1, window, CONFIG)
        slopes = row_token.to(gl.float32)
        if CONFIG.score.alibi != 0:
            in_group = row % CONFIG.pack
            head = kv_head * CONFIG.group_size + in_group
            slopes = gl.load(slopes_ptr + head, mask=in_group < CONFIG.group_size, other=0.0)
            slopes = slopes * 1.4426950408889634
        top = gl.full([TILE_ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
        # Where a row is spread over warps, its weights are added up column by column until the end.
        SUMS: gl.constexpr = [TILE_ROWS] if TILE_ROWS == 64 else [TILE_ROWS, BLOCK_N]
        total = gl.zeros(SUMS, gl.float32, ROW_LAYOUT if TILE_ROWS == 64 else S_LAYOUT)
        acc = gl.zeros([TILE_ROWS, COLUMNS], gl.float32, ACC_LAYOUT)
        odd = acc
        mbarrier.wait(q_full, num_done & 1)
        q = q_tile
        if CODED:
            inverse = make_float16(
                q_strips, q_numbers, gl.SliceLayout(1, S_LAYOUT), TILE_ROWS, HEAD_SIZE // 64
            )
            q = beside_codes(q_tile, S_LAYOUT)
        elif CONFIG.q_in_registers:
            q = q_tile.load(Q_LAYOUT)
        for n in range(0, num_tiles):
            tile = first_tile + n
            slot = step % CONFIG.stages
            phase = (step // CONFIG.stages) & 1
            free_before(step, empty, n > 0, CONFIG)
            mbarrier.wait(k_full.index(slot), phase)
            s = multiply_keys(q, k_tiles.index(slot), S_LAYOUT, CONFIG)
            if CODED:
                s = s * gl.expand_dims(inverse, 1)
            # From here on the next piece's Q may be on its way; not from its load on (`free_before`).
            if n == (0 if CONFIG.q_in_registers else num_tiles - 1):
                mbarrier.arrive(q_empty, count=1)
            is_cut = tile * BLOCK_N + BLOCK_N > end_whole
            if CONFIG.score.window:
                is_cut = is_cut | (tile * BLOCK_N < first_whole)
            s = finish_scores(s, tile, sight, slopes, factors, S_LAYOUT, CONFIG)
            if is_cut:
                s = mask_scores(s, tile, sight, S_LAYOUT, CONFIG)
            weights, fade, top = online_softmax(s, top, base_scale, True)
            if TILE_ROWS == 64:
                total = total * fade + gl.sum(weights, 1)
            else:
                total = total * gl.expand_dims(fade, 1) + weights
            if TILE_ROWS == 64:
                p = gl.convert_layout(weights.to(q_tile.dtype), P_LAYOUT)
            else:
                # Through memory of its own: a matrix load brings them as products want them.
                p_tile.store(weights.to(q_tile.dtype))
                barrier()
                p = p_tile.load(P_LAYOUT)
            fade = gl.expand_dims(gl.convert_layout(fade, ACC_ROWS), 1)
            acc = acc * fade
            mbarrier.wait(v_full.index(slot), phase)
            zero_past_end(v_boxes, slot, tile, num_keys, CONFIG)
            if CONFIG.score.window:
                zero_before_window(v_boxes, slot, tile, first_key, CONFIG)
            if CODED:
                odd = odd * fade
                acc, odd = add_coded_values(p, v_tiles.index(slot), acc, odd, ACC_LAYOUT)
            else:
                acc = add_values(p, v_tiles.index(slot), acc, ACC_LAYOUT, CONFIG)
            step += 1

        free_before(step, empty, True, CONFIG)
        if TILE_ROWS != 64:
            total = gl.sum(total, 1)
        split, num_splits, first_program = read_split(record)
        unit = read_unit(record)
        top = gl.convert_layout(top, ACC_ROWS)
        total = gl.convert_layout(total, ACC_ROWS)
        acc_row = gl.arange(0, TILE_ROWS, ACC_ROWS)
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, ACC_LAYOUT))
        for part in gl.static_range(PARTS):
            columns = acc
            if part == 1:
                columns = odd
            if num_splits == 1:
                store_out(
                    CONFIG,
                    columns,
                    top,
                    total,
                    acc_row,
                    column * PARTS + part,
                    token,
                    kv_head,
                    num_tokens,
                    base_scale,
                    out_scale,
                    out_ptr,
                    out_stride_token,
                    out_stride_head,
                    lse_ptr,
                    lse_stride_token,
                    sinks_ptr,
                    part == 0,
                )
            else:
                store_state(
                    CONFIG,
                    columns,
                    top,
                    total,
                    acc_row,
                    column * PARTS + part,
                    acc_row < num_tokens * CONFIG.pack,
                    place_of_state(split, first_program),
                    states_ptr,
                    sums_ptr,
                    part == 0,
                )
        if TILE_ROWS == 16:
            if num_splits > 1:
                merge_unit(
                    CONFIG,
                    split,
                    num_splits,
                    first_program,
                    token,
                    kv_head,
                    num_tokens,
                    base_scale,
                    out_scale,
                    states_ptr,
                    sums_ptr,
                    counters_ptr,
                    num_states,
                    out_ptr,
                    out_stride_token,
                    out_stride_head,
                    lse_ptr,
                    lse_stride_token,
                    sinks_ptr,
                )
        at += num_tiles
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit(
    do_not_specialize=[
        "num_pages",
        "window",
        "table_stride",
        "lse_stride_token",
        "num_states",
        "scale_stride",
    ],
    do_not_specialize_on_alignment=["share_ptr", "pieces_ptr", "table_ptr"],
)
def decode_kernel(
    q_desc,
    k_desc,
    v_desc,
    share_ptr,
    pieces_ptr,
    table_ptr,
    table_stride,
    num_pages,
    states_ptr,
    sums_ptr,
    counters_ptr,
    num_states,
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
    """Set up rings and roles; see `launch.decode_call` for the arguments."""
    DTYPE: gl.constexpr = q_desc.dtype
    HEAD_SIZE: gl.constexpr = CONFIG.head_size
    PACK: gl.constexpr = CONFIG.pack
    BLOCK_N: gl.constexpr = CONFIG.block_n
    ROWS: gl.constexpr = CONFIG.rows
    STAGES: gl.constexpr = CONFIG.stages
    STRIPS: gl.constexpr = HEAD_SIZE // 64
    STRIP: gl.constexpr = CONFIG.strip
    BOXES: gl.constexpr = STAGES * (HEAD_SIZE // STRIP) * (BLOCK_N // ROWS)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Coded values are read in pairs: as elements of 16 bits.
    CODED: gl.constexpr = CONFIG.element_bytes == 1
    K_MATRIX: gl.constexpr = gl.NVMMASharedLayout(STRIP, 8, 2) if CODED else MATRIX
    V_MATRIX: gl.constexpr = gl.NVMMASharedLayout(STRIP, 16, 2) if CODED else MATRIX
    V_TYPE: gl.constexpr = gl.int16 if CODED else v_desc.dtype
    V_COLUMNS: gl.constexpr = HEAD_SIZE // 2 if CODED else HEAD_SIZE
    TILE_ROWS: gl.constexpr = CONFIG.tile_rows
    Q_SHAPE: gl.constexpr = [STRIPS, TILE_ROWS // PACK, 1, PACK, 64]
    q_boxes = gl.allocate_shared_memory(DTYPE, Q_SHAPE, q_desc.layout)
    k_boxes = gl.allocate_shared_memory(k_desc.dtype, [BOXES, 1, 1, ROWS, STRIP], k_desc.layout)
    v_boxes = gl.allocate_shared_memory(v_desc.dtype, [BOXES, 1, 1, ROWS, STRIP], v_desc.layout)
    Q_TYPE: gl.constexpr = gl.float16 if CODED else DTYPE
    q_tile = reinterpret(q_boxes, Q_TYPE, [TILE_ROWS, HEAD_SIZE], MATRIX)
    q_strips = reinterpret(q_boxes, DTYPE, [STRIPS, TILE_ROWS, 64], MATRIX)
    q_numbers = reinterpret(q_boxes, Q_TYPE, [STRIPS, TILE_ROWS, 64], MATRIX)
    p_tile = q_tile
    if TILE_ROWS == 16:
        WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        p_tile = gl.allocate_shared_memory(Q_TYPE, [TILE_ROWS, BLOCK_N], WEIGHTS)
    k_tiles = reinterpret(k_boxes, k_desc.dtype, [STAGES, BLOCK_N, HEAD_SIZE], K_MATRIX)
    v_tiles = reinterpret(v_boxes, V_TYPE, [STAGES, BLOCK_N, V_COLUMNS], V_MATRIX)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()

    consumer = (
        q_tile,
        q_strips,
        q_numbers,
        p_tile,
        k_tiles,
        v_tiles,
        v_boxes,
        q_full,
        q_empty,
        k_full,
        v_full,
        empty,
    )
    consumer = consumer + (share_ptr, pieces_ptr, states_ptr, sums_ptr, counters_ptr, num_states)
    consumer = consumer + (out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride_token)
    consumer = consumer + (slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, scale_stride)
    consumer = consumer + (window, log2_scale, score_factor, cap_log2)
    pieces = (q_desc, q_boxes, q_full, q_empty, share_ptr, pieces_ptr, table_ptr, table_stride)
    pieces = pieces + (num_pages, window)
    keys = (k_desc, k_boxes, k_full, empty) + pieces
    values = (v_desc, v_boxes, v_full, empty) + pieces
    REGISTERS: gl.constexpr = CONFIG.producer_registers
    gl.warp_specialize(
        [
            (consume, (CONFIG,) + consumer),
            (produce, (gl.constexpr(True), CONFIG) + keys),
            (produce, (gl.constexpr(False), CONFIG) + values),
        ],
        [1, 1],
        [REGISTERS, REGISTERS],
    )
    if CONFIG.beside:
        # So what follows needs to wait for this kernel only. One program waits; it would block others.
        if gl.program_id(0) == gl.num_programs(0) - 1:
            wait_for_kernel_before(num_pages)
