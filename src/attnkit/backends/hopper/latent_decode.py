"""The decode kernel over latents (MLA): two consumers score a block of keys each and halve the output.

In: packed queries of all heads, the pool of latent rows, and pieces of work (`plan_kernels`). Out:
output and LSE of units that one program has alone, states of the others, which `fold` folds.
Device code; `latent_launch` starts it.

A float32 accumulator of 64 rows by 512 columns is half of a multiprocessor's registers. So consumer 0
keeps the left columns of the output and consumer 1 the right ones. Of a tile of 128 keys each scores 64
by itself; the row maxima and the weights cross over through shared memory, since each half of the
output needs all weights. The weights of a block take the place of its rope columns, which nobody needs
once it is scored. Consumer 1 is half a tile behind, and consumer 0 begins to score its next block before
it adds the other's. So tensor cores see block 0 scored, block 1 added, block 0 added, block 1 scored:
each softmax runs beside other products, and so does each copy. A block comes in quarters of its columns,
the first of which are scored while the last are on their way.

Indices of buffers go through `opaque` in every step: from an address that the compiler knows to be the
same it makes descriptors before the loop, more than there are uniform registers, and each product then
waits for its own to be moved (145 moves a step).
"""

# ruff: noqa: RUF005, SIM102 (device code: tuples grow by +, and `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from attnkit.backends.hopper.gluon_api import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    opaque,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnkit.backends.hopper.latent_copies import produce
from attnkit.backends.hopper.pieces import my_share, read_piece, read_split, read_unit
from attnkit.backends.hopper.states import place_of_state, store_out, store_state
from attnkit.backends.hopper.tile import (
    mask_scores,
    online_softmax,
    zero_past_end,
)


@gluon.jit
def add_others_block(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    ROW_LAYOUT: gl.constexpr,
    ACC_ROWS: gl.constexpr,
    acc,
    top,
    total,
    block,
    others,
    phase,
    there,
    given,
):
    """Wait until the other consumer has weighed its block, and start the product with my half of it.

    Args:
        there: whether it exists; if not, the accumulator is nobody's.
        given: what is the same for all blocks of a piece.

    Returns:
        accumulator in flight, maximum and sum of the rows.
    """
    OTHER: gl.constexpr = 1 - ME
    HALF: gl.constexpr = CONFIG.half
    num_keys, rope_tiles, mine_tiles, mine_boxes, their_top, full, log2_scale = given
    if there:
        named_barrier_sync(block, 8 + OTHER, 256)
        zero_past_end(mine_boxes, OTHER, block, num_keys, HALF)
        # This half has long been there for the other consumer's scores; here it is said to this one.
        mbarrier.wait(full.index(5 * OTHER + 2), phase)
        mbarrier.wait(full.index(5 * OTHER + 3), phase)
    highest = gl.where(there, their_top.load(ROW_LAYOUT), top)
    base = gl.where(highest == float("-inf"), 0.0, highest * log2_scale)
    fade = gl.exp2(top * log2_scale - base)
    acc = acc * gl.expand_dims(gl.convert_layout(fade, ACC_ROWS), 1)
    acc = warpgroup_mma(rope_tiles.index(others), mine_tiles.index(others), acc, is_async=True)
    return acc, highest, total * fade


@gluon.jit
def weigh_block(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    s,
    top,
    total,
    block,
    end_whole,
    sight,
    rope_tiles,
    my_top,
    log2_scale,
):
    """Softmax of my block; its weights and the new maximum go to the other consumer.

    Returns:
        weights, what the accumulator is multiplied by, maximum and sum of the rows.
    """
    if block * CONFIG.block_n + CONFIG.block_n > end_whole:
        s = mask_scores(s, block, sight, S_LAYOUT, CONFIG)
    weights, fade, top = online_softmax(s, top, log2_scale, True)
    p = weights.to(rope_tiles.dtype)
    rope_tiles.index(ME).store(p)
    my_top.store(top)
    fence_async_shared()
    named_barrier_arrive(block, 8 + ME, 256)
    return p, fade, top, total * fade + gl.sum(weights, 1)


@gluon.jit
def consume(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    q_mine,
    q_others,
    q_rope,
    mine_tiles,
    mine_quarters,
    others_quarters,
    rope_tiles,
    mine_boxes,
    my_top,
    their_top,
    sums,
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
    """The warpgroup that scores block ME of each tile and accumulates half ME of the output."""
    OTHER: gl.constexpr = 1 - ME
    WIDTH: gl.constexpr = CONFIG.head_size // 2
    BLOCK_N: gl.constexpr = CONFIG.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, ACC_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    HALF: gl.constexpr = CONFIG.half
    row_token = gl.arange(0, 64, ROW_LAYOUT) // CONFIG.pack
    out_scale = log2_scale
    if CONFIG.scaled:
        out_scale = gl.load(k_scale_ptr)
        log2_scale = log2_scale * out_scale
    at, end, record = my_share(share_ptr)
    step = 0
    num_done = 0
    while at < end:
        _, token, head_tile, num_tokens, position, reach, num_keys, first_tile, num_tiles = (
            read_piece(record)
        )
        sight = (row_token, position, reach, num_keys, 0)
        # Blocks before this key are seen whole by all rows.
        end_whole = gl.minimum(position + reach + 1, num_keys)
        top = gl.full([64], float("-inf"), gl.float32, ROW_LAYOUT)
        total = gl.zeros([64], gl.float32, ROW_LAYOUT)
        acc = gl.zeros([64, WIDTH], gl.float32, ACC_LAYOUT)
        mbarrier.wait(q_full, num_done & 1)
        q_end = q_rope.load(Q_LAYOUT)
        given = (num_keys, rope_tiles, mine_tiles, mine_boxes, their_top, full, log2_scale)
        for n in range(0, num_tiles):
            block = 2 * (first_tile + n) + ME
            phase = step & 1
            nil = opaque(gl.program_id(0) * 0)
            own = nil + ME
            others = nil + OTHER
            if ME == 1:
                # Half a tile behind consumer 0.
                acc, top, total = add_others_block(
                    ME,
                    CONFIG,
                    ROW_LAYOUT,
                    ACC_ROWS,
                    acc,
                    top,
                    total,
                    block - 1,
                    others,
                    phase,
                    True,
                    given,
                )
            else:
                # Nothing is on its way here, but ptxas does not see that in the code of Triton 3.9:
                # it would wait for the scores before it fades the accumulator (C7517).
                acc = warpgroup_mma_wait(0, deps=(acc,))
                if n > 0:
                    named_barrier_sync(block, 11, 256)
            s = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
            for c in gl.static_range(2):
                mbarrier.wait(full.index(5 * ME + c), phase)
                k = mine_quarters.index(2 * own + c).permute((1, 0))
                q = q_mine.index(nil + c)
                s = warpgroup_mma(q, k, s, use_acc=c > 0, is_async=True)
                if ME == 1:
                    if c == 0:
                        acc = warpgroup_mma_wait(1, deps=(acc,))
                        mbarrier.arrive(empty.index(2 * OTHER + ME), count=1)
            for c in gl.static_range(2):
                mbarrier.wait(full.index(5 * ME + 2 + c), phase)
                k = others_quarters.index(2 * own + c).permute((1, 0))
                s = warpgroup_mma(q_others.index(nil + c), k, s, is_async=True)
            mbarrier.wait(full.index(5 * ME + 4), phase)
            s = warpgroup_mma(q_end, rope_tiles.index(own).permute((1, 0)), s, is_async=True)
            if ME == 0:
                # There is nothing to add before the first block: whatever comes of it is not kept.
                acc, top, total = add_others_block(
                    ME,
                    CONFIG,
                    ROW_LAYOUT,
                    ACC_ROWS,
                    acc,
                    top,
                    total,
                    block - 1,
                    others,
                    phase ^ 1,
                    n > 0,
                    given,
                )
                s, q_end = warpgroup_mma_wait(1, deps=(s, q_end))
            else:
                # Consumer 0's turn to score. Had it begun with this one, both would be done at once,
                # and no products left for the time of this softmax.
                s = warpgroup_mma_wait(2, deps=(s,))
                if n < num_tiles - 1:
                    named_barrier_arrive(block, 11, 256)
                s, q_end = warpgroup_mma_wait(0, deps=(s, q_end))
            if n == num_tiles - 1:
                mbarrier.arrive(q_empty, count=1)
            p, fade, top, total = weigh_block(
                ME,
                CONFIG,
                S_LAYOUT,
                s,
                top,
                total,
                block,
                end_whole,
                sight,
                rope_tiles,
                my_top,
                log2_scale,
            )
            # The branch in it keeps the assembler from lifting the wait above the softmax.
            zero_past_end(mine_boxes, ME, block, num_keys, HALF)
            if ME == 0:
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(2 * OTHER + ME), count=1, pred=n > 0)
            acc = acc * gl.expand_dims(gl.convert_layout(fade, ACC_ROWS), 1)
            p = gl.convert_layout(p, P_LAYOUT)
            kept = n > 0 if ME == 0 else True
            acc = warpgroup_mma(p, mine_tiles.index(own), acc, use_acc=kept, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            mbarrier.arrive(empty.index(2 * ME + ME), count=1)
            step += 1
        if ME == 0:
            nil = opaque(gl.program_id(0) * 0)
            acc, top, total = add_others_block(
                ME,
                CONFIG,
                ROW_LAYOUT,
                ACC_ROWS,
                acc,
                top,
                total,
                2 * (first_tile + num_tiles) - 1,
                nil + OTHER,
                (step & 1) ^ 1,
                True,
                given,
            )
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(2 * OTHER + ME), count=1)

        sums.index(ME).store(total)
        named_barrier_sync(step, 10, 256)
        total = total + sums.index(OTHER).load(ROW_LAYOUT)
        split, num_splits, first_program = read_split(record)
        unit = read_unit(record)
        top = gl.convert_layout(top, ACC_ROWS)
        total = gl.convert_layout(total, ACC_ROWS)
        row = gl.arange(0, 64, ACC_ROWS)
        column = ME * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC_LAYOUT))
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
                log2_scale,
                out_scale,
                out_ptr,
                out_stride_token,
                out_stride_head,
                lse_ptr,
                lse_stride_token,
                out_ptr,
                ME == 0,
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
                ME == 0,
            )
        at += num_tiles
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1


@gluon.jit(
    do_not_specialize=["num_pages", "table_stride", "lse_stride_token"],
    do_not_specialize_on_alignment=["share_ptr", "pieces_ptr", "table_ptr", "k_scale_ptr"],
)
def latent_decode_kernel(
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
    """Set up buffers and roles; see `latent_launch.latent_decode_call` for the arguments."""
    DTYPE: gl.constexpr = q_desc.dtype
    WIDTH: gl.constexpr = CONFIG.head_size // 2
    PACK: gl.constexpr = CONFIG.pack
    BLOCK_N: gl.constexpr = CONFIG.block_n
    ROWS: gl.constexpr = CONFIG.rows
    BOXES: gl.constexpr = BLOCK_N // ROWS
    STRIPS: gl.constexpr = WIDTH // 64
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    Q_BOX: gl.constexpr = [STRIPS, 64 // PACK, 1, PACK, 64]
    q_left_boxes = gl.allocate_shared_memory(DTYPE, Q_BOX, q_desc.layout)
    q_right_boxes = gl.allocate_shared_memory(DTYPE, Q_BOX, q_desc.layout)
    q_rope_boxes = gl.allocate_shared_memory(DTYPE, [1, 64 // PACK, 1, PACK, 64], q_desc.layout)
    HALVES: gl.constexpr = [2 * STRIPS * BOXES, 1, 1, ROWS, 64]
    left_boxes = gl.allocate_shared_memory(DTYPE, HALVES, c_desc.layout)
    right_boxes = gl.allocate_shared_memory(DTYPE, HALVES, c_desc.layout)
    rope_boxes = gl.allocate_shared_memory(DTYPE, [2 * BOXES, 1, 1, ROWS, 64], c_desc.layout)
    q_left = reinterpret(q_left_boxes, DTYPE, [2, 64, WIDTH // 2], MATRIX)
    q_right = reinterpret(q_right_boxes, DTYPE, [2, 64, WIDTH // 2], MATRIX)
    q_rope = reinterpret(q_rope_boxes, DTYPE, [64, 64], MATRIX)
    left_tiles = reinterpret(left_boxes, DTYPE, [2, BLOCK_N, WIDTH], MATRIX)
    right_tiles = reinterpret(right_boxes, DTYPE, [2, BLOCK_N, WIDTH], MATRIX)
    QUARTERS: gl.constexpr = [4, BLOCK_N, WIDTH // 2]
    left_quarters = reinterpret(left_boxes, DTYPE, QUARTERS, MATRIX)
    right_quarters = reinterpret(right_boxes, DTYPE, QUARTERS, MATRIX)
    rope_tiles = reinterpret(rope_boxes, DTYPE, [2, BLOCK_N, 64], MATRIX)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    left_top = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    right_top = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    # Of block b: 5 b its own consumer's half in two quarters, then the other half, then rope.
    full = gl.allocate_shared_memory(gl.int64, [10, 1], BARRIER)
    # Of block b: 2 b + c is what consumer c releases: its half, and the rope of the other's block.
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(10):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()

    shared = (sums, q_full, q_empty, full, empty, share_ptr, pieces_ptr)
    shared = shared + (states_ptr, sums_ptr, out_ptr, out_stride_token, out_stride_head)
    shared = shared + (lse_ptr, lse_stride_token, k_scale_ptr, log2_scale)
    left = (q_left, q_right, q_rope, left_tiles, left_quarters, right_quarters)
    left = left + (rope_tiles, left_boxes, left_top, right_top) + shared
    right = (q_right, q_left, q_rope, right_tiles, right_quarters, left_quarters)
    right = right + (rope_tiles, right_boxes, right_top, left_top) + shared
    feed = (rope_boxes, full, empty, q_desc, q_rope_desc, q_left_boxes, q_right_boxes)
    feed = feed + (q_rope_boxes, q_full, q_empty, share_ptr, pieces_ptr, table_ptr, table_stride)
    feed = feed + (num_pages,)
    REGISTERS: gl.constexpr = CONFIG.producer_registers
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), CONFIG) + left),
            (consume, (gl.constexpr(1), CONFIG) + right),
            (produce, (gl.constexpr(0), CONFIG, c_desc, left_boxes, right_boxes) + feed),
            (produce, (gl.constexpr(1), CONFIG, c_desc, right_boxes, left_boxes) + feed),
        ],
        [4, 1, 1],
        [CONFIG.consumer_registers, REGISTERS, REGISTERS],
    )
