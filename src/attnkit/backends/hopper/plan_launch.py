"""Launchers of the planning kernels, beside `launch`.

In: lengths of a batch on the device, and what the host shared out. Out: frozen `KernelCall`s that fill
the records that the attention kernels read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attnkit.backends.hopper.config import DecodeConfig, LatentConfig, PrefillConfig
from attnkit.backends.hopper.plan_kernels import fill_row_tiles_kernel, share_decodes_kernel
from attnkit.backends.hopper.tuning import SPARE, min_decode_tiles
from attnkit.backends.kernel_call import KernelCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """Lengths of a batch, on the device. R requests.

    Attributes:
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        causal: of all requests, or bool (R,).
        window: keys that a query sees; None: no window.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    causal: bool | torch.Tensor
    window: int | None


def row_tiles_call(
    work: torch.Tensor,
    num_tiles: int,
    num_starts: int,
    records: torch.Tensor,
    lengths: Lengths,
    config: PrefillConfig,
) -> KernelCall:
    """Fill the records of row tiles.

    Args:
        work: int32, `prefill_plan.RowTiles` on the device: starts, requests, tokens, head tiles, splits.
        num_tiles: row tiles, or splits of them.
        num_starts: of its first part.
        records: int32 (num_tiles, 16), to be filled.
        lengths: of the batch.
        config: of the prefill kernel.
    """
    requests, tokens, head_tiles, *splits = work[num_starts:].view(-1, num_tiles).unbind(0)
    split, num_splits, places = splits or (None, None, None)
    block = 128
    return KernelCall(
        kernel=fill_row_tiles_kernel,
        grid=(triton.cdiv(num_tiles, block),),
        arguments={
            "tiles_ptr": records,
            "requests_ptr": requests,
            "tokens_ptr": tokens,
            "head_tiles_ptr": head_tiles,
            "splits_ptr": split,
            "num_splits_ptr": num_splits,
            "places_ptr": places,
            **_lengths(lengths),
            "num_tiles": num_tiles,
            "TOKENS": config.tokens,
            "BLOCK_N": config.block_n,
            "BLOCK": block,
        },
        options={"num_warps": 4},
        device=work.device,
    )


def share_decodes_call(
    share: torch.Tensor,
    pieces: torch.Tensor,
    lengths: Lengths,
    num_kv_heads: int,
    num_programs: int,
    max_query_len: int,
    config: DecodeConfig | LatentConfig,
    units: torch.Tensor | None = None,
    *,
    whole: bool = True,
) -> KernelCall:
    """Share out the decodes of a batch.

    Args:
        share: int32 (16 + 16 * num_programs,), to be filled.
        pieces: int32 (num_programs + units, 16), to be filled.
        lengths: of the batch.
        num_kv_heads: of the layer.
        num_programs: of the decode kernel.
        max_query_len: requests with more queries are not decodes.
        config: of the decode kernel; or of one over latents.
        units: int32 (units, 8), to be filled; None: nobody reads it.
        whole: shares of alike requests may grow by `SPARE` to end with them.
    """
    is_latent = isinstance(config, LatentConfig)
    num_reqs = lengths.seq_lens.shape[0]
    return KernelCall(
        kernel=share_decodes_kernel,
        grid=(num_reqs, num_kv_heads),
        arguments={
            "share_ptr": share,
            "pieces_ptr": pieces,
            "units_ptr": units,
            **_lengths(lengths),
            "num_reqs": num_reqs,
            "max_query_len": max_query_len,
            "num_programs": num_programs,
            "NUM_KV_HEADS": num_kv_heads,
            "TOKENS": config.tile_rows // config.pack,
            "BLOCK_N": config.plan_block_n if is_latent else config.block_n,
            "LEAST": 1 if is_latent else min_decode_tiles(config),
            "SPARE": SPARE if whole else 0,
            "GROUPS": num_kv_heads if is_latent else math.gcd(num_kv_heads, num_programs),
            "BLOCK_REQS": 256,
            "BLOCK_PIECES": 32,
        },
        options={"num_warps": 1},
        device=lengths.seq_lens.device,
    )


def _lengths(lengths: Lengths) -> dict[str, Any]:
    causal = lengths.causal
    per_request = isinstance(causal, torch.Tensor)
    return {
        "query_start_loc_ptr": lengths.query_start_loc,
        "seq_lens_ptr": lengths.seq_lens,
        "causal_ptr": causal if per_request else None,
        "causal": 1 if per_request else int(causal),
        "window": lengths.window,
    }
