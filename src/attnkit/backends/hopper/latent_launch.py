"""Launchers of the kernels over latents, beside `launch`.

In: tensors of one layer and step. Out: frozen `KernelCall`s that write `output` and `lse`.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        cache: (num_blocks, block_size, 576), likewise: a latent and its rope columns.
        output: (T, H, 512).
        lse: float32 (T, H); None: not wanted.
        block_table: int32 (R, W).
        scale: factor on q.k, above 0.
    """

    query: torch.Tensor
    query_rope: torch.Tensor
    cache: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor | None
    block_table: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentWork:
    """Shared-out work of a step, of `launch.share_decodes_call`.

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
    return KernelCall(
        kernel=latent_decode_kernel if config.tile_rows == 64 else latent_narrow_kernel,
        grid=(work.acc.shape[0] // 2,),
        arguments={
            "q_desc": _query_descriptor(o.query, config),
            "q_rope_desc": _query_descriptor(o.query_rope, config),
            "c_desc": TensorDescriptor(
                o.cache,
                [num_blocks, 1, block_size, width],
                [o.cache.stride(0), o.cache.stride(0), o.cache.stride(1), 1],
                [1, 1, config.rows, 64],
                gl.NVMMASharedLayout(128, 16, 4),
            ),
            "share_ptr": work.share,
            "pieces_ptr": work.pieces,
            "table_ptr": o.block_table,
            "table_stride": o.block_table.stride(0),
            "num_pages": num_blocks,
            "states_ptr": work.acc,
            "sums_ptr": work.sums,
            **_results(o),
            # Roles cannot be handed None.
            "lse_ptr": o.output if o.lse is None else o.lse,
            "CONFIG": config,
        },
        options=options_of(config),
        device=o.query.device,
    )


def fold_latents_call(o: LatentOperands, work: LatentWork, config: LatentConfig) -> KernelCall:
    """The fold kernel over the units of a step."""
    num_units = work.units.shape[0]
    # About so many states a unit has if all are alike; a thread has 64 numbers of them in flight.
    num_programs = work.acc.shape[0] // 2
    splits = min(64, triton.next_power_of_2(num_programs // max(1, num_units) + 2))
    columns = min(config.head_size, 8192 // splits)
    rows = 8192 // splits // columns
    return KernelCall(
        kernel=fold_latents_kernel,
        grid=(num_units, -(-work.num_rows // rows), config.head_size // columns),
        arguments={
            "share_ptr": work.share,
            "units_ptr": work.units,
            "states_ptr": work.acc,
            "sums_ptr": work.sums,
            **_results(o),
            "GROUP_SIZE": config.group_size,
            "PACK": config.pack,
            "HEAD_SIZE": config.head_size,
            "TILE_ROWS": config.tile_rows,
            "COLUMNS": columns,
            "ROWS": rows,
            "SPLITS": splits,
        },
        options={"num_warps": 4},
        device=o.query.device,
    )


def _results(o: LatentOperands) -> dict[str, object]:
    return {
        "out_ptr": o.output,
        "out_stride_token": o.output.stride(0),
        "out_stride_head": o.output.stride(1),
        "lse_ptr": o.lse,
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
