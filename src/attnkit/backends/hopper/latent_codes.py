"""The decode kernel over float8 latents: keys are the rows of its products, queries the columns.

In and out: as `latent_decode`. A product of a warpgroup (wgmma) takes its left operand out of registers.
So codes go from shared memory into registers, become float16 numbers there, once for all queries of a
tile, and are multiplied: keys (64 rows) with Q for scores, and values, turned over (64 rows are
columns of a latent), with the weights for the output, which lies turned over in registers too. Numbers
never go back to shared memory, which bounds such a kernel: as matrices of 16 bits they would cost
it three times what the codes do.

One warpgroup scores a block of 64 keys after the other (`code_scores`), two accumulate half of the
columns each, and a warp copies. Device code; `latent_launch` starts it.
"""

# ruff: noqa: RUF005 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from attnkit.backends.hopper.code_scores import score
from attnkit.backends.hopper.gluon_api import (
    barrier,
    fence_async_shared,
    float16_of_pairs,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnkit.backends.hopper.pieces import my_share, read_piece, read_split, read_unit
from attnkit.backends.hopper.states import place_of_state, store_out, store_state
from attnkit.backends.hopper.tile import copy_tile, pages_of_tile, zero_past_end


@gluon.jit
def produce(
    CONFIG: gl.constexpr,
    desc,
    boxes,
    rope_boxes,
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
    """The warp that feeds latents and Q, pages looked up a block ahead."""
    STRIPS: gl.constexpr = CONFIG.head_size // 64
    STAGES: gl.constexpr = CONFIG.stages
    ROPE: gl.constexpr = CONFIG.rope
    Q_BYTES: gl.constexpr = CONFIG.tile_rows * CONFIG.row.head_size * 2
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        (
            request,
            token,
            head_tile,
            num_tokens,
            position,
            reach,
            num_keys,
            first_block,
            num_blocks,
        ) = read_piece(record)
        unit = read_unit(record)
        table = table_ptr + request.to(gl.int64) * table_stride
        end_key = gl.maximum(gl.minimum(position + reach + num_tokens, num_keys), 0)
        pages = pages_of_tile(table, first_block, 0, end_key, num_pages, CONFIG)
        for n in range(0, num_blocks):
            block = first_block + n
            slot = step % STAGES
            now = pages
            # Past the last block this finds pages that nobody copies.
            pages = pages_of_tile(table, block + 1, 0, end_key, num_pages, CONFIG)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            copy_tile(desc, boxes, full.index(slot), now, block, 0, 0, slot, CONFIG)
            copy_tile(desc, rope_boxes, full.index(slot), now, block, 0, 64 * STRIPS, slot, ROPE)
            if n == 0:
                mbarrier.wait(q_empty, (num_done & 1) ^ 1)
                mbarrier.expect(q_full, Q_BYTES)
                for c in gl.static_range(STRIPS):
                    tma_load(q_desc, [token, head_tile, 0, c * 64], q_full, q_boxes.index(c))
                rope_box = q_boxes.index(STRIPS)
                tma_load(q_rope_desc, [token, head_tile, 0, 0], q_full, rope_box)
            step += 1
        at += num_blocks
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit
def turned_values(v_pairs, at, LAYOUT: gl.constexpr):
    """64 columns of a block's values as a left operand: (columns, keys), where of each 16 rows 8 are the
    even columns and 8 the odd ones. No register moves."""
    # A load that transposes has elements of 16 bits: codes come in pairs of columns. A warp has 8 pairs.
    OF_PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, 64],
    )
    even, odd = float16_of_pairs(v_pairs.index(at).permute((1, 0)).load(OF_PAIRS))
    v = gl.reshape(gl.join(even, odd), [4, 8, 64, 2])
    v = gl.reshape(gl.permute(v, [0, 3, 1, 2]), [64, 64])
    return gl.convert_layout(v, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def turned_back(acc):
    """(queries, 64 columns in order) of an accumulator (columns as in `turned_values`, queries)."""
    QUERIES: gl.constexpr = acc.shape[1]
    acc = gl.permute(gl.reshape(acc, [4, 2, 8, QUERIES]), [3, 0, 2, 1])
    return gl.reshape(acc, [QUERIES, 64])


@gluon.jit
def accumulate(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    v_pairs,
    boxes,
    p_tiles,
    fades,
    rises_of,
    ends,
    full,
    empty,
    p_full,
    p_empty,
    ends_full,
    ends_empty,
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
    """The warpgroup that accumulates half ME of the output's columns."""
    QUERIES: gl.constexpr = CONFIG.tile_rows
    STAGES: gl.constexpr = CONFIG.stages
    # Of 64 columns: in all, and mine.
    STRIPS: gl.constexpr = CONFIG.head_size // 64
    MINE: gl.constexpr = STRIPS // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    out_scale = gl.load(k_scale_ptr)
    base_scale = log2_scale * out_scale
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        _, token, head_tile, num_tokens, _, _, num_keys, first_block, num_blocks = read_piece(
            record
        )
        accs = ()
        for _ in gl.static_range(MINE):
            accs = accs + (gl.zeros([64, QUERIES], gl.float32, LAYOUT),)
        for n in range(0, num_blocks):
            slot = step % STAGES
            turn = step & 1
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            zero_past_end(boxes, slot, first_block + n, num_keys, CONFIG)
            first = slot * STRIPS + MINE * ME
            v = turned_values(v_pairs, first, LAYOUT)
            mbarrier.wait(p_full.index(turn), (step >> 1) & 1)
            p = p_tiles.index(turn)
            if gl.max(rises_of.index(turn).load(ONE), 0) > 0.0:
                fade = gl.expand_dims(fades.index(turn).load(OF_QUERY), 0)
                faded = ()
                for i in gl.static_range(MINE):
                    faded = faded + (accs[i] * fade,)
                accs = faded
            sums = ()
            for i in gl.static_range(MINE):
                acc = warpgroup_mma(v, p, accs[i], is_async=True)
                acc, v = warpgroup_mma_wait(0, deps=(acc, v))
                sums = sums + (acc,)
                if i + 1 < MINE:
                    v = turned_values(v_pairs, first + i + 1, LAYOUT)
            accs = sums
            mbarrier.arrive(p_empty.index(turn), count=1)
            mbarrier.arrive(empty.index(slot), count=1)
            step += 1

        split, num_splits, first_program = read_split(record)
        unit = read_unit(record)
        mbarrier.wait(ends_full, num_done & 1)
        for i in gl.static_range(MINE):
            acc = turned_back(accs[i])
            top = ends.index(0).load(gl.SliceLayout(1, acc.type.layout))
            total = ends.index(1).load(gl.SliceLayout(1, acc.type.layout))
            row = gl.arange(0, QUERIES, gl.SliceLayout(1, acc.type.layout))
            column = gl.arange(0, 64, gl.SliceLayout(0, acc.type.layout))
            column = column + (MINE * ME + i) * 64
            if num_splits == 1:
                store_out(
                    CONFIG,
                    acc,
                    top,
                    total,
                    row,
                    column,
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
                    MINE * ME + i == 0,
                )
            else:
                store_state(
                    CONFIG,
                    acc,
                    top,
                    total,
                    row,
                    column,
                    row < num_tokens * CONFIG.pack,
                    place_of_state(split, first_program),
                    states_ptr,
                    sums_ptr,
                    MINE * ME + i == 0,
                )
        mbarrier.arrive(ends_empty, count=1)
        at += num_blocks
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit(
    do_not_specialize=["num_pages", "table_stride", "lse_stride_token"],
    do_not_specialize_on_alignment=["share_ptr", "pieces_ptr", "table_ptr", "k_scale_ptr"],
)
def latent_codes_kernel(
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
    """Set up rings and roles; see `latent_launch.latent_decode_call` for the arguments."""
    DTYPE: gl.constexpr = q_desc.dtype
    PACK: gl.constexpr = CONFIG.pack
    BLOCK_N: gl.constexpr = CONFIG.block_n
    ROWS: gl.constexpr = CONFIG.rows
    STAGES: gl.constexpr = CONFIG.stages
    QUERIES: gl.constexpr = CONFIG.tile_rows
    BOXES: gl.constexpr = STAGES * (BLOCK_N // ROWS)
    STRIPS: gl.constexpr = CONFIG.head_size // 64
    Q_MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    CODES: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    P_MATRIX: gl.constexpr = gl.NVMMASharedLayout(2 * QUERIES, 16, 2)
    Q_SHAPE: gl.constexpr = [STRIPS + 1, QUERIES // PACK, 1, PACK, 64]
    q_boxes = gl.allocate_shared_memory(DTYPE, Q_SHAPE, q_desc.layout)
    boxes = gl.allocate_shared_memory(c_desc.dtype, [BOXES * STRIPS, 1, 1, ROWS, 64], c_desc.layout)
    rope_boxes = gl.allocate_shared_memory(c_desc.dtype, [BOXES, 1, 1, ROWS, 64], c_desc.layout)
    p_boxes = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, QUERIES], P_MATRIX)
    q_strips = reinterpret(q_boxes, DTYPE, [STRIPS + 1, QUERIES, 64], Q_MATRIX)
    q_numbers = reinterpret(q_boxes, gl.float16, [STRIPS + 1, QUERIES, 64], Q_MATRIX)
    k_strips = reinterpret(boxes, c_desc.dtype, [STAGES * STRIPS, BLOCK_N, 64], CODES)
    rope_strips = reinterpret(rope_boxes, c_desc.dtype, [STAGES, BLOCK_N, 64], CODES)
    v_pairs = reinterpret(boxes, gl.int16, [STAGES * STRIPS, BLOCK_N, 32], PAIRS)
    p_tiles = reinterpret(p_boxes, gl.float16, [2, BLOCK_N, QUERIES], P_MATRIX)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [QUERIES], VECTOR)
    bases = gl.allocate_shared_memory(gl.float32, [QUERIES], VECTOR)
    fades = gl.allocate_shared_memory(gl.float32, [2, QUERIES], VECTOR)
    rises_of = gl.allocate_shared_memory(gl.float32, [2, 1], VECTOR)
    # Maxima and sums.
    ends = gl.allocate_shared_memory(gl.float32, [2, QUERIES], VECTOR)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ends_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ends_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for s in gl.static_range(STAGES):
        # Latents, and the columns behind them; read by all three warpgroups.
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=3)
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
    mbarrier.init(ends_full, count=1)
    mbarrier.init(ends_empty, count=2)
    fence_async_shared()
    barrier()

    passed = (p_tiles, fades, rises_of, ends)
    ring = (full, empty, p_full, p_empty, ends_full, ends_empty, share_ptr, pieces_ptr)
    sums = (v_pairs, boxes) + passed + ring + (states_ptr, sums_ptr)
    sums = sums + (out_ptr, out_stride_token, out_stride_head, lse_ptr, lse_stride_token)
    sums = sums + (k_scale_ptr, log2_scale)
    scores = (
        (q_strips, q_numbers, k_strips, rope_strips, scales, bases)
        + passed
        + (q_full, q_empty)
        + ring
    )
    scores = scores + (k_scale_ptr, log2_scale)
    feed = (c_desc, boxes, rope_boxes, full, empty, q_desc, q_rope_desc, q_boxes, q_full, q_empty)
    feed = feed + (share_ptr, pieces_ptr, table_ptr, table_stride, num_pages)
    gl.warp_specialize(
        [
            (accumulate, (gl.constexpr(0), CONFIG) + sums),
            (accumulate, (gl.constexpr(1), CONFIG) + sums),
            (score, (CONFIG,) + scores),
            (produce, (CONFIG,) + feed),
        ],
        [4, 4, 1],
        [CONFIG.consumer_registers, CONFIG.scorer_registers, CONFIG.producer_registers],
    )
