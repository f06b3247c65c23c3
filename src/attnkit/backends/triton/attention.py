"""The attention kernel: prompts, chunks of prompts and any mixture of them, over pages or plain rows.

In: packed queries, K and V, and each request's lengths. Out: output and LSE of every request with at
least `min_query_len` queries; others are left alone. Device code; `launch.launch_attention` starts it.

One program serves one tile of one request and KV head. Which request that is, it finds on the device,
so a batch of other lengths can be run without planning anew. Keys come in up to three runs: tiles cut
by the window's left edge, tiles that all rows see whole, and tiles cut by the diagonal or the end. A
prefix that no window hides comes before them, in tiles seen whole and those cut by its end.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from attnkit.backends.triton.output import finish_rows
from attnkit.backends.triton.tile import (
    EVERYTHING,
    add_values,
    end_key_of,
    first_key_of,
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


@triton.jit
def request_of_tile(
    query_start_loc_ptr, tile, num_reqs, BLOCK_Q: tl.constexpr, SEARCH: tl.constexpr
):
    """The request that owns a tile: the last one whose first tile is at or before it.

    Request r starts at tile query_start_loc[r] // BLOCK_Q + r. That leaves each request at least the
    tiles it needs, and is known without the lengths of the requests before it. Counting the starts in
    blocks of SEARCH waits for memory once, where a binary search waits at every step.
    """
    found = 0
    for first in range(0, num_reqs, SEARCH):
        request = first + tl.arange(0, SEARCH)
        start = tl.load(query_start_loc_ptr + request, mask=request < num_reqs, other=0)
        before = (request < num_reqs) & (start // BLOCK_Q + request <= tile)
        found += tl.sum(before.to(tl.int32), 0)
    return found - 1


@triton.jit
def attend_run(
    run_start,
    run_end,
    top,
    total,
    acc,
    q,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    first_token,
    first_key,
    end_key,
    row_first,
    row_end,
    window,
    prefix,
    words,
    context,
    positions,
    slopes,
    log2_scale,
    scale,
    soft_cap,
    k_stride_page,
    k_stride_row,
    v_stride_page,
    v_stride_row,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINEAR: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the key tiles from run_start to run_end, which is a tile border unless MASKED.

    MASKED: keys outside first_key to end_key, which no row of the tile sees, are not loaded (they may
    be NaN, and 0 * NaN is NaN), and each row sees only row_first to row_end. Keys below `prefix` are
    left of nothing. `words`, one per row, are of trees whose tokens begin at key `context`.
    """
    page = pages_of(table_ptr, run_start, run_end, PAGE_SIZE, BLOCK_N)
    for tile_start in range(run_start, run_end, BLOCK_N):
        tile_start = tl.multiple_of(tile_start, BLOCK_N)
        keys = tile_start + tl.arange(0, BLOCK_N)
        wanted = keys >= first_key
        if prefix is not None:
            wanted = wanted | (keys < prefix)
        wanted = wanted & (keys < end_key)
        k, v = load_key_value(
            k_ptr,
            v_ptr,
            k_scales_ptr,
            v_scales_ptr,
            table_ptr,
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
            MASKED,
            CODES,
            UNIT,
            VALUE_OFFSET,
            q.dtype,
        )
        k_scales = None
        v_scales = None
        if UNIT != 1:
            k_scales = load_scales(
                k_scales_ptr,
                table_ptr,
                page,
                keys,
                wanted,
                first_token,
                k_stride_page,
                k_stride_row,
                PAGE_SIZE,
                MASKED,
            )
            v_scales = load_scales(
                v_scales_ptr,
                table_ptr,
                page,
                keys,
                wanted,
                first_token,
                v_stride_page,
                v_stride_row,
                PAGE_SIZE,
                MASKED,
            )
        page = pages_of(table_ptr, tile_start + BLOCK_N, run_end, PAGE_SIZE, BLOCK_N)
        s = scores(q, k, k_scales, keys, positions, slopes, scale, soft_cap, LINEAR, ALIBI_SQRT)
        if MASKED:
            seen = keys[None, :] < row_end[:, None]
            if window is not None:
                right = keys[None, :] >= row_first[:, None]
                if prefix is not None:
                    right = right | (keys < prefix)[None, :]
                seen = seen & right
            if words is not None:
                seen = seen & in_tree(words, keys, context)
            s = tl.where(seen, s, float("-inf"))
        weights, top, total, fade = online_softmax(s, top, total, log2_scale)
        acc = add_values(acc, fade, weights, v, v_scales)
    return top, total, acc


@triton.jit(
    do_not_specialize=["num_reqs", "min_query_len", "causal", "window", "table_stride"],
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
def attention_kernel(
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
    query_start_loc_ptr,
    kv_lens_ptr,
    table_ptr,
    causal_ptr,
    spans_ptr,
    prefix_lens_ptr,
    tree_ptr,
    slopes_ptr,
    sinks_ptr,
    num_reqs,
    min_query_len,
    causal,
    window,
    scale,
    soft_cap,
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
    LINEAR: tl.constexpr,
    ALIBI_SQRT: tl.constexpr,
    OUT_ENCODING: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Pointers that are None switch their feature off; see `launch.attention_call` for the rest."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_TILE
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + GROUP_TILE - 1) // GROUP_TILE
    # Backwards: under a causal mask the last tiles of a request are the longest, and begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    request = request_of_tile(query_start_loc_ptr, tile, num_reqs, BLOCK_Q, SEARCH)
    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    first_query = (tile - (first_token // BLOCK_Q + request)) * BLOCK_Q
    if (first_query >= query_len) | (query_len < min_query_len):
        return

    kv_len = query_len
    table = table_ptr
    if table_ptr is not None:
        kv_len = tl.load(kv_lens_ptr + request)
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

    # Positions of the first and the last row bound what the tile sees, and what all rows see; with
    # ranges the rows themselves do.
    reach = reach_of(request_flag(causal_ptr, causal, request), window)
    shift = kv_len - query_len
    positions = shift + query
    first_position = shift + first_query
    last_position = shift + tl.minimum(first_query + BLOCK_Q, query_len) - 1
    first_key = first_key_of(first_position, window)
    end_key = end_key_of(last_position, kv_len, reach)
    row_first = first_key_of(positions, window)
    row_end = end_key_of(positions, kv_len, reach)
    all_first = first_key_of(last_position, window)
    all_end = end_key_of(first_position, kv_len, reach)
    if spans_ptr is not None:
        row_first, row_end = with_spans(spans_ptr, token, live, row_first, row_end)
        first_key = tl.min(tl.where(live, row_first, EVERYTHING), 0)
        end_key = tl.max(tl.where(live, row_end, 0), 0)
        all_first = tl.max(tl.where(live, row_first, 0), 0)
        all_end = tl.min(tl.where(live, row_end, EVERYTHING), 0)
    words = None
    if tree_ptr is not None:
        # Rows of a tree see the context whole and no more.
        words = tl.load(tree_ptr + token, mask=live, other=0)
        is_tree = tl.max((words != 0).to(tl.int32), 0) != 0
        all_end = tl.where(is_tree, tl.minimum(all_end, shift), all_end)
    start = first_key // BLOCK_N * BLOCK_N
    whole_start = tl.minimum(tl.cdiv(all_first, BLOCK_N) * BLOCK_N, end_key)
    prefix = None
    prefix_whole, prefix_end = 0, 0
    if prefix_lens_ptr is not None:
        prefix = tl.maximum(tl.minimum(tl.load(prefix_lens_ptr + request), end_key), 0)
        prefix_whole = tl.minimum(prefix, tl.maximum(all_end, 0)) // BLOCK_N * BLOCK_N
        prefix_end = tl.minimum(tl.cdiv(prefix, BLOCK_N) * BLOCK_N, end_key)
        start = tl.maximum(start, prefix_end)
    whole_start = tl.maximum(whole_start, start)
    whole_end = tl.maximum(all_end, 0) // BLOCK_N * BLOCK_N
    whole_end = tl.maximum(whole_end, whole_start)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Run 0: prefix seen whole by all rows. 1: cut by its end. 2: cut by the window's left edge. 3: seen
    # whole. 4: cut by diagonal or end.
    for run in tl.static_range(
        0 if prefix_lens_ptr is not None else 2 if window is not None else 3, 5
    ):
        if run == 0:
            run_start, run_end = 0, prefix_whole
        elif run == 1:
            run_start, run_end = prefix_whole, prefix_end
        elif run == 2:
            run_start, run_end = start, whole_start
        elif run == 3:
            run_start, run_end = whole_start, whole_end
        else:
            run_start, run_end = whole_end, end_key
        top, total, acc = attend_run(
            run_start,
            run_end,
            top,
            total,
            acc,
            q,
            k_head_ptr,
            v_head_ptr,
            k_scales_head_ptr,
            v_scales_head_ptr,
            table,
            first_token,
            first_key,
            end_key,
            row_first,
            row_end,
            window,
            prefix,
            words,
            shift,
            positions,
            slopes,
            log2_scale,
            scale,
            soft_cap,
            k_stride_page,
            k_stride_row,
            v_stride_page,
            v_stride_row,
            HEAD_SIZE,
            HEAD_SIZE_V,
            BLOCK_D,
            BLOCK_DV,
            PAGE_SIZE,
            CODES,
            UNIT,
            VALUE_OFFSET,
            BLOCK_N,
            LINEAR,
            ALIBI_SQRT,
            run % 3 != 0,
        )

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
