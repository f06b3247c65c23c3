"""Launchers of the kernels over latents, beside `launch`.

In: tensors of one layer and step. Out: frozen `KernelCall`s that write `output` and `lse`. `*_changes`
are what differs between steps (`repeat`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnkit.backends.hopper.config import LatentConfig
from attnkit.backends.hopper.fold_launch import FoldWork, fold_call
from attnkit.backends.hopper.gluon_api import TensorDescriptor, gl
from attnkit.backends.hopper.latent_codes import latent_codes_kernel
from attnkit.backends.hopper.latent_decode import latent_decode_kernel
from attnkit.backends.hopper.latent_narrow import latent_narrow_kernel
from attnkit.backends.hopper.launch import LOG2_E, options_of
from attnkit.backends.kernel_call import KernelCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentOperands:
    """What attention over latents reads and writes. R requests, T tokens, H heads.

    Attributes:
        query: (T, H, 512), projected onto latents; strides are multiples of 16 bytes, 1 for the last.
        query_rope: (T, H, 64), likewise.
        cache: (num_blocks, block_size, 576), likewise: a latent and its rope columns; or uint8 codes.
        output: (T, H, 512).
        lse: float32 (T, H); None: not wanted.
        block_table: int32 (R, W).
        scale: factor on q.k, above 0.
        k_scale: float32 (1,), which latents and their rope columns count times; None: 1.
    """

    query: torch.Tensor
    query_rope: torch.Tensor
    cache: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor | None
    block_table: torch.Tensor
    scale: float
    k_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentWork(FoldWork):
    """Shared-out work of a step, of `plan_launch.share_decodes_call`.

    Attributes:
        pieces: int32 (num_programs + units, 16).
    """

    pieces: torch.Tensor


def latent_decode_call(o: LatentOperands, work: LatentWork, config: LatentConfig) -> KernelCall:
    """The decode kernel of as many rows over a step's pieces."""
    num_blocks, block_size, width = o.cache.shape
    kernel = latent_decode_kernel
    if config.tile_rows == 16:
        kernel = latent_narrow_kernel
    elif config.element_bytes == 1:
        kernel = latent_codes_kernel
    return KernelCall(
        kernel=kernel,
        grid=decode_grid(work),
        arguments={
            **decode_changes(o, work),
            "q_desc": _query_descriptor(o.query, config),
            "q_rope_desc": _query_descriptor(o.query_rope, config),
            "c_desc": TensorDescriptor(
                o.cache,
                [num_blocks, 1, block_size, width],
                [o.cache.stride(0), o.cache.stride(0), o.cache.stride(1), 1],
                [1, 1, config.rows, config.strip],
                gl.NVMMASharedLayout(
                    config.strip * config.element_bytes, 8 * config.element_bytes, 4
                ),
            ),
            "num_pages": num_blocks,
            **_strides_and_scale(o),
            "CONFIG": config,
        },
        options=options_of(config),
        device=o.query.device,
    )


def decode_grid(work: LatentWork) -> tuple[int]:
    """Programs of the decode kernel."""
    return (work.acc.shape[0] // 2,)


def decode_changes(o: LatentOperands, work: LatentWork) -> dict[str, Any]:
    """Arguments of `latent_decode_call` that differ from one step to the next."""
    return {
        "q_desc": o.query,
        "q_rope_desc": o.query_rope,
        "share_ptr": work.share,
        "pieces_ptr": work.pieces,
        "table_ptr": o.block_table,
        "table_stride": o.block_table.stride(0),
        "states_ptr": work.acc,
        "sums_ptr": work.sums,
        "out_ptr": o.output,
        # Roles cannot be handed None.
        "lse_ptr": o.output if o.lse is None else o.lse,
        "k_scale_ptr": o.output if o.k_scale is None else o.k_scale,
    }


def fold_latents_call(o: LatentOperands, work: LatentWork, config: LatentConfig) -> KernelCall:
    """The fold kernel over the units of a step."""
    return fold_call(work, o.output, o.lse, config, o.scale * LOG2_E, k_scale=o.k_scale)


def _strides_and_scale(o: LatentOperands) -> dict[str, Any]:
    return {
        "out_stride_token": o.output.stride(0),
        "out_stride_head": o.output.stride(1),
        "lse_stride_token": 0 if o.lse is None else o.lse.stride(0),
        "log2_scale": o.scale * LOG2_E,
    }


def _query_descriptor(query: torch.Tensor, config: LatentConfig) -> object:
    """A box has a row tile's tokens and `pack` heads of a head tile; what is outside becomes zero."""
    num_tokens, num_heads, width = query.shape
    stride, head_stride, _ = query.stride()
    group = config.group_size
    return TensorDescriptor(
        query,
        [num_tokens, num_heads // group, group, width],
        [stride, group * head_stride, head_stride, 1],
        [config.tile_rows // config.pack, 1, config.pack, 64],
        gl.NVMMASharedLayout(128, 16, 4),
    )
