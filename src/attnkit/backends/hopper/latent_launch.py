"""Launchers of the kernels over latents, beside `launch`.

In: tensors of one layer and step. Out: frozen `KernelCall`s that write `output` and `lse`. `*_changes`
are what differs between steps (`repeat`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attnkit.backends.hopper.config import LatentConfig
from attnkit.backends.hopper.gluon_api import TensorDescriptor, gl
from attnkit.backends.hopper.latent_decode import latent_decode_kernel
from attnkit.backends.hopper.latent_fold import fold_latents_kernel
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
class LatentWork:
    """Shared-out work of a step, of `plan_launch.share_decodes_call`.

    Attributes:
        share: int32 (16 + 16 * num_programs,).
        pieces: int32 (num_programs + units, 16).
        units: int32 (units, 8), at least as many as there are.
        acc: float32 (2 * num_programs, tile_rows, 512), for states.
        sums: float32 (2 * num_programs, tile_rows, 2): their maxima and sums.
        num_rows: no unit has more live rows.
    """

    share: torch.Tensor
    pieces: torch.Tensor
    units: torch.Tensor
    acc: torch.Tensor
    sums: torch.Tensor
    num_rows: int

    @property
    def tile_rows(self) -> int:
        """Of a row tile."""
        return self.acc.shape[1]


def latent_decode_call(o: LatentOperands, work: LatentWork, config: LatentConfig) -> KernelCall:
    """The decode kernel of as many rows over a step's pieces."""
    num_blocks, block_size, width = o.cache.shape
    is_narrow = config.tile_rows < 64
    return KernelCall(
        kernel=latent_narrow_kernel if is_narrow else latent_decode_kernel,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldShape:
    """What a program of the fold kernel folds: so many rows and columns of so many states at once."""

    rows: int
    columns: int
    splits: int

    @classmethod
    def of(cls, work: LatentWork) -> FoldShape:
        """For a step with so many units."""
        return _fold_shape(work.acc.shape[0] // 2, work.units.shape[0], work.acc.shape[2])

    def grid(self, work: LatentWork) -> tuple[int, int, int]:
        """Programs of the kernel."""
        head_size = work.acc.shape[2]
        return work.units.shape[0], -(-work.num_rows // self.rows), head_size // self.columns


@functools.cache
def _fold_shape(num_programs: int, num_units: int, head_size: int) -> FoldShape:
    # About so many states a unit has if all are alike; a thread has 64 numbers of them in flight.
    splits = min(64, triton.next_power_of_2(num_programs // max(1, num_units) + 2))
    columns = min(head_size, 8192 // splits)
    return FoldShape(rows=8192 // splits // columns, columns=columns, splits=splits)


def fold_latents_call(o: LatentOperands, work: LatentWork, config: LatentConfig) -> KernelCall:
    """The fold kernel over the units of a step."""
    shape = FoldShape.of(work)
    return KernelCall(
        kernel=fold_latents_kernel,
        grid=shape.grid(work),
        arguments={
            **fold_changes(o, work),
            **_strides_and_scale(o),
            "GROUP_SIZE": config.group_size,
            "PACK": config.pack,
            "HEAD_SIZE": config.head_size,
            "TILE_ROWS": config.tile_rows,
            "COLUMNS": shape.columns,
            "ROWS": shape.rows,
            "SPLITS": shape.splits,
        },
        options={"num_warps": 4},
        device=o.query.device,
    )


def fold_changes(o: LatentOperands, work: LatentWork) -> dict[str, Any]:
    """Arguments of `fold_latents_call` that differ from one step to the next of as many units."""
    return {
        "share_ptr": work.share,
        "units_ptr": work.units,
        "states_ptr": work.acc,
        "sums_ptr": work.sums,
        "out_ptr": o.output,
        "lse_ptr": o.lse,
        "k_scale_ptr": o.k_scale,
    }


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
