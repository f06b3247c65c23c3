"""Launcher of the fold kernel, which dense decodes of 64 rows and decodes over latents share.

In: states that a decode kernel left, and the units they are of. Out: a frozen `KernelCall` that writes
output and LSE of the units that are in several pieces. `fold_changes` is what differs between steps
(`repeat`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attnkit.backends.hopper.config import DecodeConfig, LatentConfig
from attnkit.backends.hopper.fold import fold_kernel
from attnkit.backends.kernel_call import KernelCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldWork:
    """Units of a step, and the states that their pieces leave.

    Attributes:
        share: int32 (16 + 16 * num_programs,), of `plan_launch.share_decodes_call`.
        units: int32 (units, 8), at least as many as there are; likewise.
        acc: float32 (2 * num_programs, tile_rows, head_size).
        sums: float32 (2 * num_programs, tile_rows, 2): their maxima and sums.
        num_rows: no unit has more live rows.
    """

    share: torch.Tensor
    units: torch.Tensor
    acc: torch.Tensor
    sums: torch.Tensor
    num_rows: int

    @property
    def tile_rows(self) -> int:
        """Of a row tile."""
        return self.acc.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldShape:
    """What a program of the fold kernel folds: so many rows and columns of so many states at once."""

    rows: int
    columns: int
    splits: int

    @classmethod
    def of(cls, work: FoldWork) -> FoldShape:
        """For a step with so many units."""
        return _fold_shape(work.acc.shape[0] // 2, work.units.shape[0], work.acc.shape[2])

    def grid(self, work: FoldWork) -> tuple[int, int, int]:
        """Programs of the kernel: no more than run at once, while a unit has one."""
        num_units, parts = work.units.shape[0], work.acc.shape[2] // self.columns
        blocks = -(-work.num_rows // self.rows)
        return num_units, min(blocks, max(1, _MOST_PROGRAMS // (num_units * parts))), parts


_MOST_PROGRAMS = 528
"""Four a multiprocessor."""


@functools.cache
def _fold_shape(num_programs: int, num_units: int, head_size: int) -> FoldShape:
    # About so many states a unit has if all are alike; a thread has 64 numbers of them in flight.
    splits = min(16, triton.next_power_of_2(num_programs // max(1, num_units) + 2))
    columns = min(head_size, 8192 // splits)
    return FoldShape(rows=8192 // splits // columns, columns=columns, splits=splits)


def fold_call(
    work: FoldWork,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    config: DecodeConfig | LatentConfig,
    log2_scale: float,
    *,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> KernelCall:
    """The fold kernel over the units of a step.

    Args:
        work: of that step, after its decode kernel.
        output: (T, H, head_size), written for the units that are in several pieces.
        lse: float32 (T, H), likewise; None: not wanted.
        config: of the decode kernel.
        log2_scale: units of the states' maxima, as that kernel had it.
        sinks: (H,); None: none.
        k_scale: float32 (1,), that latents count times; None: 1.
    """
    shape = FoldShape.of(work)
    return KernelCall(
        kernel=fold_kernel,
        grid=shape.grid(work),
        arguments={
            **fold_changes(work, output, lse, k_scale),
            "out_stride_token": output.stride(0),
            "out_stride_head": output.stride(1),
            "lse_stride_token": 0 if lse is None else lse.stride(0),
            "sinks_ptr": sinks,
            "log2_scale": log2_scale,
            "GROUP_SIZE": config.group_size,
            "PACK": config.pack,
            "HEAD_SIZE": config.head_size,
            "TILE_ROWS": config.tile_rows,
            "COLUMNS": shape.columns,
            "ROWS": shape.rows,
            "SPLITS": shape.splits,
        },
        options={"num_warps": 4},
        device=output.device,
    )


def fold_changes(
    work: FoldWork,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    k_scale: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Arguments of `fold_call` that differ from one step to the next of as many units."""
    return {
        "share_ptr": work.share,
        "units_ptr": work.units,
        "states_ptr": work.acc,
        "sums_ptr": work.sums,
        "out_ptr": output,
        "lse_ptr": lse,
        "k_scale_ptr": k_scale,
    }
