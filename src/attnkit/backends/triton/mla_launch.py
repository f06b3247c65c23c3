"""Launchers of the kernels over latents: check, choose constants and grid, start.

In: `LatentOperands`, or a step's latents. Out: launched kernels. As in `launch`, `*_call`s make
`KernelCall`s without running anything, and `*_changes` are what differs between steps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Codes, Encoding
from attnkit.backends.triton.configs import padded
from attnkit.backends.triton.interpreter import is_interpreting, repair_small_floats
from attnkit.backends.triton.launch import DecodeWork
from attnkit.backends.triton.merge import merge_kernel
from attnkit.backends.triton.mla_choose import choose_rows_kernel
from attnkit.backends.triton.mla_decode import mla_decode_kernel
from attnkit.backends.triton.mla_operands import LatentOperands, LatentPages, LatentStep
from attnkit.backends.triton.mla_write import tiled_write_kernel
from attnkit.kvcache.codecs import FP8_TILE
from attnkit.mla.plan import DecodePart

if is_interpreting():
    repair_small_floats()

_BLOCK_T = 16
"""Tokens of a program that writes."""


def launch_mla_decode(operands: LatentOperands, scale: float, work: DecodeWork) -> None:
    """Attend for every request with at most so many queries. See `mla_decode_call`, `mla_merge_call`."""
    mla_decode_call(operands, scale, work).launch()
    if work.parts is not None:
        mla_merge_call(operands, scale, work).launch()


def head_tiles(num_heads: int, block_m: int) -> tuple[int, int]:
    """(heads in a tile, tiles): more heads than a tile has rows are cut evenly."""
    num_tiles = triton.cdiv(num_heads, block_m)
    return triton.cdiv(num_heads, num_tiles), num_tiles


def mla_decode_call(operands: LatentOperands, scale: float, work: DecodeWork) -> KernelCall:
    """The decode kernel over latents.

    Args:
        operands: of the step.
        scale: factor on q.k, above zero: it is applied after the maximum.
        work: each program that shares a request has a part of its own. If there are parts, the output is
            that of `mla_merge_call`, which is to follow.
    """
    o, pages, config = operands, operands.pages, work.config
    assert scale > 0, f"scale {scale} cannot be applied after the maximum"
    parts, tiles = work.parts, pages.tile_scales
    assert parts is None or parts.max_segments == work.num_splits, "one part a program"
    rank, rope, heads = pages.latent.shape[-1], pages.rotated.shape[-1], o.query.shape[1]
    alike = pages.latent.stride() == pages.rotated.stride()
    return KernelCall(
        kernel=mla_decode_kernel,
        grid=mla_decode_grid(o, work),
        arguments={
            **mla_decode_changes(o, work),
            **_of_layer(o, scale, work),
            "latent_ptr": pages.latent,
            "rotated_ptr": pages.rotated,
            "tile_scales_ptr": tiles,
            "q_stride_token": o.query.stride(0),
            "q_stride_head": o.query.stride(1),
            "latent_stride_page": pages.latent.stride(0),
            "latent_stride_row": pages.latent.stride(1),
            "rotated_stride_page": None if alike else pages.rotated.stride(0),
            "rotated_stride_row": None if alike else pages.rotated.stride(1),
            "tile_stride_page": 0 if tiles is None else tiles.stride(0),
            "tile_stride_row": 0 if tiles is None else tiles.stride(1),
            "HEAD_TILE": head_tiles(heads, config.block_m)[0],
            "RANK": rank,
            "ROPE": rope,
            "BLOCK_L": padded(rank),
            "BLOCK_R": padded(rope),
            "PAGE_SIZE": pages.latent.shape[1],
            "CODES": int(pages.codes),
        },
        device=o.query.device,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def mla_decode_grid(step: LatentStep, work: DecodeWork) -> tuple[int]:
    """Programs of the decode kernel."""
    head_tile, num_tiles = head_tiles(step.query.shape[1], work.config.block_m)
    return (step.num_reqs * work.query_tiles(head_tile) * num_tiles * work.num_splits,)


def mla_decode_changes(step: LatentStep, work: DecodeWork) -> dict[str, Any]:
    """Arguments of `mla_decode_call` that differ from one step to the next."""
    head_tile, _ = head_tiles(step.query.shape[1], work.config.block_m)
    return {
        **_of_step(step, work),
        "table_ptr": step.block_table,
        "table_stride": step.block_table.stride(0),
        "query_tiles": work.query_tiles(head_tile),
        "num_splits": work.num_splits,
    }


def mla_merge_call(operands: LatentOperands, scale: float, work: DecodeWork) -> KernelCall:
    """The merge of the parts that `mla_decode_call` left.

    Args:
        operands, scale, work: of that call.
    """
    o, rank, heads = operands, operands.head_size_v, operands.query.shape[1]
    head_tile, _ = head_tiles(heads, work.config.block_m)
    return KernelCall(
        kernel=merge_kernel,
        grid=mla_merge_grid(o, work),
        arguments={
            **mla_merge_changes(o, work),
            **_of_layer(o, scale, work),
            "out_scale_ptr": None,
            "out_block_scales_ptr": None,
            "OUT_ENCODING": int(Encoding.NONE),
            "OUT_UNIT": 1,
            "v_scale_ptr": o.pages.k_scale,
            "causal_ptr": None,
            "spans_ptr": None,
            "prefix_lens_ptr": None,
            "sinks_ptr": None,
            "causal": 1,
            "window": None,
            "GROUP_SIZE": heads,
            "PER_HEAD": False,
            "HEAD_SIZE_V": rank,
            "BLOCK_DV": padded(rank),
            "BLOCK_Q": work.config.block_m // head_tile,
            "LINEAR": True,
            # Four parts of 2 KB keep a program's loads in flight.
            "UNROLL": 4,
        },
        device=o.query.device,
        options={"num_warps": 4, "num_stages": 1},
    )


def mla_merge_grid(step: LatentStep, work: DecodeWork) -> tuple[int]:
    """Programs of the merge kernel: one for each query and head."""
    return (step.num_reqs * work.part_rows * step.query.shape[1],)


def mla_merge_changes(step: LatentStep, work: DecodeWork) -> dict[str, Any]:
    """Arguments of `mla_merge_call` that differ from one step to the next."""
    return {**_of_step(step, work), "max_segments": work.num_splits}


def _of_step(step: LatentStep, work: DecodeWork) -> dict[str, Any]:
    """What differs from one step to the next for both kernels."""
    parts = work.parts
    return {
        "q_ptr": step.query,
        "out_ptr": step.output,
        "lse_ptr": step.lse,
        "part_acc_ptr": None if parts is None else parts.acc,
        "part_top_ptr": None if parts is None else parts.top,
        "part_total_ptr": None if parts is None else parts.total,
        "query_start_loc_ptr": step.query_start_loc,
        "kv_lens_ptr": step.kv_lens,
        "max_query_len": work.max_query_len,
        "part_rows": work.part_rows,
    }


def _of_layer(o: LatentOperands, scale: float, work: DecodeWork) -> dict[str, Any]:
    """What a layer has in every step, and strides, for both kernels."""
    config = work.config
    return {
        "k_scale_ptr": o.pages.k_scale,
        "scale": scale,
        "out_stride_token": o.output.stride(0),
        "out_stride_head": o.output.stride(1),
        "lse_stride_token": 0 if o.lse is None else o.lse.stride(0),
        "NUM_HEADS": o.query.shape[1],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SEGMENT": config.segment,
    }


def tiled_write_call(
    kv_c: torch.Tensor, k_pe: torch.Tensor, pages: LatentPages, slot_mapping: torch.Tensor
) -> KernelCall:
    """The write of latents with a scale per tile.

    Args:
        kv_c: (at least T, kv_lora_rank), last stride 1.
        k_pe: (at least T, qk_rope_head_dim), likewise.
        pages: of the cache, with tile scales.
        slot_mapping: int64 or int32 (T,); -1 writes nothing.
    """
    assert pages.tile_scales is not None
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        assert x.stride(-1) == 1 or x.shape[-1] == 1, f"{name} has last stride {x.stride(-1)}"
    rank = kv_c.shape[-1]
    codes = pages.latent.view(torch.uint8)
    return KernelCall(
        kernel=tiled_write_kernel,
        grid=tiled_write_grid(kv_c, slot_mapping),
        arguments={
            **tiled_write_changes(kv_c, k_pe, slot_mapping),
            "codes_ptr": codes,
            "tile_scales_ptr": pages.tile_scales,
            "rotated_ptr": pages.rotated,
            "kv_c_stride": kv_c.stride(0),
            "k_pe_stride": k_pe.stride(0),
            "codes_stride_page": codes.stride(0),
            "codes_stride_row": codes.stride(1),
            "tile_stride_page": pages.tile_scales.stride(0),
            "tile_stride_row": pages.tile_scales.stride(1),
            "rotated_stride_page": pages.rotated.stride(0),
            "rotated_stride_row": pages.rotated.stride(1),
            "RANK": rank,
            "ROPE": k_pe.shape[-1],
            "BLOCK_R": padded(k_pe.shape[-1]),
            "PAGE_SIZE": codes.shape[1],
            "BLOCK_T": _BLOCK_T,
            "HAS_FLOAT8": pages.codes is Codes.NUMBERS,
        },
        device=kv_c.device,
        options={"num_warps": 4, "num_stages": 1},
    )


def tiled_write_grid(kv_c: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[int, int]:
    """Programs of the kernel: for so many tokens each of their tiles, and what is rotated."""
    return triton.cdiv(slot_mapping.shape[0], _BLOCK_T), kv_c.shape[-1] // FP8_TILE + 1


def tiled_write_changes(
    kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor
) -> dict[str, Any]:
    """Arguments of `tiled_write_call` that differ from one step to the next."""
    return {
        "kv_c_ptr": kv_c,
        "k_pe_ptr": k_pe,
        "slot_mapping_ptr": slot_mapping,
        "num_tokens": slot_mapping.shape[0],
    }


def choose_rows_call(
    lists: torch.Tensor,
    plan: DecodePart,
    block_size: int,
    rows_apart: int,
    rows: torch.Tensor,
    num_chosen: torch.Tensor,
) -> KernelCall:
    """Rows of the cache for lists of positions.

    Args:
        lists: int32 (T, k), last stride 1.
        plan: of these queries.
        block_size: tokens in a block.
        rows_apart: rows from one block to the next.
        rows: int32 (T, k), contiguous, to be filled: rows of the keys that are named, then zeros.
        num_chosen: int32 (T,), to be filled.
    """
    return KernelCall(
        kernel=choose_rows_kernel,
        grid=choose_rows_grid(lists),
        arguments={
            **choose_rows_changes(lists, plan, rows, num_chosen),
            "rows_apart": rows_apart,
            "PAGE_SIZE": block_size,
            "BLOCK_K": choose_block(lists),
            "BLOCK_R": 128,
        },
        device=lists.device,
        options={"num_warps": 4, "num_stages": 1},
    )


def choose_rows_grid(lists: torch.Tensor) -> tuple[int]:
    """Programs of the kernel: one for each query."""
    return (lists.shape[0],)


def choose_block(lists: torch.Tensor) -> int:
    """Places of a list that are looked at at once."""
    return min(1024, padded(lists.shape[1]))


def choose_rows_changes(
    lists: torch.Tensor, plan: DecodePart, rows: torch.Tensor, num_chosen: torch.Tensor
) -> dict[str, Any]:
    """Arguments of `choose_rows_call` that differ from one step to the next."""
    return {
        "lists_ptr": lists,
        "query_start_loc_ptr": plan.query_start_loc,
        "seq_lens_ptr": plan.seq_lens,
        "table_ptr": plan.block_table,
        "rows_ptr": rows,
        "num_chosen_ptr": num_chosen,
        "num_reqs": plan.seq_lens.shape[0],
        "size": lists.shape[1],
        "lists_stride": lists.stride(0),
        "table_stride": plan.block_table.stride(0),
    }
