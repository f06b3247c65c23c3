"""The cache write kernel: K and V of new tokens to the slots of their pages.

In: packed keys and values and the slot of each token. Out: the cache, numbers or float8 codes; slot -1
writes nothing. Device code, in plain Triton; `cache_launch.write_call` starts it.
"""

# The types of device code are Triton's: a literal is a constexpr.
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from attnkit.backends.codes import divide, to_float8


@triton.jit
def stored_numbers(x, scale_ptr, head, scale_stride, CODED: tl.constexpr):
    """Rows as they go into the cache. `head`: of each row."""
    if CODED:
        scale = tl.load(scale_ptr + head * scale_stride)[:, None]
        x = to_float8(divide(x.to(tl.float32), scale), False, True)
    return x


@triton.jit(
    do_not_specialize=["num_tokens", "scale_stride"],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "k_scale_ptr", "v_scale_ptr"],
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
    k_scale_ptr,
    v_scale_ptr,
    scale_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CODED: tl.constexpr,
):
    """One program writes BLOCK rows, a row being one KV head of one token; heads are neighbours."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = i // NUM_KV_HEADS
    head = i % NUM_KV_HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    written = (slot >= 0)[:, None]
    # Division only of what is a slot: -1 // PAGE_SIZE is -1 in Python and 0 on a GPU.
    slot = tl.maximum(slot, 0)
    page = slot // PAGE_SIZE
    row = slot % PAGE_SIZE
    columns = tl.arange(0, HEAD_SIZE)[None, :]
    value_columns = tl.arange(0, VALUE_SIZE)[None, :]

    source = (token * key_stride_token + head * key_stride_head)[:, None] + columns
    place = (page * k_stride_page + row * k_stride_row + head * k_stride_head)[:, None] + columns
    key = tl.load(key_ptr + source, mask=written, other=0.0)
    source = (token * value_stride_token + head * value_stride_head)[:, None] + value_columns
    value = tl.load(value_ptr + source, mask=written, other=0.0)
    key = stored_numbers(key, k_scale_ptr, head, scale_stride, CODED)
    value = stored_numbers(value, v_scale_ptr, head, scale_stride, CODED)
    tl.store(k_ptr + place, key, mask=written)
    place = page * v_stride_page + row * v_stride_row + head * v_stride_head
    place = place[:, None] + value_columns
    tl.store(v_ptr + place, value, mask=written)
