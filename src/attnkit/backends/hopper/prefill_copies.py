"""The warps of the prefill kernel that copy: one feeds K and Q, one V.

In: descriptors, rings and a program's list of row tiles. Out: tiles in shared memory, announced by
barriers. Device code of `prefill`.
"""

# ruff: noqa: SIM102 (device code: `if` on a constant stands alone)
# pyright: reportArgumentType=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from attnkit.backends.hopper.gluon_api import gl, gluon, mbarrier, tma_load
from attnkit.backends.hopper.row_tiles import (
    first_tile_of,
    read_request,
    read_rows,
    read_sight,
)
from attnkit.backends.hopper.tile import copy_tile, first_key_of, pages_of_tile


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
