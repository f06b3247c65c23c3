"""The write kernel of latents with a scale per tile: codes, scales and rotated part of new tokens.

In: latents, rotated parts and the slot of each token. Out: the cache, equal to `kvcache/codecs.py` to
the bit; slot -1 writes nothing. Device code; `mla_launch` starts it. Rows without tiles are written by
the kernels for K and V.
"""

# The types of device code are Triton's: a literal is a constexpr, a range may hold tensors.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attnkit.backends.codes import bits_of, quotients, to_float8, token_scale
from attnkit.backends.triton.mla_decode import TILE
from attnkit.backends.triton.tile import load_rows
from attnkit.backends.triton.write import slots_of


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_mapping_ptr"],
)
def tiled_write_kernel(
    kv_c_ptr,
    k_pe_ptr,
    codes_ptr,
    tile_scales_ptr,
    rotated_ptr,
    slot_mapping_ptr,
    num_tokens,
    kv_c_stride,
    k_pe_stride,
    codes_stride_page,
    codes_stride_row,
    tile_stride_page,
    tile_stride_row,
    rotated_stride_page,
    rotated_stride_row,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
):
    """One program encodes one tile of BLOCK_T tokens; the last one along the second axis copies their
    rotated parts."""
    tile = tl.program_id(1)
    token, written, page, row = slots_of(slot_mapping_ptr, num_tokens, PAGE_SIZE, BLOCK_T)
    if tile < RANK // TILE:
        columns = tl.arange(0, TILE)
        x = load_rows(kv_c_ptr, token * kv_c_stride + tile * TILE, written, TILE, TILE, True)
        x = x.to(tl.float32)
        largest = tl.max((bits_of(x) & 0x7FFFFFFF).to(tl.int32), 1)
        scale = token_scale(largest, 448.0)
        codes = to_float8(quotients(x, scale[:, None], 448.0), False, HAS_FLOAT8)
        places = page * codes_stride_page + row * codes_stride_row + tile * TILE
        tl.store(codes_ptr + places[:, None] + columns[None, :], codes, mask=written[:, None])
        places = page * tile_stride_page + row * tile_stride_row + tile
        tl.store(tile_scales_ptr + places, scale, mask=written)
    else:
        lanes = tl.arange(0, BLOCK_R)
        pe = load_rows(k_pe_ptr, token * k_pe_stride, written, ROPE, BLOCK_R, True)
        pe_places = page * rotated_stride_page + row * rotated_stride_row
        tl.store(
            rotated_ptr + pe_places[:, None] + lanes[None, :],
            pe.to(tl.bfloat16),
            mask=written[:, None] & (lanes < ROPE)[None, :],
        )
