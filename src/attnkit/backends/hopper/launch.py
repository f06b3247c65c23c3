"""Launchers: check shapes and strides, choose constants and grid, start a kernel.

In: tensors and an `AttentionVariant`. Out: launched kernels that write into `output`, `lse` or records
of work. Nothing here waits for a device, and nothing knows of backends and builders.

Each `*_call` makes a frozen `KernelCall` without running anything, from tensors on any device ("meta"
too), which is how every kernel is compiled for a GPU that is not here. `*_changes` are the arguments of
such a call that differ from one step to the next (`repeat`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.backends.hopper.config import (
    DecodeConfig,
    KernelConfig,
    PrefillConfig,
    ScoreConfig,
)
from attnkit.backends.hopper.decode import decode_kernel
from attnkit.backends.hopper.gluon_api import TensorDescriptor, gl
from attnkit.backends.hopper.merge import merge_kernel
from attnkit.backends.hopper.prefill import prefill_kernel
from attnkit.backends.kernel_call import KernelCall
from attnkit.contract import AttentionVariant
from attnkit.errors import AttnkitError

LOG2_E = math.log2(math.e)

_Q_LAYOUT = gl.NVMMASharedLayout(128, 16, 4)
"""Of a box of Q in shared memory: rows of 64 16-bit columns, swizzled over 128 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operands:
    """What attention reads and writes. R requests, T tokens.

    Attributes:
        query: (T, num_heads, head_size); strides are multiples of 16 bytes, 1 for the last.
        key: (num_blocks, num_kv_heads, block_size, head_size), likewise; or uint8 codes. Without pages
            (num_keys, num_kv_heads, 1, head_size).
        value: the same, of `value_size` columns.
        output: (T, num_heads, head_size).
        lse: float32 (T, num_heads); None: not wanted.
        block_table: int32 (R, W); without pages the first row of each request's keys, (R, 1).
        k_scale: float32 (1,) or (num_kv_heads,), which keys count times; None: 1.
        v_scale: the same of values.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor | None
    block_table: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def score_config(variant: AttentionVariant, *, lse: bool) -> ScoreConfig:
    """Which parts of the score a kernel must have for `variant`."""
    alibi = 0 if variant.alibi_slopes is None else 2 if variant.use_alibi_sqrt else 1
    soft_cap = variant.logits_soft_cap is not None
    return ScoreConfig(
        linear=_is_linear(variant),
        soft_cap=soft_cap,
        alibi=alibi,
        window=variant.sliding_window is not None,
        sinks=variant.sinks is not None,
        lse=lse,
    )


def prefill_call(
    operands: Operands,
    variant: AttentionVariant,
    starts: torch.Tensor,
    num_programs: int,
    records: torch.Tensor,
    config: PrefillConfig,
) -> KernelCall:
    """The prefill kernel over the row tiles of a plan.

    Args:
        operands: of the step.
        variant: score and mask, its tensors on the operands' device.
        starts: int32 (num_programs + 1,), first row tile of each program.
        num_programs: of the grid.
        records: int32 (num_tiles, 16).
        config: made for the layer, the pages and `variant`. If it is one of splits, output and LSE of
            `operands` are those of `Parts`.
    """
    o = operands
    return KernelCall(
        kernel=prefill_kernel,
        grid=(num_programs,),
        arguments={
            **_common(o, variant),
            **prefill_changes(o.query, o.output, o.lse, o.block_table, starts, records),
            **_descriptors(o, config, config.pack, 64),
            "CONFIG": config,
        },
        options=options_of(config),
        device=operands.query.device,
    )


def prefill_changes(
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    records: torch.Tensor,
) -> dict[str, Any]:
    """Arguments of `prefill_call` that differ from one step to the next."""
    return {
        "q_desc": query,
        "starts_ptr": starts,
        "tiles_ptr": records,
        **_step(output, lse, block_table),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Where splits of row tiles leave their rows, one place after the other.

    Attributes:
        output: float32 (num_splits * tokens of a row tile, pack, value_size).
        lse: float32 (num_splits * tokens of a row tile, pack).
    """

    output: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def make(cls, num_splits: int, config: PrefillConfig, device: torch.device | str) -> Parts:
        """Allocate them."""
        rows = (num_splits * config.tokens, config.pack)
        return cls(
            output=torch.empty(*rows, config.value_size, dtype=torch.float32, device=device),
            lse=torch.empty(rows, dtype=torch.float32, device=device),
        )


def merge_call(
    parts: Parts,
    records: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    config: PrefillConfig,
) -> KernelCall:
    """Put the splits of row tiles together.

    Args:
        parts: as the prefill kernel left them.
        records: int32 (num_splits, 16).
        output: (T, num_heads, value_size), written for the rows of those tiles.
        lse: float32 (T, num_heads), likewise; None: not wanted.
        sinks: (num_heads,); None: none.
        config: of the prefill kernel.
    """
    return KernelCall(
        kernel=merge_kernel,
        grid=merge_grid(records),
        arguments={
            **merge_changes(parts, records, output, lse),
            "out_stride_token": output.stride(0),
            "out_stride_head": output.stride(1),
            "lse_stride_token": 0 if lse is None else lse.stride(0),
            "sinks_ptr": sinks,
            "HEAD_SIZE": config.value_size,
            "PACK": config.pack,
            "TILE_ROWS": 64 * config.num_consumers,
            "BLOCK_ROWS": 512 // config.value_size,
            "BLOCK_SPLITS": 8,
        },
        # A launch after the end of the prefill kernel takes 1 us more.
        options={"num_warps": 4, "launch_pdl": True},
        device=output.device,
    )


def merge_grid(records: torch.Tensor) -> tuple[int, int]:
    """Programs of the merge kernel: for each split some, which part the rows of its row tile."""
    return records.shape[0], 8


def merge_changes(
    parts: Parts, records: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None
) -> dict[str, Any]:
    """Arguments of `merge_call` that differ from one step to the next."""
    return {
        "records_ptr": records,
        "parts_ptr": parts.output,
        "part_lses_ptr": parts.lse,
        "out_ptr": output,
        "lse_ptr": lse,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class States:
    """Where pieces of shared units leave their states; two places a program.

    Attributes:
        acc: float32 (2 * num_programs, tile_rows, head_size).
        sums: float32 (2 * num_programs, tile_rows, 2): maximum and sum.
        counters: int32 (4, 2 * num_programs), zero before and after each launch: at each level of the
            tree, states that have come to a group.
    """

    acc: torch.Tensor
    sums: torch.Tensor
    counters: torch.Tensor

    @property
    def grid(self) -> tuple[int]:
        """Programs of the decode kernel."""
        return (self.counters.shape[1] // 2,)

    @classmethod
    def make(cls, num_programs: int, config: DecodeConfig, device: torch.device | str) -> States:
        """Allocate them; four levels of eight hold the states of 4,096 programs."""
        num, rows = 2 * num_programs, config.tile_rows
        return cls(
            acc=torch.empty(num, rows, config.head_size, dtype=torch.float32, device=device),
            sums=torch.empty(num, rows, 2, dtype=torch.float32, device=device),
            counters=torch.zeros(4, num, dtype=torch.int32, device=device),
        )


def decode_call(
    operands: Operands,
    variant: AttentionVariant,
    share: torch.Tensor,
    pieces: torch.Tensor,
    states: States,
    config: DecodeConfig,
) -> KernelCall:
    """The decode kernel over the pieces of a plan.

    Args:
        operands: of the step.
        variant: score and mask, its tensors on the operands' device.
        share: int32 (16 + 16 * num_programs,).
        pieces: int32 (num_programs + units, 16).
        states: of as many programs; not to be used by two launches at once.
        config: made for the layer, the pages and `variant`.
    """
    o = operands
    return KernelCall(
        kernel=decode_kernel,
        grid=states.grid,
        arguments={
            **_common(o, variant),
            **decode_changes(o.query, o.output, o.lse, o.block_table, share, pieces, states),
            **_descriptors(o, config, config.group_size, config.tile_rows),
            "CONFIG": config,
        },
        options=options_of(config) | ({"launch_pdl": True} if config.beside else {}),
        device=operands.query.device,
    )


def decode_changes(
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    block_table: torch.Tensor,
    share: torch.Tensor,
    pieces: torch.Tensor,
    states: States,
) -> dict[str, Any]:
    """Arguments of `decode_call` that differ from one step to the next."""
    return {
        "q_desc": query,
        "share_ptr": share,
        "pieces_ptr": pieces,
        "states_ptr": states.acc,
        "sums_ptr": states.sums,
        "counters_ptr": states.counters,
        "num_states": states.counters.shape[1],
        **_step(output, lse, block_table),
    }


def can_copy(x: torch.Tensor) -> bool:
    """Whether the copy engine can read `x` in boxes."""
    unit = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return fits and not any(s % unit for s in x.stride()[:-1])


def check_strides(name: str, x: torch.Tensor, error: type[AttnkitError]) -> None:
    """Whether the copy engine can read `x`.

    Raises:
        error: its address or a stride is no multiple of 16 bytes, or the last stride is not 1.
    """
    if can_copy(x):
        return
    raise error(
        f"{name} has strides {tuple(x.stride())} of {x.element_size()} bytes at address "
        f"{x.data_ptr():#x}; the hopper backends copy it in boxes, which needs an address and strides "
        "that are multiples of 16 bytes and a last stride of 1. Lay it out so, or use backend='triton' "
        "('triton_mla' over latents)"
    )


def _descriptors(o: Operands, config: KernelConfig, heads: int, rows: int) -> dict[str, Any]:
    """Tensor maps of Q, K and V. A box of Q has `rows` rows: tokens, and `pack` of the `heads` side by
    side; what is outside the tensor becomes zero."""
    num_tokens, num_heads, head_size = o.query.shape
    stride, head_stride, _ = o.query.stride()
    return {
        "q_desc": TensorDescriptor(
            o.query,
            [num_tokens, num_heads // heads, heads, head_size],
            [stride, heads * head_stride, head_stride, 1],
            [rows // config.pack, 1, config.pack, 64],
            _Q_LAYOUT,
        ),
        "k_desc": _pool_descriptor(o.key, config),
        "v_desc": _pool_descriptor(o.value, config),
    }


def _pool_descriptor(pool: torch.Tensor, config: KernelConfig) -> Any:
    is_ragged = isinstance(config, PrefillConfig) and config.ragged
    box = [config.rows, 1, 1] if is_ragged else [1, 1, config.rows]
    return TensorDescriptor(
        pool,
        list(pool.shape),
        list(pool.stride()),
        [*box, config.strip],
        gl.NVMMASharedLayout(config.strip * config.element_bytes, 8 * config.element_bytes, 4),
    )


def _step(
    output: torch.Tensor, lse: torch.Tensor | None, block_table: torch.Tensor
) -> dict[str, Any]:
    return {
        "table_ptr": block_table,
        "table_stride": block_table.stride(0),
        "out_ptr": output,
        # Roles cannot be handed None, so what a kernel does not have is some pointer it never reads.
        "lse_ptr": output if lse is None else lse,
    }


def _common(o: Operands, variant: AttentionVariant) -> dict[str, Any]:
    window = variant.sliding_window
    cap = variant.logits_soft_cap
    factor = variant.scale * LOG2_E
    return {
        "num_pages": o.key.shape[0],
        "out_stride_token": o.output.stride(0),
        "out_stride_head": o.output.stride(1),
        "lse_stride_token": 0 if o.lse is None else o.lse.stride(0),
        "slopes_ptr": o.output if variant.alibi_slopes is None else variant.alibi_slopes,
        "sinks_ptr": o.output if variant.sinks is None else variant.sinks,
        **scale_arguments(o.k_scale, o.v_scale, o.output),
        "window": 0 if window is None else window,
        "log2_scale": log2_scale(variant),
        "score_factor": factor if cap is None else 2.0 * factor / cap,
        "cap_log2": 0.0 if cap is None else cap * LOG2_E,
    }


def log2_scale(variant: AttentionVariant) -> float:
    """What the softmax multiplies the kernels' scores by: linear ones it gets raw."""
    return variant.scale * LOG2_E if _is_linear(variant) else 1.0


def _is_linear(variant: AttentionVariant) -> bool:
    # A positive factor may be applied after the maximum; anything else is applied before.
    return variant.logits_soft_cap is None and variant.alibi_slopes is None and variant.scale > 0


def scale_arguments(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, absent: torch.Tensor
) -> dict[str, Any]:
    """The layer's scales; without them, some pointer that is never read."""
    return {
        "k_scale_ptr": absent if k_scale is None else k_scale,
        "v_scale_ptr": absent if v_scale is None else v_scale,
        "scale_stride": 0 if k_scale is None or k_scale.numel() == 1 else 1,
    }


def options_of(config: KernelConfig) -> dict[str, Any]:
    """Of the compiler, for a Gluon kernel."""
    # Fusion is said aloud because its default changes after Triton 3.9.
    return {"num_warps": 4, "maxnreg": config.maxnreg, "enable_fp_fusion": True}
