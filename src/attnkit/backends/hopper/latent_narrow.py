"""The narrow decode kernel over latents: up to 16 rows of queries, as fast as latents can be read.

In and out: as `latent_decode`, whose row tiles have 64 rows. With a few heads and one query each most of
those would be empty, and Q, copied with them, takes the place of latents that could be on their way.
Here products are a warp's (mma.sync, 16 rows), and one warpgroup scores and accumulates whole rows,
strip by strip of 64 columns, while one warp copies. Device code; `latent_launch` starts it.
"""

# ruff: noqa: RUF005 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import (
    barrier,
    fence_async_shared,
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
    at, end, record = my_share(share_ptr, CONFIG.head_tiles)
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
def consume(
    CONFIG: gl.constexpr,
    q_strips,
    strips,
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
    log2_scale,
):
    """The warpgroup that attends. Each warp scores a quarter of a tile's keys and accumulates a quarter
    of each strip."""
    ROWS: gl.constexpr = CONFIG.tile_rows
    BLOCK_N: gl.constexpr = CONFIG.block_n
    ROW: gl.constexpr = CONFIG.row
    STRIPS: gl.constexpr = ROW.head_size // 64
    LATENT_STRIPS: gl.constexpr = CONFIG.head_size // 64
    # Of scores (columns are keys) and of a strip of the output alike.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    B_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.arange(0, ROWS, ROW_LAYOUT)
    at, end, record = my_share(share_ptr, CONFIG.head_tiles)
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
        for _ in gl.static_range(LATENT_STRIPS):
            accs = accs + (gl.zeros([ROWS, 64], gl.float32, LAYOUT),)
        mbarrier.wait(q_full, num_done & 1)
        for n in range(0, num_tiles):
            tile = first_tile + n
            slot = step % CONFIG.stages
            free_before(step, empty, n > 0, CONFIG)
            mbarrier.wait(full.index(slot), (step // CONFIG.stages) & 1)
            # Three sums, so that a product need not wait for the one before it.
            parts = ()
            for _ in gl.static_range(3):
                parts = parts + (gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT),)
            for c in gl.static_range(STRIPS):
                k = strips.index(slot * STRIPS + c).permute((1, 0)).load(B_LAYOUT)
                q = q_strips.index(c).load(A_LAYOUT)
                parts = (parts[1], parts[2], mma_v2(q, k, parts[0]))
            s = parts[0] + parts[1] + parts[2]
            if n == num_tiles - 1:
                mbarrier.arrive(q_empty, count=1)
            if tile * BLOCK_N + BLOCK_N > end_whole:
                s = mask_scores(s, tile, sight, LAYOUT, CONFIG)
            weights, fade, top = online_softmax(s, top, log2_scale, True)
            fade = gl.expand_dims(fade, 1)
            total = total * fade + weights
            p = gl.convert_layout(weights.to(q_strips.dtype), A_LAYOUT)
            zero_past_end(boxes, slot, tile, num_keys, ROW)
            sums = ()
            for c in gl.static_range(LATENT_STRIPS):
                v = strips.index(slot * STRIPS + c).load(B_LAYOUT)
                sums = sums + (mma_v2(p, v, accs[c] * fade),)
            accs = sums
            step += 1

        free_before(step, empty, True, CONFIG)
        total = gl.sum(total, 1)
        split, num_splits, first_program = read_split(record)
        unit = read_unit(record)
        column = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        for c in gl.static_range(LATENT_STRIPS):
            if num_splits == 1:
                store_out(
                    CONFIG,
                    accs[c],
                    top,
                    total,
                    row,
                    column + c * 64,
                    token,
                    head_tile,
                    num_tokens,
                    log2_scale,
                    log2_scale,
                    out_ptr,
                    out_stride_token,
                    out_stride_head,
                    lse_ptr,
                    lse_stride_token,
                    out_ptr,
                    c == 0,
                )
            else:
                store_state(
                    CONFIG,
                    accs[c],
                    top,
                    total,
                    row,
                    column + c * 64,
                    row < num_tokens * CONFIG.pack,
                    place_of_state(split, first_program),
                    states_ptr,
                    sums_ptr,
                    c == 0,
                )
        at += num_tiles
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit(
    do_not_specialize=["num_pages", "table_stride", "lse_stride_token"],
    do_not_specialize_on_alignment=["share_ptr", "pieces_ptr", "table_ptr"],
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
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    Q_SHAPE: gl.constexpr = [STRIPS, TILE_ROWS // PACK, 1, PACK, 64]
    q_boxes = gl.allocate_shared_memory(DTYPE, Q_SHAPE, q_desc.layout)
    boxes = gl.allocate_shared_memory(DTYPE, [BOXES, 1, 1, ROWS, 64], c_desc.layout)
    q_strips = reinterpret(q_boxes, DTYPE, [STRIPS, TILE_ROWS, 64], MATRIX)
    strips = reinterpret(boxes, DTYPE, [STAGES * STRIPS, BLOCK_N, 64], MATRIX)

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

    consumer = (q_strips, strips, boxes, q_full, q_empty, full, empty, share_ptr, pieces_ptr)
    consumer = consumer + (states_ptr, sums_ptr, out_ptr, out_stride_token, out_stride_head)
    consumer = consumer + (lse_ptr, lse_stride_token, log2_scale)
    producer = (c_desc, boxes, full, empty, q_desc, q_rope_desc, q_boxes, q_full, q_empty)
    producer = producer + (share_ptr, pieces_ptr, table_ptr, table_stride, num_pages)
    gl.warp_specialize(
        [(consume, (CONFIG,) + consumer), (produce, (CONFIG,) + producer)],
        [1],
        [CONFIG.producer_registers],
    )
