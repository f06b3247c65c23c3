"""The cache write kernel: K and V of new tokens to the slots of their pages.

In: packed keys and values and the slot of each token. Out: the cache; slot -1 writes nothing. Device
code; `launch.launch_write` starts it.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnkit.backends.triton.tile import load_rows


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
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    written = slot >= 0
    token = token.to(tl.int64)
    # Division only of what is a slot: -1 // PAGE_SIZE is -1 in Python and 0 on a GPU.
    slot = tl.where(written, slot, 0)
    page = slot // PAGE_SIZE
    row = slot % PAGE_SIZE

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
