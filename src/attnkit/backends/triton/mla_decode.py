"""The decode kernel over latents: absorbed queries against rows that are keys and values at once.

In: queries [absorbed | rotated] of requests with at most `max_query_len` of them, and pages of rows
[latent | rotated part]. Out: attended latents and LSE. Device code; `mla_launch` starts it.

The keys of a request are cut into as many segments as programs share it, and `merge.merge_kernel` folds
their parts in order. Heads lie side by side in the rows of a tile, and a tile of latents is loaded once
for scores and values. Its accumulator fills half of the registers, so unlike the dense kernel it has
no second one to make the number of programs invisible in the bits.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnkit.backends.codes import TILE, numbers, with_tile_scales
from attnkit.backends.triton.segments import segment_len_of
from attnkit.backends.triton.tile import (
    finish,
    load_rows,
    offsets_of,
    online_softmax,
    pages_of,
    tile_rows,
)


@triton.jit(
    do_not_specialize=[
        "max_query_len",
        "query_tiles",
        "num_splits",
        "part_rows",
        "table_stride",
    ],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "kv_lens_ptr", "table_ptr"],
)
def mla_decode_kernel(
    q_ptr,
    latent_ptr,
    rotated_ptr,
    tile_scales_ptr,
    k_scale_ptr,
    out_ptr,
    lse_ptr,
    part_acc_ptr,
    part_top_ptr,
    part_total_ptr,
    query_start_loc_ptr,
    kv_lens_ptr,
    table_ptr,
    max_query_len,
    query_tiles,
    scale,
    num_splits,
    part_rows,
    q_stride_token,
    q_stride_head,
    latent_stride_page,
    latent_stride_row,
    rotated_stride_page,
    rotated_stride_row,
    tile_stride_page,
    tile_stride_row,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Program s of `num_splits` does the s-th segment of every request, and stores its state as a part
    laid out as by the dense kernel; without `part_acc_ptr` there is one segment, which is finished.
    Rotated parts without strides lie as latents do."""
    BLOCK_Q: tl.constexpr = BLOCK_M // HEAD_TILE
    HEAD_TILES: tl.constexpr = (NUM_HEADS + HEAD_TILE - 1) // HEAD_TILE
    split = tl.program_id(0) % num_splits
    unit = tl.program_id(0) // num_splits
    head_tile = unit % HEAD_TILES
    query_tile = unit // HEAD_TILES % query_tiles
    request = unit // HEAD_TILES // query_tiles

    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    first_query = query_tile * BLOCK_Q
    if (first_query >= query_len) | (query_len > max_query_len):
        return
    kv_len = tl.load(kv_lens_ptr + request)
    # One past the last key that the tile's last query sees; none where drafts are longer than that.
    end_query = tl.minimum(first_query + BLOCK_Q, query_len)
    end_key = tl.maximum(kv_len - query_len + end_query, 0)
    segment_len = segment_len_of(end_key, num_splits, SEGMENT, BLOCK_N)
    segment_start = split * segment_len
    segment_end = tl.minimum(segment_start + segment_len, end_key)
    if part_acc_ptr is not None and segment_start >= segment_end:
        return

    table = table_ptr + request.to(tl.int64) * table_stride
    query, head, live = tile_rows(first_query, query_len, head_tile, NUM_HEADS, HEAD_TILE, BLOCK_M)
    token = (first_token + query).to(tl.int64)
    q_offsets = token * q_stride_token + head.to(tl.int64) * q_stride_head
    q = load_rows(q_ptr, q_offsets, live, RANK, BLOCK_L, True)
    q_rotated = load_rows(q_ptr, q_offsets, live, ROPE, BLOCK_R, True, RANK)
    log2_scale = scale * 1.4426950408889634
    k_scale = None
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr)
        log2_scale = log2_scale * k_scale
    row_end = kv_len - query_len + query + 1
    columns = tl.arange(0, BLOCK_L)
    latent_columns = columns < RANK

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    page = pages_of(table, segment_start, segment_end, PAGE_SIZE, BLOCK_N)
    # Hoisted out of the loop, the descriptors of q's parts for wgmma would take 72 registers.
    for tile_start in tl.range(segment_start, segment_end, BLOCK_N, disable_licm=True):
        tile_start = tl.multiple_of(tile_start, BLOCK_N)
        keys = tile_start + tl.arange(0, BLOCK_N)
        # Keys that no row sees are not loaded: they may be NaN, and 0 * NaN is NaN.
        wanted = keys < end_key
        latent_offsets = offsets_of(
            table, page, keys, first_token, latent_stride_page, latent_stride_row, PAGE_SIZE
        )
        rotated_offsets = latent_offsets
        if rotated_stride_page is not None:
            rotated_offsets = offsets_of(
                table, page, keys, first_token, rotated_stride_page, rotated_stride_row, PAGE_SIZE
            )
        latent = load_rows(latent_ptr, latent_offsets, wanted, RANK, BLOCK_L, True)
        rotated = load_rows(rotated_ptr, rotated_offsets, wanted, ROPE, BLOCK_R, True)
        latent = numbers(latent, CODES, q.dtype)
        rotated = numbers(rotated, CODES, q.dtype)
        if tile_scales_ptr is not None:
            tile_offsets = offsets_of(
                table, page, keys, first_token, tile_stride_page, tile_stride_row, PAGE_SIZE
            )
            tiles = load_rows(
                tile_scales_ptr, tile_offsets, wanted, RANK // TILE, BLOCK_L // TILE, True
            )
            latent = with_tile_scales(latent, tiles, q.dtype)
        page = pages_of(table, tile_start + BLOCK_N, segment_end, PAGE_SIZE, BLOCK_N)
        s = tl.dot(q, tl.trans(latent), input_precision="ieee")
        s = tl.dot(q_rotated, tl.trans(rotated), s, input_precision="ieee")
        s = tl.where(keys[None, :] < row_end[:, None], s, float("-inf"))
        weights, top, total, fade = online_softmax(s, top, total, log2_scale)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
    if part_acc_ptr is None:
        out, lse = finish(top, total, acc, None, log2_scale, k_scale)
        out_offsets = token * out_stride_token + head.to(tl.int64) * out_stride_head
        tl.store(
            out_ptr + out_offsets[:, None] + columns[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=live[:, None] & latent_columns[None, :],
        )
        if lse_ptr is not None:
            tl.store(lse_ptr + token * lse_stride_token + head, lse, mask=live)
    else:
        part = ((request * part_rows + query) * NUM_HEADS + head).to(tl.int64) * num_splits + split
        tl.store(
            part_acc_ptr + part[:, None] * RANK + columns[None, :],
            acc,
            mask=live[:, None] & latent_columns[None, :],
        )
        tl.store(part_top_ptr + part, top, mask=live)
        tl.store(part_total_ptr + part, total, mask=live)
