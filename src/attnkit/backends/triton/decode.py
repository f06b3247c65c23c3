"""The decode kernel: requests with few queries against long contexts, split over many programs.

In: as for attention, with at most `max_query_len` queries per request; others are left alone. Out:
output and LSE, or parts of them. Device code; `launch.launch_decode` starts it.

The keys of a request are cut into segments (`segments`), each is attended to by itself, and the parts
are folded in order. Which program does which segments is free: one program may do them all and fold in
registers, or many store their parts and `merge_kernel` folds them. The bits are the same.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnkit.backends.triton.output import finish_rows
from attnkit.backends.triton.segments import gap_of, segment_len_of, span_of
from attnkit.backends.triton.tile import (
    add_values,
    end_key_of,
    first_key_of,
    fold,
    head_scale,
    in_tree,
    load_key_value,
    load_rows,
    load_scales,
    online_softmax,
    pages_of,
    reach_of,
    request_flag,
    scores,
    tile_rows,
    with_spans,
)


@triton.jit(
    do_not_specialize=[
        "max_query_len",
        "query_tiles",
        "causal",
        "window",
        "num_splits",
        "max_segments",
        "part_rows",
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr",
        "kv_lens_ptr",
        "table_ptr",
        "causal_ptr",
        "spans_ptr",
        "prefix_lens_ptr",
        "tree_ptr",
    ],
)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    out_scale_ptr,
    out_block_scales_ptr,
    lse_ptr,
    part_acc_ptr,
    part_top_ptr,
    part_total_ptr,
    query_start_loc_ptr,
    kv_lens_ptr,
    table_ptr,
    causal_ptr,
    spans_ptr,
    prefix_lens_ptr,
    tree_ptr,
    slopes_ptr,
    sinks_ptr,
    max_query_len,
    query_tiles,
    causal,
    window,
    scale,
    soft_cap,
    num_splits,
    max_segments,
    part_rows,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_row,
    k_stride_head,
    v_stride_page,
    v_stride_row,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    LINEAR: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    OUT_ENCODING: tl.constexpr,
    OUT_UNIT: tl.constexpr,
):
    """Without `part_acc_ptr` each program does all segments of its tile and finishes them; with it,
    program s of `num_splits` does every request's s-th share and stores the parts.

    Parts: row (request * part_rows + query) * heads + head, then segment, of at most `max_segments`.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_TILE
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + GROUP_TILE - 1) // GROUP_TILE
    split = tl.program_id(0) % num_splits
    unit = tl.program_id(0) // num_splits
    kv_head = unit % NUM_KV_HEADS
    head_tile = unit // NUM_KV_HEADS % HEAD_TILES
    query_tile = unit // (NUM_KV_HEADS * HEAD_TILES) % query_tiles
    request = unit // (NUM_KV_HEADS * HEAD_TILES) // query_tiles

    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    kv_len = tl.load(kv_lens_ptr + request)
    first_query = query_tile * BLOCK_Q
    if (first_query >= query_len) | (query_len > max_query_len):
        return
    reach = reach_of(request_flag(causal_ptr, causal, request), window)
    first_key, end_key = span_of(
        spans_ptr, first_token, first_query, query_len, kv_len, reach, window, BLOCK_Q, BLOCK_M
    )
    start = first_key // BLOCK_N * BLOCK_N
    end = end_key
    if prefix_lens_ptr is not None:
        prefix, prefix_end, gap = gap_of(prefix_lens_ptr, request, start, end_key, BLOCK_N)
        start, end = start * 0, end_key - gap
    segment_len = segment_len_of(end - start, max_segments, SEGMENT, BLOCK_N)
    num_segments = tl.cdiv(end - start, segment_len)
    share = tl.cdiv(num_segments, num_splits)
    first_segment = split * share
    end_segment = tl.minimum(first_segment + share, num_segments)
    if part_acc_ptr is not None and first_segment >= end_segment:
        return

    table = table_ptr + request.to(tl.int64) * table_stride
    query, head, live = tile_rows(
        first_query, query_len, head_tile, GROUP_SIZE, GROUP_TILE, BLOCK_M
    )
    head = kv_head * GROUP_SIZE + head
    token = (first_token + query).to(tl.int64)
    q = load_rows(
        q_ptr,
        token * q_stride_token + head.to(tl.int64) * q_stride_head,
        live,
        HEAD_SIZE,
        BLOCK_D,
        True,
    )
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=live, other=0.0)
    if k_scale_ptr is not None:
        scale = scale * head_scale(k_scale_ptr, kv_head, PER_HEAD)
    log2_scale = 1.0
    if LINEAR:
        log2_scale = scale * 1.4426950408889634
    k_offset = kv_head.to(tl.int64) * k_stride_head
    v_offset = kv_head.to(tl.int64) * v_stride_head
    k_head_ptr = k_ptr + k_offset * UNIT
    v_head_ptr = v_ptr
    if v_ptr is not None:
        v_head_ptr = v_ptr + v_offset * UNIT
    k_scales_head_ptr = k_scales_ptr
    v_scales_head_ptr = v_scales_ptr
    if k_scales_ptr is not None:
        k_scales_head_ptr = k_scales_ptr + k_offset
        v_scales_head_ptr = v_scales_ptr + v_offset
    positions = kv_len - query_len + query
    row_first = first_key_of(positions, window)
    row_end = end_key_of(positions, kv_len, reach)
    if spans_ptr is not None:
        row_first, row_end = with_spans(spans_ptr, token, live, row_first, row_end)
    if tree_ptr is not None:
        words = tl.load(tree_ptr + token, mask=live, other=0)
    columns = tl.arange(0, BLOCK_DV)
    value_columns = columns < HEAD_SIZE_V
    part_row = (request * part_rows + query) * (NUM_KV_HEADS * GROUP_SIZE) + head
    part_row = part_row.to(tl.int64) * max_segments

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for segment in range(first_segment, end_segment):
        segment_start = start + segment * segment_len
        segment_end = tl.minimum(segment_start + segment_len, end)
        seg_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        seg_total = tl.zeros([BLOCK_M], tl.float32)
        seg_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        first_tile, past_key = segment_start, segment_end
        if prefix_lens_ptr is not None:
            first_tile += tl.where(segment_start >= prefix_end, gap, 0)
            past_key += tl.where(segment_end > prefix_end, gap, 0)
        page = pages_of(table, first_tile, past_key, PAGE_SIZE, BLOCK_N)
        for tile in range(segment_start, segment_end, BLOCK_N):
            tile_start, next_tile = tile, tile + BLOCK_N
            if prefix_lens_ptr is not None:
                tile_start += tl.where(tile >= prefix_end, gap, 0)
                next_tile += tl.where(next_tile >= prefix_end, gap, 0)
            tile_start = tl.multiple_of(tile_start, BLOCK_N)
            keys = tile_start + tl.arange(0, BLOCK_N)
            # Keys that no row sees are not loaded: they may be NaN, and 0 * NaN is NaN.
            wanted = keys >= first_key
            if prefix_lens_ptr is not None:
                wanted = wanted | (keys < prefix)
            wanted = wanted & (keys < end_key)
            k, v = load_key_value(
                k_head_ptr,
                v_head_ptr,
                k_scales_head_ptr,
                v_scales_head_ptr,
                table,
                page,
                keys,
                wanted,
                first_token,
                k_stride_page,
                k_stride_row,
                v_stride_page,
                v_stride_row,
                HEAD_SIZE,
                HEAD_SIZE_V,
                BLOCK_D,
                BLOCK_DV,
                PAGE_SIZE,
                True,
                CODES,
                UNIT,
                VALUE_OFFSET,
                q.dtype,
            )
            k_scales = None
            v_scales = None
            if UNIT != 1:
                k_scales = load_scales(
                    k_scales_head_ptr,
                    table,
                    page,
                    keys,
                    wanted,
                    first_token,
                    k_stride_page,
                    k_stride_row,
                    PAGE_SIZE,
                    True,
                )
                v_scales = load_scales(
                    v_scales_head_ptr,
                    table,
                    page,
                    keys,
                    wanted,
                    first_token,
                    v_stride_page,
                    v_stride_row,
                    PAGE_SIZE,
                    True,
                )
            page = pages_of(table, next_tile, past_key, PAGE_SIZE, BLOCK_N)
            s = scores(q, k, k_scales, keys, positions, slopes, scale, soft_cap, LINEAR, ALIBI_SQRT)
            seen = keys[None, :] < row_end[:, None]
            if window is not None:
                right = keys[None, :] >= row_first[:, None]
                if prefix_lens_ptr is not None:
                    right = right | (keys < prefix)[None, :]
                seen = seen & right
            if tree_ptr is not None:
                seen = seen & in_tree(words, keys, kv_len - query_len)
            s = tl.where(seen, s, float("-inf"))
            weights, seg_top, seg_total, fade = online_softmax(s, seg_top, seg_total, log2_scale)
            seg_acc = add_values(seg_acc, fade, weights, v, v_scales)
        if part_acc_ptr is None:
            top, total, acc = fold(top, total, acc, seg_top, seg_total, seg_acc, log2_scale)
        else:
            part = part_row + segment
            tl.store(
                part_acc_ptr + part[:, None] * HEAD_SIZE_V + columns[None, :],
                seg_acc,
                mask=live[:, None] & value_columns[None, :],
            )
            tl.store(part_top_ptr + part, seg_top, mask=live)
            tl.store(part_total_ptr + part, seg_total, mask=live)

    if part_acc_ptr is None:
        finish_rows(
            top,
            total,
            acc,
            log2_scale,
            sinks_ptr,
            v_scale_ptr,
            q_ptr,
            out_ptr,
            out_scale_ptr,
            out_block_scales_ptr,
            lse_ptr,
            token,
            head,
            kv_head,
            live,
            out_stride_token,
            out_stride_head,
            lse_stride_token,
            HEAD_SIZE_V,
            BLOCK_DV,
            PER_HEAD,
            OUT_ENCODING,
            OUT_UNIT,
        )
