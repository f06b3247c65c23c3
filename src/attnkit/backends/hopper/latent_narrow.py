"""The narrow decode kernel over latents: 16 rows of queries, as fast as latents can be read.

In and out: as `latent_decode`, whose row tiles have 64 rows. With a few heads and one query each most of
those would be empty, and Q, copied with them, takes the place of latents that could be on their way.
Here products are a warp's (mma.sync, 16 rows), and one warpgroup scores and accumulates whole rows,
strip by strip of 64 columns, while one warp copies. Device code; `latent_launch` starts it.

Latents may be float8 codes, which become float16 numbers in registers. Q becomes float16 too, each row
times a power of two that its scores are divided by again: so a code costs half an instruction, where a
bfloat16 number made of it would cost two.
"""

# ruff: noqa: RUF005 (device code: tuples grow by +, and `if` on a constant stands alone)
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
)
from attnkit.backends.hopper.pieces import my_share, read_piece, read_split, read_unit
from attnkit.backends.hopper.states import place_of_state, store_out, store_state
from attnkit.backends.hopper.tile import (
    copy_tile,
    free_before,
    mask_scores,
    online_softmax,
    pages_of_tile,
    zero_past_end,
)


@gluon.jit
def produce(
    CONFIG: gl.constexpr,
    desc,
    boxes,
    full,
    empty,
    q_desc,
    q_rope_desc,
    q_boxes,
    q_full,
    q_empty,
    share_ptr,
    pieces_ptr,
    table_ptr,
    table_stride,
    num_pages,
):
    """The warp that feeds latents and Q, pages looked up a tile ahead."""
    ROW: gl.constexpr = CONFIG.row
    LATENT_STRIPS: gl.constexpr = CONFIG.head_size // 64
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        request, token, head_tile, num_tokens, position, reach, num_keys, first_tile, num_tiles = (
            read_piece(record)
        )
        unit = read_unit(record)
        table = table_ptr + request.to(gl.int64) * table_stride
        end_key = gl.maximum(gl.minimum(position + reach + num_tokens, num_keys), 0)
        pages = pages_of_tile(table, first_tile, 0, end_key, num_pages, ROW)
        for n in range(0, num_tiles):
            tile = first_tile + n
            slot = step % CONFIG.stages
            now = pages
            # Past the last tile this finds pages that nobody copies.
            pages = pages_of_tile(table, tile + 1, 0, end_key, num_pages, ROW)
            mbarrier.wait(empty.index(slot), ((step // CONFIG.stages) & 1) ^ 1)
            copy_tile(desc, boxes, full.index(slot), now, tile, 0, 0, slot, ROW)
            if n == 0:
                mbarrier.wait(q_empty, (num_done & 1) ^ 1)
                mbarrier.expect(q_full, CONFIG.tile_rows * ROW.head_size * 2)
                for c in gl.static_range(LATENT_STRIPS):
                    tma_load(q_desc, [token, head_tile, 0, c * 64], q_full, q_boxes.index(c))
                rope_box = q_boxes.index(LATENT_STRIPS)
                tma_load(q_rope_desc, [token, head_tile, 0, 0], q_full, rope_box)
            step += 1
        at += num_tiles
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit
def multiply_keys(q_strips, k_strips, slot, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """q.k of one tile, raw."""
    CODED: gl.constexpr = CONFIG.element_bytes == 1
    STRIPS: gl.constexpr = CONFIG.row.head_size // 64
    # Of codes four, that is 32 bits, stand side by side in a thread; Q likewise.
    WIDTH: gl.constexpr = 4 if CODED else 2
    # Several sums, so that a product need not wait for the one before it.
    SUMS: gl.constexpr = 3
    ROWS: gl.constexpr = CONFIG.tile_rows
    BLOCK_N: gl.constexpr = CONFIG.block_n
    parts = ()
    for _ in gl.static_range(SUMS):
        parts = parts + (gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT),)
    for c in gl.static_range(STRIPS):
        k = k_strips.index(slot * STRIPS + c).permute((1, 0))
        k = k.load(gl.DotOperandLayout(1, LAYOUT, WIDTH))
        if CODED:
            k = float16_of_codes(k)
        if CODED:
            q = beside_codes(q_strips.index(c), LAYOUT)
        else:
            q = q_strips.index(c).load(gl.DotOperandLayout(0, LAYOUT, 2))
        parts = parts[1:] + (mma_v2(q, k, parts[0]),)
    s = parts[0]
    for i in gl.static_range(1, SUMS):
        s = s + parts[i]
    return s


@gluon.jit
def consume(
    CONFIG: gl.constexpr,
    q_strips,
    q_numbers,
    k_strips,
    v_strips,
    p_tile,
    boxes,
    q_full,
    q_empty,
    full,
    empty,
    share_ptr,
    pieces_ptr,
    states_ptr,
    sums_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    k_scale_ptr,
    log2_scale,
):
    """The warpgroup that attends. Each warp scores a quarter of a tile's keys and accumulates a quarter
    of each strip."""
    ROWS: gl.constexpr = CONFIG.tile_rows
    BLOCK_N: gl.constexpr = CONFIG.block_n
    ROW: gl.constexpr = CONFIG.row
    STRIPS: gl.constexpr = ROW.head_size // 64
    LATENT_STRIPS: gl.constexpr = CONFIG.head_size // 64
    CODED: gl.constexpr = CONFIG.element_bytes == 1
    # A load that transposes has elements of 16 bits: codes come in pairs, and the even and the odd
    # columns of a strip are accumulated apart.
    PARTS: gl.constexpr = 2 if CODED else 1
    COLUMNS: gl.constexpr = 64 // PARTS
    # Of scores (columns are keys) and of a strip of the output alike.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    B_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    P_TYPE: gl.constexpr = gl.float16 if CODED else q_strips.dtype
    row = gl.arange(0, ROWS, ROW_LAYOUT)
    base_scale = log2_scale
    out_scale = log2_scale
    if CONFIG.scaled:
        out_scale = gl.load(k_scale_ptr)
        base_scale = log2_scale * out_scale
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        _, token, head_tile, num_tokens, position, reach, num_keys, first_tile, num_tiles = (
            read_piece(record)
        )
        sight = (row // CONFIG.pack, position, reach, num_keys, 0)
        # Tiles before this key are seen whole by all rows.
        end_whole = gl.minimum(position + reach + 1, num_keys)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
        # A row is spread over warps: its weights are added up column by column until the end.
        total = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        accs = ()
        for _ in gl.static_range(LATENT_STRIPS * PARTS):
            accs = accs + (gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT),)
        mbarrier.wait(q_full, num_done & 1)
        if CODED:
            inverse = make_float16(q_strips, q_numbers, gl.SliceLayout(1, LAYOUT), ROWS, STRIPS)
        for n in range(0, num_tiles):
            tile = first_tile + n
            slot = step % CONFIG.stages
            free_before(step, empty, n > 0, CONFIG)
            mbarrier.wait(full.index(slot), (step // CONFIG.stages) & 1)
            if CODED:
                s = multiply_keys(q_numbers, k_strips, slot, LAYOUT, CONFIG)
                s = s * gl.expand_dims(inverse, 1)
            else:
                s = multiply_keys(q_strips, k_strips, slot, LAYOUT, CONFIG)
            if n == num_tiles - 1:
                mbarrier.arrive(q_empty, count=1)
            if tile * BLOCK_N + BLOCK_N > end_whole:
                s = mask_scores(s, tile, sight, LAYOUT, CONFIG)
            weights, fade, top = online_softmax(s, top, base_scale, True)
            fade = gl.expand_dims(fade, 1)
            total = total * fade + weights
            p_tile.store(weights.to(P_TYPE))
            barrier()
            p = p_tile.load(A_LAYOUT)
            zero_past_end(boxes, slot, tile, num_keys, ROW)
            sums = ()
            for c in gl.static_range(LATENT_STRIPS):
                v = v_strips.index(slot * STRIPS + c).load(B_LAYOUT)
                if CODED:
                    even, odd = float16_of_pairs(v)
                    sums = sums + (mma_v2(p, even, accs[2 * c] * fade),)
                    sums = sums + (mma_v2(p, odd, accs[2 * c + 1] * fade),)
                else:
                    sums = sums + (mma_v2(p, v, accs[c] * fade),)
            accs = sums
            step += 1

        free_before(step, empty, True, CONFIG)
        total = gl.sum(total, 1)
        split, num_splits, first_program = read_split(record)
        unit = read_unit(record)
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)) * PARTS
        for i in gl.static_range(LATENT_STRIPS * PARTS):
            columns = column + (i // PARTS * 64 + i % PARTS)
            if num_splits == 1:
                store_out(
                    CONFIG,
                    accs[i],
                    top,
                    total,
                    row,
                    columns,
                    token,
                    head_tile,
                    num_tokens,
                    base_scale,
                    out_scale,
                    out_ptr,
                    out_stride_token,
                    out_stride_head,
                    lse_ptr,
                    lse_stride_token,
                    out_ptr,
                    i == 0,
                )
            else:
                store_state(
                    CONFIG,
                    accs[i],
                    top,
                    total,
                    row,
                    columns,
                    row < num_tokens * CONFIG.pack,
                    place_of_state(split, first_program),
                    states_ptr,
                    sums_ptr,
                    i == 0,
                )
        at += num_tiles
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit(
    do_not_specialize=["num_pages", "table_stride", "lse_stride_token"],
    do_not_specialize_on_alignment=["share_ptr", "pieces_ptr", "table_ptr", "k_scale_ptr"],
)
def latent_narrow_kernel(
    q_desc,
    q_rope_desc,
    c_desc,
    share_ptr,
    pieces_ptr,
    table_ptr,
    table_stride,
    num_pages,
    states_ptr,
    sums_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    lse_ptr,
    lse_stride_token,
    k_scale_ptr,
    log2_scale,
    CONFIG: gl.constexpr,
):
    """Set up the ring and roles; see `latent_launch.latent_decode_call` for the arguments."""
    DTYPE: gl.constexpr = q_desc.dtype
    PACK: gl.constexpr = CONFIG.pack
    BLOCK_N: gl.constexpr = CONFIG.block_n
    ROWS: gl.constexpr = CONFIG.rows
    STAGES: gl.constexpr = CONFIG.stages
    STRIPS: gl.constexpr = (CONFIG.head_size + CONFIG.rope_size) // 64
    BOXES: gl.constexpr = STAGES * STRIPS * (BLOCK_N // ROWS)
    TILE_ROWS: gl.constexpr = CONFIG.tile_rows
    CODED: gl.constexpr = CONFIG.element_bytes == 1
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    K_MATRIX: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2) if CODED else MATRIX
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    Q_SHAPE: gl.constexpr = [STRIPS, TILE_ROWS // PACK, 1, PACK, 64]
    q_boxes = gl.allocate_shared_memory(DTYPE, Q_SHAPE, q_desc.layout)
    boxes = gl.allocate_shared_memory(c_desc.dtype, [BOXES, 1, 1, ROWS, 64], c_desc.layout)
    q_strips = reinterpret(q_boxes, DTYPE, [STRIPS, TILE_ROWS, 64], MATRIX)
    q_numbers = q_strips
    k_strips = reinterpret(boxes, c_desc.dtype, [STAGES * STRIPS, BLOCK_N, 64], K_MATRIX)
    v_strips = k_strips
    if CODED:
        q_numbers = reinterpret(q_boxes, gl.float16, [STRIPS, TILE_ROWS, 64], MATRIX)
        v_strips = reinterpret(boxes, gl.int16, [STAGES * STRIPS, BLOCK_N, 32], PAIRS)
    P_TYPE: gl.constexpr = gl.float16 if CODED else DTYPE
    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    p_tile = gl.allocate_shared_memory(P_TYPE, [TILE_ROWS, BLOCK_N], WEIGHTS)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()

    consumer = (
        q_strips,
        q_numbers,
        k_strips,
        v_strips,
        p_tile,
        boxes,
        q_full,
        q_empty,
        full,
        empty,
    )
    consumer = consumer + (share_ptr, pieces_ptr, states_ptr, sums_ptr)
    consumer = consumer + (out_ptr, out_stride_token, out_stride_head)
    consumer = consumer + (lse_ptr, lse_stride_token, k_scale_ptr, log2_scale)
    producer = (c_desc, boxes, full, empty, q_desc, q_rope_desc, q_boxes, q_full, q_empty)
    producer = producer + (share_ptr, pieces_ptr, table_ptr, table_stride, num_pages)
    gl.warp_specialize(
        [(consume, (CONFIG,) + consumer), (produce, (CONFIG,) + producer)],
        [1],
        [CONFIG.producer_registers],
    )
