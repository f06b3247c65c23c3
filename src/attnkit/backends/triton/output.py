"""The last step of the attention kernels: states of rows become output and LSE, in memory.

In: the final state of some rows, in registers. Out: their `output`, or codes and the scales beside them,
equal to the bit to quantising the output (`attnkit.output_quant`), and their LSE. Device code.
"""

# The types of device code are Triton's: a literal is a constexpr.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnkit.backends.stored import Encoding
from attnkit.backends.triton.tile import finish, head_scale
from attnkit.backends.triton.write import encode_vectors

NONE = tl.constexpr(int(Encoding.NONE))
NVFP4 = tl.constexpr(int(Encoding.NVFP4))


@triton.jit
def finish_rows(
    top,
    total,
    acc,
    log2_scale,
    sinks_ptr,
    v_scale_ptr,
    q_ptr,
    out_ptr,
    scale_ptr,
    block_scales_ptr,
    lse_ptr,
    token,
    head,
    kv_head,
    live,
    stride_token,
    stride_head,
    lse_stride_token,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ENCODING: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Let sinks join, and write output and LSE of the live rows: those of `token` and `head`, of one KV
    head."""
    sinks = None
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head, mask=live, other=float("-inf"))
    v_scale = None
    if v_scale_ptr is not None:
        v_scale = head_scale(v_scale_ptr, kv_head, PER_HEAD)
    out, lse = finish(top, total, acc, sinks, log2_scale, v_scale)
    write_output(
        out,
        q_ptr,
        out_ptr,
        scale_ptr,
        block_scales_ptr,
        token * stride_token + head.to(tl.int64) * stride_head,
        live,
        HEAD_SIZE_V,
        BLOCK_DV,
        ENCODING,
        UNIT,
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + token * lse_stride_token + head, lse, mask=live)


@triton.jit
def write_output(
    out,
    q_ptr,
    out_ptr,
    scale_ptr,
    block_scales_ptr,
    offsets,
    live,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ENCODING: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Store (ROWS, BLOCK_DV) float32 numbers of the live rows, each at its int64 offset.

    Codes are made of the numbers in the dtype of the queries. Their offsets count UNIT bytes, of which
    there is one to each scale of `block_scales_ptr`, if that is there.
    """
    rows: tl.constexpr = out.shape[0]
    if ENCODING == NONE:
        columns = tl.arange(0, BLOCK_DV)
        tl.store(
            out_ptr + offsets[:, None] + columns[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=live[:, None] & (columns < HEAD_SIZE_V)[None, :],
        )
    else:
        scale = None
        if scale_ptr is not None:
            scale = tl.load(scale_ptr)
        x = out.to(q_ptr.dtype.element_ty).to(tl.float32)
        # By instructions that every device has: beside attention these are few.
        if ENCODING == NVFP4 or block_scales_ptr is None:
            encode_vectors(
                x,
                scale,
                out_ptr,
                block_scales_ptr,
                offsets,
                live,
                HEAD_SIZE_V,
                BLOCK_DV,
                ENCODING,
                UNIT,
                False,
            )
        else:
            # Each group of a row is a vector with a scale of its own.
            GROUPS: tl.constexpr = BLOCK_DV // UNIT
            group = tl.arange(0, GROUPS)
            there = live[:, None] & (group < HEAD_SIZE_V // UNIT)[None, :]
            encode_vectors(
                tl.reshape(x, [rows * GROUPS, UNIT]),
                scale,
                out_ptr,
                block_scales_ptr,
                tl.reshape(offsets[:, None] + group[None, :], [rows * GROUPS]),
                tl.reshape(there, [rows * GROUPS]),
                UNIT,
                UNIT,
                ENCODING,
                UNIT,
                False,
            )
