"""Launchers of the kernels over latents: check, choose constants and grid, start.

In: `LatentOperands`, or a step's latents. Out: launched kernels. As in `launch`, `*_call`s make
`KernelCall`s without running anything.
"""

from __future__ import annotations

import torch
import triton

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Encoding
from attnkit.backends.triton.configs import DecodeConfig, padded
from attnkit.backends.triton.interpreter import is_interpreting, repair_small_floats
from attnkit.backends.triton.merge import merge_kernel
from attnkit.backends.triton.mla_choose import choose_rows_kernel
from attnkit.backends.triton.mla_decode import mla_decode_kernel
from attnkit.backends.triton.mla_operands import LatentOperands, LatentPages
from attnkit.backends.triton.mla_write import tiled_write_kernel
from attnkit.backends.triton.operands import Parts
from attnkit.kvcache.codecs import FP8_TILE
from attnkit.mla.plan import DecodePart

if is_interpreting():
    repair_small_floats()


def launch_mla_decode(
    operands: LatentOperands,
    scale: float,
    *,
    max_query_len: int,
    num_splits: int = 1,
    parts: Parts | None = None,
    config: DecodeConfig,
) -> None:
    """Attend for every request with at most `max_query_len` queries. See `mla_decode_calls`."""
    for call in mla_decode_calls(
        operands,
        scale,
        max_query_len=max_query_len,
        num_splits=num_splits,
        parts=parts,
        config=config,
    ):
        call.launch()


def launch_tiled_write(
    kv_c: torch.Tensor, k_pe: torch.Tensor, pages: LatentPages, slot_mapping: torch.Tensor
) -> None:
    """Write latents with a scale per tile to their slots. See `tiled_write_call`."""
    tiled_write_call(kv_c, k_pe, pages, slot_mapping).launch()


def head_tiles(num_heads: int, block_m: int) -> tuple[int, int]:
    """(heads in a tile, tiles): more heads than a tile has rows are cut evenly."""
    num_tiles = triton.cdiv(num_heads, block_m)
    return triton.cdiv(num_heads, num_tiles), num_tiles


def mla_decode_calls(
    operands: LatentOperands,
    scale: float,
    *,
    max_query_len: int,
    num_splits: int = 1,
    parts: Parts | None = None,
    config: DecodeConfig,
) -> tuple[KernelCall, ...]:
    """The decode kernel over latents, and the merge of its parts if requests are shared.

    Args:
        operands: of the step.
        scale: factor on q.k, above zero: it is applied after the maximum.
        max_query_len: requests with more queries are left alone.
        num_splits: programs that share each request and tile of heads.
        parts: where they leave their states; None: only for num_splits 1.
        config: tile.
    """
    o, pages = operands, operands.pages
    assert scale > 0, f"scale {scale} cannot be applied after the maximum"
    assert num_splits == 1 or parts is not None, f"{num_splits} splits need memory for their parts"
    rank, rope, heads = pages.latent.shape[-1], pages.rotated.shape[-1], o.query.shape[1]
    head_tile, num_head_tiles = head_tiles(heads, config.block_m)
    block_q = config.block_m // head_tile
    part_rows = max_query_len if parts is None else parts.part_rows
    query_tiles = triton.cdiv(part_rows, block_q)
    assert parts is None or parts.max_segments == num_splits, "one part a program"
    tiles = pages.tile_scales
    alike = pages.latent.stride() == pages.rotated.stride()
    common = {
        "out_ptr": o.output,
        "lse_ptr": o.lse,
        "part_acc_ptr": None if parts is None else parts.acc,
        "part_top_ptr": None if parts is None else parts.top,
        "part_total_ptr": None if parts is None else parts.total,
        "k_scale_ptr": pages.k_scale,
        "query_start_loc_ptr": o.query_start_loc,
        "kv_lens_ptr": o.kv_lens,
        "max_query_len": max_query_len,
        "scale": scale,
        "part_rows": part_rows,
        "out_stride_token": o.output.stride(0),
        "out_stride_head": o.output.stride(1),
        "lse_stride_token": 0 if o.lse is None else o.lse.stride(0),
        "NUM_HEADS": heads,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SEGMENT": config.segment,
    }
    decode = KernelCall(
        kernel=mla_decode_kernel,
        grid=(o.num_reqs * query_tiles * num_head_tiles * num_splits,),
        arguments={
            **common,
            "q_ptr": o.query,
            "latent_ptr": pages.latent,
            "rotated_ptr": pages.rotated,
            "tile_scales_ptr": tiles,
            "table_ptr": o.block_table,
            "query_tiles": query_tiles,
            "num_splits": num_splits,
            "q_stride_token": o.query.stride(0),
            "q_stride_head": o.query.stride(1),
            "latent_stride_page": pages.latent.stride(0),
            "latent_stride_row": pages.latent.stride(1),
            "rotated_stride_page": None if alike else pages.rotated.stride(0),
            "rotated_stride_row": None if alike else pages.rotated.stride(1),
            "tile_stride_page": 0 if tiles is None else tiles.stride(0),
            "tile_stride_row": 0 if tiles is None else tiles.stride(1),
            "table_stride": o.block_table.stride(0),
            "HEAD_TILE": head_tile,
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
    if parts is None:
        return (decode,)
    merge = KernelCall(
        kernel=merge_kernel,
        grid=(o.num_reqs * part_rows * heads,),
        arguments={
            **common,
            "q_ptr": o.query,
            "out_scale_ptr": None,
            "out_block_scales_ptr": None,
            "OUT_ENCODING": int(Encoding.NONE),
            "OUT_UNIT": 1,
            "v_scale_ptr": pages.k_scale,
            "max_segments": num_splits,
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
            "BLOCK_Q": block_q,
            "LINEAR": True,
            # Four parts of 2 KB keep a program's loads in flight.
            "UNROLL": 4,
        },
        device=o.query.device,
        options={"num_warps": 4, "num_stages": 1},
    )
    return decode, merge


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
    num_tokens, block_t, rank = slot_mapping.shape[0], 16, kv_c.shape[-1]
    codes = pages.latent.view(torch.uint8)
    return KernelCall(
        kernel=tiled_write_kernel,
        grid=(triton.cdiv(num_tokens, block_t), rank // FP8_TILE + 1),
        arguments={
            "kv_c_ptr": kv_c,
            "k_pe_ptr": k_pe,
            "codes_ptr": codes,
            "tile_scales_ptr": pages.tile_scales,
            "rotated_ptr": pages.rotated,
            "slot_mapping_ptr": slot_mapping,
            "num_tokens": num_tokens,
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
            "BLOCK_T": block_t,
        },
        device=kv_c.device,
        options={"num_warps": 4, "num_stages": 1},
    )


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
    num_tokens, size = lists.shape
    return KernelCall(
        kernel=choose_rows_kernel,
        grid=(num_tokens,),
        arguments={
            "lists_ptr": lists,
            "query_start_loc_ptr": plan.query_start_loc,
            "seq_lens_ptr": plan.seq_lens,
            "table_ptr": plan.block_table,
            "rows_ptr": rows,
            "num_chosen_ptr": num_chosen,
            "num_reqs": plan.seq_lens.shape[0],
            "size": size,
            "lists_stride": lists.stride(0),
            "table_stride": plan.block_table.stride(0),
            "rows_apart": rows_apart,
            "PAGE_SIZE": block_size,
            "BLOCK_K": min(1024, padded(size)),
            "BLOCK_R": 128,
        },
        device=lists.device,
        options={"num_warps": 4, "num_stages": 1},
    )
