"""The cache write kernels: K and V of new tokens to the slots of their pages, copied or encoded.

In: packed keys and values and the slot of each token. Out: the cache; slot -1 writes nothing. Device
code; `cache_launch.launch_write` starts them.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from attnkit.backends.codes import (
    BLOCK,
    bits_of,
    divide,
    e4m3_numbers,
    halves,
    quotients,
    to_e2m1,
    to_float8,
    to_integer,
    token_scale,
)
from attnkit.backends.stored import Encoding
from attnkit.backends.triton.tile import head_scale, load_rows

E5M2 = tl.constexpr(int(Encoding.E5M2))
INT8 = tl.constexpr(int(Encoding.INT8))
INT4 = tl.constexpr(int(Encoding.INT4))
NVFP4 = tl.constexpr(int(Encoding.NVFP4))


@triton.jit
def slots_of(slot_mapping_ptr, num_tokens, PAGE_SIZE: tl.constexpr, BLOCK_T: tl.constexpr):
    """The tokens of a program, whether they are written, their pages and rows there; all int64."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    written = slot >= 0
    # Division only of what is a slot: -1 // PAGE_SIZE is -1 in Python and 0 on a GPU.
    slot = tl.where(written, slot, 0)
    return token.to(tl.int64), written, slot // PAGE_SIZE, slot % PAGE_SIZE


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_mapping_ptr"],
)
def write_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slot_mapping_ptr,
    num_tokens,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    k_stride_page,
    k_stride_row,
    k_stride_head,
    v_stride_page,
    v_stride_row,
    v_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program copies BLOCK_T tokens of one KV head."""
    head = tl.program_id(1).to(tl.int64)
    token, written, page, row = slots_of(slot_mapping_ptr, num_tokens, PAGE_SIZE, BLOCK_T)
    key = load_rows(
        key_ptr,
        token * key_stride_token + head * key_stride_head,
        written,
        HEAD_SIZE,
        BLOCK_D,
        True,
    )
    columns = tl.arange(0, BLOCK_D)
    places = page * k_stride_page + row * k_stride_row + head * k_stride_head
    tl.store(
        k_ptr + places[:, None] + columns[None, :],
        key.to(k_ptr.dtype.element_ty),
        mask=written[:, None] & (columns < HEAD_SIZE)[None, :],
    )

    value = load_rows(
        value_ptr,
        token * value_stride_token + head * value_stride_head,
        written,
        HEAD_SIZE_V,
        BLOCK_DV,
        True,
    )
    columns = tl.arange(0, BLOCK_DV)
    places = page * v_stride_page + row * v_stride_row + head * v_stride_head
    tl.store(
        v_ptr + places[:, None] + columns[None, :],
        value.to(v_ptr.dtype.element_ty),
        mask=written[:, None] & (columns < HEAD_SIZE_V)[None, :],
    )


@triton.jit
def encode_vectors(
    x,
    scale,
    codes_ptr,
    scales_ptr,
    offsets,
    written,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENCODING: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
):
    """Store codes of (BLOCK_T, BLOCK_SIZE) float32 numbers, zero past SIZE, and the scales beside them.

    Offsets count UNIT bytes of codes and whole scales. `scale` is the layer's, or None.
    """
    rows: tl.constexpr = x.shape[0]
    LARGEST: tl.constexpr = 127.0 if ENCODING == INT8 else 7.0 if ENCODING == INT4 else 448.0
    PER_BYTE: tl.constexpr = 2 if ENCODING >= INT4 else 1
    if ENCODING == NVFP4:
        columns = tl.arange(0, BLOCK_SIZE // BLOCK)
        blocks = tl.reshape(x, [rows, BLOCK_SIZE // BLOCK, BLOCK])
        largest = tl.max((bits_of(blocks) & 0x7FFFFFFF).to(tl.int32), 2)
        wanted = tl.div_rn(
            largest.to(tl.float32, bitcast=True), tl.broadcast_to(6.0 * scale, largest.shape)
        )
        # By hand on every device: they are few, and of the device's own conversion come pairs of 16-bit
        # registers whose halves nothing sets, which ptxas 12.8 and 12.9 mistake for others (`ptx`).
        own = to_float8(tl.where(wanted < 0.001953125, 0.001953125, wanted), False, False)
        tl.store(
            scales_ptr + offsets[:, None] + columns[None, :],
            own,
            mask=written[:, None] & (columns < SIZE // BLOCK)[None, :],
        )
        step = e4m3_numbers(own).to(tl.float32) * scale
        codes = to_e2m1(tl.reshape(quotients(blocks, step[:, :, None], 6.0), [rows, BLOCK_SIZE]))
    elif scales_ptr is not None:
        largest = tl.max((bits_of(x) & 0x7FFFFFFF).to(tl.int32), 1)
        own = token_scale(largest, LARGEST)
        tl.store(scales_ptr + offsets, own, mask=written)
        q = quotients(x, own[:, None], LARGEST)
        if ENCODING == INT8:
            codes = to_integer(q).to(tl.uint8)
        elif ENCODING == INT4:
            codes = (to_integer(q) + 8).to(tl.uint8)
        else:
            codes = to_float8(q, False, HAS_FLOAT8)
    else:
        whole = tl.full([rows, 1], scale, tl.float32)
        codes = to_float8(divide(x, whole), ENCODING == E5M2, HAS_FLOAT8)
    if PER_BYTE == 2:
        codes = halves(codes)
    columns = tl.arange(0, BLOCK_SIZE // PER_BYTE)
    tl.store(
        codes_ptr + (offsets * UNIT)[:, None] + columns[None, :],
        codes,
        mask=written[:, None] & (columns < SIZE // PER_BYTE)[None, :],
    )


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_mapping_ptr"],
)
def encode_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_mapping_ptr,
    num_tokens,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    k_stride_page,
    k_stride_row,
    k_stride_head,
    v_stride_page,
    v_stride_row,
    v_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ENCODING: tl.constexpr,
    UNIT: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
):
    """One program encodes BLOCK_T tokens of one KV head. Strides of the cache count UNIT bytes."""
    head = tl.program_id(1).to(tl.int64)
    token, written, page, row = slots_of(slot_mapping_ptr, num_tokens, PAGE_SIZE, BLOCK_T)
    k_scale = None
    if k_scale_ptr is not None:
        k_scale = head_scale(k_scale_ptr, head, PER_HEAD)
    key = load_rows(
        key_ptr,
        token * key_stride_token + head * key_stride_head,
        written,
        HEAD_SIZE,
        BLOCK_D,
        True,
    )
    encode_vectors(
        key.to(tl.float32),
        k_scale,
        k_ptr,
        k_scales_ptr,
        page * k_stride_page + row * k_stride_row + head * k_stride_head,
        written,
        HEAD_SIZE,
        BLOCK_D,
        ENCODING,
        UNIT,
        HAS_FLOAT8,
    )
    v_scale = None
    if v_scale_ptr is not None:
        v_scale = head_scale(v_scale_ptr, head, PER_HEAD)
    value = load_rows(
        value_ptr,
        token * value_stride_token + head * value_stride_head,
        written,
        HEAD_SIZE_V,
        BLOCK_DV,
        True,
    )
    encode_vectors(
        value.to(tl.float32),
        v_scale,
        v_ptr,
        v_scales_ptr,
        page * v_stride_page + row * v_stride_row + head * v_stride_head,
        written,
        HEAD_SIZE_V,
        BLOCK_DV,
        ENCODING,
        UNIT,
        HAS_FLOAT8,
    )
