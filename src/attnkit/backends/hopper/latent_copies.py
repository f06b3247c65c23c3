"""The warps of the decode over latents that copy: a block of each tile, and the queries.

In: descriptors of queries and of the pool, block tables, pieces of work. Out: tiles and queries in
shared memory, announced by barriers. Device code of `latent_decode`, which numbers these.

One warp per block copies latents, in the order in which they are needed and become free: its consumer's
own half first.
"""

# ruff: noqa: SIM102 (device code: `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from attnkit.backends.hopper.gluon_api import gl, gluon, mbarrier, tma_load
from attnkit.backends.hopper.pieces import my_share, read_piece, read_unit
from attnkit.backends.hopper.tile import copy_tile, pages_of_tile


@gluon.jit
def copy_half(
    ME: gl.constexpr,
    SIDE: gl.constexpr,
    CONFIG: gl.constexpr,
    desc,
    boxes,
    full,
    pages,
    block,
):
    """Half SIDE of the columns of block ME of a tile, in quarters that are waited for one by one."""
    QUARTER: gl.constexpr = CONFIG.quarter
    WIDTH: gl.constexpr = QUARTER.head_size
    FIRST: gl.constexpr = 5 * ME if SIDE == ME else 5 * ME + 2
    for c in gl.static_range(2):
        column = (2 * SIDE + c) * WIDTH
        copy_tile(desc, boxes, full.index(FIRST + c), pages, block, 0, column, 2 * ME + c, QUARTER)


@gluon.jit
def produce(
    ME: gl.constexpr,
    CONFIG: gl.constexpr,
    desc,
    mine_boxes,
    others_boxes,
    rope_boxes,
    full,
    empty,
    q_desc,
    q_rope_desc,
    q_left_boxes,
    q_right_boxes,
    q_rope_boxes,
    q_full,
    q_empty,
    share_ptr,
    pieces_ptr,
    table_ptr,
    table_stride,
    num_pages,
):
    """The warp that feeds block ME of each tile; warp 0 feeds Q too. `mine`: the half of the columns
    that consumer ME accumulates."""
    OTHER: gl.constexpr = 1 - ME
    HALF: gl.constexpr = CONFIG.half
    ROPE: gl.constexpr = CONFIG.rope
    WIDTH: gl.constexpr = HALF.head_size
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
        block = 2 * first_tile + ME
        pages = pages_of_tile(table, block, 0, end_key, num_pages, HALF)
        for n in range(0, num_tiles):
            now = pages
            # Past the last tile this finds pages that nobody copies.
            pages = pages_of_tile(table, block + 2, 0, end_key, num_pages, HALF)
            phase = (step & 1) ^ 1
            mbarrier.wait(empty.index(2 * ME + ME), phase)
            copy_half(ME, ME, CONFIG, desc, mine_boxes, full, now, block)
            if ME == 0:
                if n == 0:
                    mbarrier.wait(q_empty, (num_done & 1) ^ 1)
                    mbarrier.expect(q_full, CONFIG.tile_rows * (2 * WIDTH + 64) * 2)
                    for c in gl.static_range(WIDTH // 64):
                        at_box = [token, head_tile, 0, c * 64]
                        tma_load(q_desc, at_box, q_full, q_left_boxes.index(c))
                    for c in gl.static_range(WIDTH // 64):
                        at_box = [token, head_tile, 0, WIDTH + c * 64]
                        tma_load(q_desc, at_box, q_full, q_right_boxes.index(c))
                    tma_load(q_rope_desc, [token, head_tile, 0, 0], q_full, q_rope_boxes.index(0))
            mbarrier.wait(empty.index(2 * ME + OTHER), phase)
            copy_half(ME, OTHER, CONFIG, desc, others_boxes, full, now, block)
            copy_tile(desc, rope_boxes, full.index(5 * ME + 4), now, block, 0, 2 * WIDTH, ME, ROPE)
            block += 2
            step += 1
        at += num_tiles
        record = pieces_ptr + (gl.program_id(0) + unit + 1) * 16
        num_done += 1
