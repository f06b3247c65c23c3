"""The merge kernel: parts of decodes that programs shared, folded in the order of their segments.

In: the parts that `decode_kernel`, or that of decodes over latents, has stored. Out: output and LSE.
Device code; `launch.launch_decode` starts it behind the first.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnkit.backends.triton.output import finish_rows
from attnkit.backends.triton.segments import gap_of, segment_len_of, span_of
from attnkit.backends.triton.tile import fold, head_scale, reach_of, request_flag


@triton.jit(
    do_not_specialize=["max_query_len", "causal", "window", "max_segments", "part_rows"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr",
        "kv_lens_ptr",
        "causal_ptr",
        "spans_ptr",
        "prefix_lens_ptr",
    ],
)
def merge_kernel(
    q_ptr,
    out_ptr,
    out_scale_ptr,
    out_block_scales_ptr,
    lse_ptr,
    part_acc_ptr,
    part_top_ptr,
    part_total_ptr,
    k_scale_ptr,
    v_scale_ptr,
    query_start_loc_ptr,
    kv_lens_ptr,
    causal_ptr,
    spans_ptr,
    prefix_lens_ptr,
    sinks_ptr,
    max_query_len,
    causal,
    window,
    scale,
    max_segments,
    part_rows,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    LINEAR: tl.constexpr,
    OUT_ENCODING: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Fold the parts of one row, query and head, in the order of the segments.

    UNROLL parts are loaded before the first of them is folded; what is past the end adds exactly
    nothing.
    """
    head = tl.program_id(0) % NUM_HEADS
    query = tl.program_id(0) // NUM_HEADS % part_rows
    request = tl.program_id(0) // NUM_HEADS // part_rows
    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    if (query >= query_len) | (query_len > max_query_len):
        return
    kv_len = tl.load(kv_lens_ptr + request)
    reach = reach_of(request_flag(causal_ptr, causal, request), window)
    first_query = query // BLOCK_Q * BLOCK_Q
    first_key, end_key = span_of(
        spans_ptr, first_token, first_query, query_len, kv_len, reach, window, BLOCK_Q, BLOCK_M
    )
    start = first_key // BLOCK_N * BLOCK_N
    span = end_key - start
    if prefix_lens_ptr is not None:
        _, _, gap = gap_of(prefix_lens_ptr, request, start, end_key, BLOCK_N)
        span = end_key - gap
    segment_len = segment_len_of(span, max_segments, SEGMENT, BLOCK_N)
    num_segments = tl.cdiv(span, segment_len)
    if k_scale_ptr is not None:
        scale = scale * head_scale(k_scale_ptr, head // GROUP_SIZE, PER_HEAD)
    log2_scale = 1.0
    if LINEAR:
        log2_scale = scale * 1.4426950408889634

    columns = tl.arange(0, BLOCK_DV)
    value_columns = columns < HEAD_SIZE_V
    part_row = ((request * part_rows + query) * NUM_HEADS + head).to(tl.int64) * max_segments
    one = tl.arange(0, 1)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for first in range(0, num_segments, UNROLL):
        for i in tl.static_range(UNROLL):
            segment = first + i + one
            there = segment < num_segments
            part = part_row + segment
            part_top = tl.load(part_top_ptr + part, mask=there, other=float("-inf"))
            part_total = tl.load(part_total_ptr + part, mask=there, other=0.0)
            part_acc = tl.load(
                part_acc_ptr + part[:, None] * HEAD_SIZE_V + columns[None, :],
                mask=there[:, None] & value_columns[None, :],
                other=0.0,
            )
            top, total, acc = fold(top, total, acc, part_top, part_total, part_acc, log2_scale)

    token = (first_token + query).to(tl.int64) + one
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
        head + one,
        head // GROUP_SIZE,
        one == 0,
        out_stride_token,
        out_stride_head,
        lse_stride_token,
        HEAD_SIZE_V,
        BLOCK_DV,
        PER_HEAD,
        OUT_ENCODING,
        OUT_UNIT,
    )
