"""Launchers: check shapes and strides, choose constants and grid, start a kernel.

In: tensors and an `AttentionVariant`. Out: launched kernels that write into `output` and `lse`. Nothing
here waits for a device, and nothing knows of backends, builders and layers.

Each `*_call` makes a frozen `KernelCall` without running anything, from tensors on any device ("meta"
too), which is how every kernel can be compiled for a GPU that is not here. `*_changes` are the arguments
of such a call that differ from one step to the next (`repeat`), and `*_grid` its programs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Encoding
from attnkit.backends.triton.attention import attention_kernel
from attnkit.backends.triton.configs import (
    HOPPER,
    DecodeConfig,
    Gpu,
    KernelConfig,
    attention_config,
    decode_config,
    padded,
)
from attnkit.backends.triton.decode import decode_kernel
from attnkit.backends.triton.merge import merge_kernel
from attnkit.backends.triton.operands import (
    Operands,
    OutputCodes,
    Parts,
    StepTensors,
    value_offset,
)
from attnkit.contract import AttentionVariant

_NO_WINDOW = 1 << 30
"""From here on a window is longer than any request, and sums with it would leave int32."""


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """What tile sizes depend on; a Hopper for devices that are none (the interpreter, "meta")."""
    if device.type != "cuda":
        return HOPPER
    driver: Any = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(device.index or 0)
    return Gpu(
        num_sms=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        has_wgmma=torch.cuda.get_device_capability(device)[0] in (9, 10),
        has_e4m3=torch.cuda.get_device_capability(device) >= (8, 9),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeWork:
    """Which requests are decoded, and by how many programs each.

    Attributes:
        max_query_len: requests with more queries are left alone.
        config: tile and segments.
        num_splits: programs that share each request and KV head; over keys and values it changes no bit
            of the result.
        parts: where they leave their states; None: only for num_splits 1.
    """

    max_query_len: int
    config: DecodeConfig
    num_splits: int = 1
    parts: Parts | None = None

    def __post_init__(self) -> None:
        alone = self.num_splits == 1 or self.parts is not None
        assert alone, f"{self.num_splits} splits need memory for their parts"

    @property
    def part_rows(self) -> int:
        """Queries of a request that programs are started for."""
        return self.max_query_len if self.parts is None else self.parts.part_rows

    @property
    def max_segments(self) -> int:
        """Segments of a request, at most."""
        return self.config.max_segments if self.parts is None else self.parts.max_segments

    def query_tiles(self, group_tile: int) -> int:
        """Tiles of a request's queries, `group_tile` heads in each."""
        return -(-self.part_rows // (self.config.block_m // group_tile))


def launch_attention(
    operands: Operands,
    variant: AttentionVariant,
    *,
    min_query_len: int = 1,
    config: KernelConfig | None = None,
) -> None:
    """Attend for every request with at least `min_query_len` queries. See `attention_call`."""
    if config is None:
        config = attention_config_of(operands)
    attention_call(operands, variant, min_query_len, config).launch()


def launch_decode(
    operands: Operands,
    variant: AttentionVariant,
    *,
    max_query_len: int,
    num_splits: int = 1,
    parts: Parts | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Attend for every request with at most `max_query_len` queries. See `decode_call`, `merge_call`."""
    if config is None:
        config = decode_config(
            operands.query.shape[-1],
            operands.head_size_v,
            operands.query.element_size(),
            operands.stored.key.element_size(),
            max_query_len * operands.group_size,
            gpu_of(operands.query.device),
        )
    work = DecodeWork(
        max_query_len=max_query_len, config=config, num_splits=num_splits, parts=parts
    )
    decode_call(operands, variant, work).launch()
    if parts is not None:
        merge_call(operands, variant, work).launch()


def attention_config_of(o: Operands) -> KernelConfig:
    """Tile of the attention kernel over these."""
    return attention_config(
        o.query.shape[-1],
        o.head_size_v,
        o.query.element_size(),
        o.stored.key.element_size(),
        gpu_of(o.query.device),
    )


def attention_call(
    operands: Operands, variant: AttentionVariant, min_query_len: int, config: KernelConfig
) -> KernelCall:
    """The attention kernel over a batch.

    Args:
        operands: of the step; `query` has as many rows as the batch has tokens, or more.
        variant: score and mask, its tensors on the operands' device. `attn_type` is not looked at.
        min_query_len: requests with fewer queries are left alone.
        config: the tile.
    """
    o = operands
    group_tile, _ = _group_tiles(o.group_size, config.block_m)
    return KernelCall(
        kernel=attention_kernel,
        grid=attention_grid(o, o.num_tokens, o.num_kv_heads, config),
        arguments={
            **attention_changes(o, variant, min_query_len),
            **key_changes(o.stored.key, o.stored.value),
            **_of_layer(o, variant),
            **_sizes(o),
            **_codes(o),
            **_shape_of_score(variant),
            "GROUP_SIZE": o.group_size,
            "GROUP_TILE": group_tile,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "SEARCH": 256,
        },
        device=o.query.device,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def attention_grid(
    step: StepTensors, num_tokens: int, num_kv_heads: int, config: KernelConfig
) -> tuple[int, int]:
    """Programs of the attention kernel: for each tile of queries, and each of a KV head's heads."""
    group_size = step.query.shape[1] // num_kv_heads
    group_tile, head_tiles = _group_tiles(group_size, config.block_m)
    num_tiles = num_tokens // (config.block_m // group_tile) + step.num_reqs
    return (num_tiles if step.num_reqs else 0), num_kv_heads * head_tiles


def attention_changes(
    step: StepTensors, variant: AttentionVariant, min_query_len: int
) -> dict[str, Any]:
    """Arguments of `attention_call` over pages that differ from one step to the next."""
    return {
        **_of_step(step, variant),
        "table_ptr": step.block_table,
        "tree_ptr": step.tree,
        "table_stride": 0 if step.block_table is None else step.block_table.stride(0),
        "num_reqs": step.num_reqs,
        "min_query_len": min_query_len,
    }


def key_changes(key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    """Those more that differ where keys are not in pages but in the step."""
    in_row = value_offset(key, value) is not None
    return {"k_ptr": key, "v_ptr": None if in_row else value}


def decode_call(operands: Operands, variant: AttentionVariant, work: DecodeWork) -> KernelCall:
    """The decode kernel over a batch.

    Args:
        operands: of the step, over pages.
        variant: score and mask, its tensors on the operands' device. `attn_type` is not looked at.
        work: if it has parts, the output is that of `merge_call`, which is to follow.
    """
    o, config = operands, work.config
    assert o.block_table is not None, "decoding reads pages"
    group_tile, _ = _group_tiles(o.group_size, config.block_m)
    return KernelCall(
        kernel=decode_kernel,
        grid=decode_grid(o, o.num_kv_heads, work),
        arguments={
            **decode_changes(o, variant, o.num_kv_heads, work),
            **key_changes(o.stored.key, o.stored.value),
            **_of_layer(o, variant),
            **_sizes(o),
            **_codes(o),
            **_shape_of_score(variant),
            "NUM_KV_HEADS": o.num_kv_heads,
            "GROUP_SIZE": o.group_size,
            "GROUP_TILE": group_tile,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "SEGMENT": config.segment,
        },
        device=o.query.device,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def decode_grid(step: StepTensors, num_kv_heads: int, work: DecodeWork) -> tuple[int]:
    """Programs of the decode kernel."""
    group_size = step.query.shape[1] // num_kv_heads
    group_tile, head_tiles = _group_tiles(group_size, work.config.block_m)
    tiles = work.query_tiles(group_tile) * num_kv_heads * head_tiles
    return (step.num_reqs * tiles * work.num_splits,)


def decode_changes(
    step: StepTensors, variant: AttentionVariant, num_kv_heads: int, work: DecodeWork
) -> dict[str, Any]:
    """Arguments of `decode_call` that differ from one step to the next."""
    group_tile, _ = _group_tiles(step.query.shape[1] // num_kv_heads, work.config.block_m)
    assert step.block_table is not None
    return {
        **_of_step(step, variant),
        **_of_parts(work),
        "table_ptr": step.block_table,
        "tree_ptr": step.tree,
        "table_stride": step.block_table.stride(0),
        "query_tiles": work.query_tiles(group_tile),
        "num_splits": work.num_splits,
    }


def merge_call(operands: Operands, variant: AttentionVariant, work: DecodeWork) -> KernelCall:
    """The merge of the parts that `decode_call` left.

    Args:
        operands, variant, work: of that call.
    """
    o, config = operands, work.config
    of_layer = _of_layer(o, variant)
    names = (
        "k_scale_ptr",
        "v_scale_ptr",
        "sinks_ptr",
        "window",
        "scale",
        "out_stride_token",
        "out_stride_head",
        "lse_stride_token",
    )
    sizes = _sizes(o)
    group_tile, _ = _group_tiles(o.group_size, config.block_m)
    return KernelCall(
        kernel=merge_kernel,
        grid=merge_grid(o, work),
        arguments={
            **merge_changes(o, variant, work),
            **{name: of_layer[name] for name in names},
            **{
                name: sizes[name]
                for name in ("HEAD_SIZE_V", "BLOCK_DV", "OUT_ENCODING", "OUT_UNIT")
            },
            "NUM_HEADS": o.query.shape[1],
            "GROUP_SIZE": o.group_size,
            "PER_HEAD": o.stored.is_scaled_per_head,
            "BLOCK_Q": config.block_m // group_tile,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "SEGMENT": config.segment,
            "LINEAR": _shape_of_score(variant)["LINEAR"],
            # Eight parts of 512 bytes keep a warp's loads in flight without costing occupancy.
            "UNROLL": 8,
        },
        device=o.query.device,
        options={"num_warps": 1 if o.head_size_v <= 128 else 4, "num_stages": 1},
    )


def merge_grid(step: StepTensors, work: DecodeWork) -> tuple[int]:
    """Programs of the merge kernel: one for each query and head."""
    return (step.num_reqs * work.part_rows * step.query.shape[1],)


def merge_changes(step: StepTensors, variant: AttentionVariant, work: DecodeWork) -> dict[str, Any]:
    """Arguments of `merge_call` that differ from one step to the next."""
    return {**_of_step(step, variant), **_of_parts(work)}


def _group_tiles(group_size: int, block_m: int) -> tuple[int, int]:
    """(heads in a tile, tiles that a group needs); groups larger than a tile are cut evenly."""
    num_tiles = -(-group_size // block_m)
    return -(-group_size // num_tiles), num_tiles


def _of_step(step: StepTensors, variant: AttentionVariant) -> dict[str, Any]:
    """What differs from one step to the next for every kernel."""
    written, codes = step.output, None
    if isinstance(written, OutputCodes):
        written, codes = written.codes, written
    causal = step.causal
    is_flagged = isinstance(causal, torch.Tensor)
    return {
        "q_ptr": step.query,
        "out_ptr": written,
        "out_scale_ptr": None if codes is None else codes.scale,
        "out_block_scales_ptr": None if codes is None else codes.block_scales,
        "lse_ptr": step.lse,
        "query_start_loc_ptr": step.query_start_loc,
        "kv_lens_ptr": step.kv_lens,
        "causal_ptr": causal if is_flagged else None,
        "spans_ptr": step.spans,
        # Without a window there is nothing that a prefix could be an exception to.
        "prefix_lens_ptr": None if _window(variant) is None else step.prefix_lens,
        "causal": 1 if is_flagged else int(causal),
    }


def _of_parts(work: DecodeWork) -> dict[str, Any]:
    parts = work.parts
    return {
        "part_acc_ptr": None if parts is None else parts.acc,
        "part_top_ptr": None if parts is None else parts.top,
        "part_total_ptr": None if parts is None else parts.total,
        "max_query_len": work.max_query_len,
        "max_segments": work.max_segments,
        "part_rows": work.part_rows,
    }


def _of_layer(o: Operands, variant: AttentionVariant) -> dict[str, Any]:
    """What a layer has in every step, and strides."""
    paged = o.block_table is not None
    rows = 2 if paged else 0
    key, value = o.stored.places
    if isinstance(o.output, OutputCodes):
        out_strides = [n // o.output.unit for n in o.output.codes.stride()]
    else:
        out_strides = o.output.stride()
    return {
        "k_scales_ptr": o.stored.k_scales,
        "v_scales_ptr": o.stored.v_scales,
        "k_scale_ptr": o.stored.k_scale,
        "v_scale_ptr": o.stored.v_scale,
        "slopes_ptr": variant.alibi_slopes,
        "sinks_ptr": variant.sinks,
        "window": _window(variant),
        "scale": variant.scale,
        "soft_cap": variant.logits_soft_cap,
        "q_stride_token": o.query.stride(0),
        "q_stride_head": o.query.stride(1),
        "k_stride_page": key.stride(0) if paged else 0,
        "k_stride_row": key.stride(rows),
        "k_stride_head": key.stride(1),
        "v_stride_page": value.stride(0) if paged else 0,
        "v_stride_row": value.stride(rows),
        "v_stride_head": value.stride(1),
        "out_stride_token": out_strides[0],
        "out_stride_head": out_strides[1],
        "lse_stride_token": 0 if o.lse is None else o.lse.stride(0),
    }


def _window(variant: AttentionVariant) -> int | None:
    window = variant.sliding_window
    return None if window is None or window >= _NO_WINDOW else window


def _sizes(o: Operands) -> dict[str, int]:
    head_size, head_size_v = o.query.shape[-1], o.head_size_v
    codes = o.output if isinstance(o.output, OutputCodes) else None
    return {
        "HEAD_SIZE": head_size,
        "HEAD_SIZE_V": head_size_v,
        "BLOCK_D": padded(head_size),
        "BLOCK_DV": padded(head_size_v),
        "PAGE_SIZE": 1 if o.block_table is None else o.stored.key.shape[2],
        "OUT_ENCODING": int(Encoding.NONE if codes is None else codes.encoding),
        "OUT_UNIT": 1 if codes is None else codes.unit,
    }


def _codes(o: Operands) -> dict[str, int | bool]:
    return {
        "CODES": int(o.stored.codes),
        "UNIT": o.stored.unit,
        "VALUE_OFFSET": o.value_offset or 0,
        "PER_HEAD": o.stored.is_scaled_per_head,
    }


def _shape_of_score(variant: AttentionVariant) -> dict[str, bool]:
    # A positive factor may be applied after the maximum; anything else is applied before.
    return {
        "LINEAR": variant.logits_soft_cap is None
        and variant.alibi_slopes is None
        and variant.scale > 0,
        "ALIBI_SQRT": variant.use_alibi_sqrt,
    }
