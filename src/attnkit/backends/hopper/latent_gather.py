"""The gather kernels: chosen rows of a latent cache as pages of 16-bit numbers, for the decode kernels.

In: per query a list of positions, and pages of rows of any format. Out: per query the rows that its
list names, in order and without gaps, and how many, in the records of its pieces. So each row is read
alone and made numbers once, and all heads read it out of pages by the copy engine. Device
code, in plain Triton; `latent_gather_launch` starts it.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from attnkit.backends.codes import TILE, numbers, with_tile_scales
from attnkit.backends.hopper.plan_kernels import put_num_keys
from attnkit.backends.queries import seen_by_query


@triton.jit(
    do_not_specialize=["num_reqs", "first_token", "size"],
    do_not_specialize_on_alignment=[
        "owners_ptr",
        "lens_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
    ],
)
def chosen_lens_kernel(
    owners_ptr,
    lens_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_reqs,
    first_token,
    size,
    DISTINCT: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program t finds the request of a query and how many keys it sees, and how many its list of `size`
    positions can name at most: where all are DISTINCT no more than it sees."""
    t = tl.program_id(0)
    request, num_seen = seen_by_query(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, first_token + t, BLOCK_R
    )
    num_seen = tl.maximum(num_seen, 0)
    most = tl.where(num_seen > 0, size, 0)
    if DISTINCT:
        most = tl.minimum(most, num_seen)
    tl.store(owners_ptr + 2 * t, tl.where(num_seen > 0, request, 0))
    tl.store(owners_ptr + 2 * t + 1, num_seen)
    tl.store(lens_ptr + t, most)


@triton.jit(
    do_not_specialize=["size", "lists_stride", "table_stride", "page_units", "row_units", "room"],
    do_not_specialize_on_alignment=[
        "lists_ptr",
        "owners_ptr",
        "table_ptr",
        "share_ptr",
        "pieces_ptr",
        "units_ptr",
    ],
)
def gather_latents_kernel(
    lists_ptr,
    owners_ptr,
    table_ptr,
    latent_ptr,
    rotated_ptr,
    tile_scales_ptr,
    rows_ptr,
    share_ptr,
    pieces_ptr,
    units_ptr,
    size,
    lists_stride,
    table_stride,
    page_units,
    row_units,
    room,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    CODES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (t, j) copies what places j * ROWS and on of a query's list name, behind what the places
    before them name. The first program of a query also says how many rows it has.

    Pages and rows of the cache lie `page_units` and `row_units` times 16 bytes apart; a query has `room`
    rows, of which those past its last are left as they are.
    """
    t = tl.program_id(0)
    j = tl.program_id(1)
    request = tl.load(owners_ptr + 2 * t)
    num_seen = tl.load(owners_ptr + 2 * t + 1)
    if (num_seen == 0) & (j > 0):
        return
    table = table_ptr + request.to(tl.int64) * table_stride
    lists = lists_ptr + t.to(tl.int64) * lists_stride

    k = j * ROWS + tl.arange(0, ROWS)
    position = tl.load(lists + k, mask=k < size, other=-1)
    named = (position >= 0) & (position < num_seen)
    position = tl.where(named, position, 0)
    page = tl.load(table + position // PAGE_SIZE, mask=named, other=0).to(tl.int64)
    units = page * page_units + (position % PAGE_SIZE) * row_units
    columns = tl.arange(0, RANK)[None, :]
    rope_columns = tl.arange(0, ROPE)[None, :]
    there = named[:, None]
    # Numbers in 16 bytes, so that the compiler sees aligned rows.
    WIDE: tl.constexpr = 128 // latent_ptr.dtype.element_ty.primitive_bitwidth
    WIDE_ROPE: tl.constexpr = 128 // rotated_ptr.dtype.element_ty.primitive_bitwidth
    latent = tl.load(latent_ptr + units[:, None] * WIDE + columns, mask=there)
    rotated = tl.load(rotated_ptr + units[:, None] * WIDE_ROPE + rope_columns, mask=there)
    scales = None
    if tile_scales_ptr is not None:
        tiles = tl.arange(0, RANK // TILE)[None, :]
        scales = tl.load(tile_scales_ptr + units[:, None] * 4 + tiles, mask=there)

    # While the rows are on their way.
    end = tl.where(j == 0, size, tl.minimum(j * ROWS, size))
    num_named = 0
    for first in range(0, end, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        listed = tl.load(lists + at, mask=at < end, other=-1)
        num_named += tl.sum(((listed >= 0) & (listed < num_seen)).to(tl.int32), 0)
    place = tl.where(j == 0, 0, num_named) + tl.cumsum(named.to(tl.int32), 0) - 1

    latent = numbers(latent, CODES, rows_ptr.dtype.element_ty)
    rotated = numbers(rotated, CODES, rows_ptr.dtype.element_ty)
    if scales is not None:
        latent = with_tile_scales(latent, scales, rows_ptr.dtype.element_ty)
    row = (t.to(tl.int64) * room + place) * (RANK + ROPE)
    tl.store(rows_ptr + row[:, None] + columns, latent, mask=there)
    tl.store(rows_ptr + row[:, None] + RANK + rope_columns, rotated, mask=there)
    if j == 0:
        num_units = tl.load(share_ptr + 2) // GROUPS
        # A replayed graph may have more programs than its step has queries.
        if t < num_units:
            for group in tl.static_range(GROUPS):
                put_num_keys(share_ptr, pieces_ptr, units_ptr, group * num_units + t, num_named)
