"""Launchers: check shapes and strides, choose constants and grid, start a kernel.

In: tensors and an `AttentionVariant`. Out: launched kernels that write into `output`, `lse` or the
cache. Nothing here waits for a device, and nothing knows of backends, builders and layers.

Each `*_call` makes frozen `KernelCall`s without running anything, from tensors on any device ("meta"
too), which is how every kernel can be compiled for a GPU that is not here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Encoding, Stored
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
from attnkit.backends.triton.interpreter import is_interpreting, repair_small_floats, shorten
from attnkit.backends.triton.merge import merge_kernel
from attnkit.backends.triton.operands import Operands, OutputCodes, Parts
from attnkit.backends.triton.write import encode_kernel, write_kernel
from attnkit.contract import AttentionVariant

if is_interpreting():
    repair_small_floats()
    shorten()

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


def launch_attention(
    operands: Operands,
    variant: AttentionVariant,
    *,
    min_query_len: int = 1,
    config: KernelConfig | None = None,
) -> None:
    """Attend for every request with at least `min_query_len` queries. See `attention_call`."""
    attention_call(operands, variant, min_query_len=min_query_len, config=config).launch()


def launch_decode(
    operands: Operands,
    variant: AttentionVariant,
    *,
    max_query_len: int,
    num_splits: int = 1,
    parts: Parts | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Attend for every request with at most `max_query_len` queries. See `decode_calls`."""
    for call in decode_calls(
        operands,
        variant,
        max_query_len=max_query_len,
        num_splits=num_splits,
        parts=parts,
        config=config,
    ):
        call.launch()


def launch_write(
    key: torch.Tensor, value: torch.Tensor, stored: Stored, slot_mapping: torch.Tensor
) -> None:
    """Write K and V to their slots. See `write_call`."""
    write_call(key, value, stored, slot_mapping).launch()


def attention_call(
    operands: Operands,
    variant: AttentionVariant,
    *,
    min_query_len: int = 1,
    config: KernelConfig | None = None,
) -> KernelCall:
    """The attention kernel over a batch.

    Args:
        operands: of the step; `query` has as many rows as the batch has tokens, or more.
        variant: score and mask, its tensors on the operands' device. `attn_type` is not looked at.
        min_query_len: requests with fewer queries are left alone.
        config: instead of `attention_config`.
    """
    o = operands
    head_size, head_size_v = o.query.shape[-1], o.head_size_v
    if config is None:
        config = attention_config(
            head_size,
            head_size_v,
            o.query.element_size(),
            o.stored.key.element_size(),
            gpu_of(o.query.device),
        )
    group_tile, head_tiles = _group_tiles(o.group_size, config.block_m)
    block_q = config.block_m // group_tile
    num_tiles = o.query.shape[0] // block_q + o.num_reqs
    arguments = {
        **_tensors(o, variant),
        **_scalars(o, variant),
        **_strides(o),
        "num_reqs": o.num_reqs,
        "min_query_len": min_query_len,
        "GROUP_SIZE": o.group_size,
        "GROUP_TILE": group_tile,
        **_sizes(o),
        **_codes(o),
        **_shape_of_score(variant),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SEARCH": 256,
    }
    return KernelCall(
        kernel=attention_kernel,
        grid=(num_tiles if o.num_reqs else 0, o.num_kv_heads * head_tiles),
        arguments=arguments,
        device=o.query.device,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def decode_calls(
    operands: Operands,
    variant: AttentionVariant,
    *,
    max_query_len: int,
    num_splits: int = 1,
    parts: Parts | None = None,
    config: DecodeConfig | None = None,
) -> tuple[KernelCall, ...]:
    """The decode kernel over a batch, and the merge of its parts if requests are shared.

    Args:
        operands: of the step, over pages.
        variant: score and mask, its tensors on the operands' device. `attn_type` is not looked at.
        max_query_len: requests with more queries are left alone.
        num_splits: programs that share each request and KV head; changes no bit of the result.
        parts: where they leave their states; None: only for num_splits 1.
        config: instead of `decode_config`.
    """
    o = operands
    assert o.block_table is not None, "decoding reads pages"
    assert num_splits == 1 or parts is not None, f"{num_splits} splits need memory for their parts"
    head_size, head_size_v = o.query.shape[-1], o.head_size_v
    if config is None:
        config = decode_config(
            head_size,
            head_size_v,
            o.query.element_size(),
            o.stored.key.element_size(),
            max_query_len * o.group_size,
            gpu_of(o.query.device),
        )
    group_tile, head_tiles = _group_tiles(o.group_size, config.block_m)
    block_q = config.block_m // group_tile
    part_rows = max_query_len if parts is None else parts.part_rows
    query_tiles = triton.cdiv(part_rows, block_q)
    max_segments = config.max_segments if parts is None else parts.max_segments
    segments = {
        "max_query_len": max_query_len,
        "max_segments": max_segments,
        "part_rows": part_rows,
        "BLOCK_N": config.block_n,
        "SEGMENT": config.segment,
        "part_acc_ptr": None if parts is None else parts.acc,
        "part_top_ptr": None if parts is None else parts.top,
        "part_total_ptr": None if parts is None else parts.total,
    }
    common = {**_tensors(o, variant), **_scalars(o, variant), **_strides(o), **_sizes(o)}
    score = _shape_of_score(variant)
    decode = KernelCall(
        kernel=decode_kernel,
        grid=(o.num_reqs * query_tiles * o.num_kv_heads * head_tiles * num_splits,),
        arguments={
            **common,
            **segments,
            **score,
            **_codes(o),
            "query_tiles": query_tiles,
            "num_splits": num_splits,
            "NUM_KV_HEADS": o.num_kv_heads,
            "GROUP_SIZE": o.group_size,
            "GROUP_TILE": group_tile,
            "BLOCK_M": config.block_m,
        },
        device=o.query.device,
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    if parts is None:
        return (decode,)
    names = (
        "q_ptr",
        "out_ptr",
        "out_scale_ptr",
        "out_block_scales_ptr",
        "lse_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "query_start_loc_ptr",
        "kv_lens_ptr",
        "causal_ptr",
        "spans_ptr",
        "prefix_lens_ptr",
        "sinks_ptr",
        "causal",
        "window",
        "scale",
        "out_stride_token",
        "out_stride_head",
        "lse_stride_token",
        "HEAD_SIZE_V",
        "BLOCK_DV",
        "OUT_ENCODING",
        "OUT_UNIT",
    )
    merge = KernelCall(
        kernel=merge_kernel,
        grid=(o.num_reqs * part_rows * o.query.shape[1],),
        arguments={
            **{name: common[name] for name in names},
            **segments,
            "NUM_HEADS": o.query.shape[1],
            "GROUP_SIZE": o.group_size,
            "PER_HEAD": o.stored.is_scaled_per_head,
            "BLOCK_Q": block_q,
            "BLOCK_M": config.block_m,
            "LINEAR": score["LINEAR"],
            # Eight parts of 512 bytes keep a warp's loads in flight without costing occupancy.
            "UNROLL": 8,
        },
        device=o.query.device,
        options={"num_warps": 1 if head_size_v <= 128 else 4, "num_stages": 1},
    )
    return decode, merge


def write_call(
    key: torch.Tensor, value: torch.Tensor, stored: Stored, slot_mapping: torch.Tensor
) -> KernelCall:
    """The write of a step's tokens: copied where the cache holds numbers, else encoded.

    Args:
        key: (at least T, num_kv_heads, head_size), last stride 1.
        value: (at least T, num_kv_heads, head_size_v), likewise.
        stored: the cache.
        slot_mapping: int64 or int32 (T,); -1 writes nothing.
    """
    for name, x in (("key", key), ("value", value), ("key_cache", stored.key)):
        assert x.stride(-1) == 1 or x.shape[-1] == 1, f"{name} has last stride {x.stride(-1)}"
    num_tokens, block_t = slot_mapping.shape[0], 16
    head_size, head_size_v = key.shape[-1], value.shape[-1]
    kernel, places, codes = write_kernel, stored.places, {}
    k, v = stored.key, stored.value
    if stored.encoding is not Encoding.NONE:
        kernel, k, v = encode_kernel, k.view(torch.uint8), v.view(torch.uint8)
        codes = {
            "k_scales_ptr": stored.k_scales,
            "v_scales_ptr": stored.v_scales,
            "k_scale_ptr": stored.k_scale,
            "v_scale_ptr": stored.v_scale,
            "ENCODING": int(stored.encoding),
            "UNIT": stored.unit,
            "PER_HEAD": stored.is_scaled_per_head,
        }
    return KernelCall(
        kernel=kernel,
        grid=(triton.cdiv(num_tokens, block_t), key.shape[1]),
        arguments={
            "key_ptr": key,
            "value_ptr": value,
            "k_ptr": k,
            "v_ptr": v,
            "slot_mapping_ptr": slot_mapping,
            "num_tokens": num_tokens,
            "key_stride_token": key.stride(0),
            "key_stride_head": key.stride(1),
            "value_stride_token": value.stride(0),
            "value_stride_head": value.stride(1),
            "k_stride_page": places[0].stride(0),
            "k_stride_row": places[0].stride(2),
            "k_stride_head": places[0].stride(1),
            "v_stride_page": places[1].stride(0),
            "v_stride_row": places[1].stride(2),
            "v_stride_head": places[1].stride(1),
            "HEAD_SIZE": head_size,
            "HEAD_SIZE_V": head_size_v,
            "BLOCK_D": padded(head_size),
            "BLOCK_DV": padded(head_size_v),
            "PAGE_SIZE": stored.key.shape[2],
            "BLOCK_T": block_t,
            **codes,
        },
        device=key.device,
        options={"num_warps": 4, "num_stages": 1},
    )


def _group_tiles(group_size: int, block_m: int) -> tuple[int, int]:
    """(heads in a tile, tiles that a group needs); groups larger than a tile are cut evenly."""
    num_tiles = triton.cdiv(group_size, block_m)
    return triton.cdiv(group_size, num_tiles), num_tiles


def _tensors(o: Operands, variant: AttentionVariant) -> dict[str, torch.Tensor | None]:
    written, codes = o.output, None
    if isinstance(written, OutputCodes):
        written, codes = written.codes, written
    return {
        "q_ptr": o.query,
        "k_ptr": o.stored.key,
        "v_ptr": o.stored.value if o.value_offset is None else None,
        "k_scales_ptr": o.stored.k_scales,
        "v_scales_ptr": o.stored.v_scales,
        "k_scale_ptr": o.stored.k_scale,
        "v_scale_ptr": o.stored.v_scale,
        "out_ptr": written,
        "out_scale_ptr": None if codes is None else codes.scale,
        "out_block_scales_ptr": None if codes is None else codes.block_scales,
        "lse_ptr": o.lse,
        "query_start_loc_ptr": o.query_start_loc,
        "kv_lens_ptr": o.kv_lens,
        "table_ptr": o.block_table,
        "causal_ptr": o.causal if isinstance(o.causal, torch.Tensor) else None,
        "spans_ptr": o.spans,
        # Without a window there is nothing that a prefix could be an exception to.
        "prefix_lens_ptr": None if _window(variant) is None else o.prefix_lens,
        "tree_ptr": o.tree,
        "slopes_ptr": variant.alibi_slopes,
        "sinks_ptr": variant.sinks,
    }


def _scalars(o: Operands, variant: AttentionVariant) -> dict[str, float | None]:
    return {
        "causal": 1 if isinstance(o.causal, torch.Tensor) else int(o.causal),
        "window": _window(variant),
        "scale": variant.scale,
        "soft_cap": variant.logits_soft_cap,
    }


def _window(variant: AttentionVariant) -> int | None:
    window = variant.sliding_window
    return None if window is None or window >= _NO_WINDOW else window


def _strides(o: Operands) -> dict[str, int]:
    paged = o.block_table is not None
    rows = 2 if paged else 0
    key, value = o.stored.places
    if isinstance(o.output, OutputCodes):
        out_strides = [n // o.output.unit for n in o.output.codes.stride()]
    else:
        out_strides = o.output.stride()
    return {
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
        "table_stride": 0 if o.block_table is None else o.block_table.stride(0),
    }


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
