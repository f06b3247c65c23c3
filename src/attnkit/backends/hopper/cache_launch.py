"""Launchers of the kernels around attention: the write into the pages, and pages of codes unpacked.

In: tensors of a step and the cache's views. Out: frozen `KernelCall`s, as in `launch`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from attnkit.backends.hopper.launch import Operands, scale_arguments
from attnkit.backends.hopper.unpack import unpack_kernel
from attnkit.backends.hopper.write import write_kernel
from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Stored


def write_call(
    key: torch.Tensor,
    value: torch.Tensor,
    stored: Stored,
    slot_mapping: torch.Tensor,
) -> KernelCall:
    """The write kernel over a step's tokens.

    Args:
        key: (at least T, num_kv_heads, head_size).
        value: the same; its head size may be another.
        stored: the cache, keys and values (num_blocks, num_kv_heads, block_size, head size), last stride
            1; with the layer's scales where it holds codes.
        slot_mapping: int64 or int32 (T,); -1 writes nothing.
    """
    key_cache, value_cache = stored.key, stored.value
    return KernelCall(
        kernel=write_kernel,
        grid=write_grid(key, slot_mapping),
        arguments={
            **write_changes(key, value, slot_mapping),
            "k_ptr": key_cache,
            "v_ptr": value_cache,
            "key_stride_token": key.stride(0),
            "key_stride_head": key.stride(1),
            "value_stride_token": value.stride(0),
            "value_stride_head": value.stride(1),
            "k_stride_page": key_cache.stride(0),
            "k_stride_row": key_cache.stride(2),
            "k_stride_head": key_cache.stride(1),
            "v_stride_page": value_cache.stride(0),
            "v_stride_row": value_cache.stride(2),
            "v_stride_head": value_cache.stride(1),
            **scale_arguments(stored.k_scale, stored.v_scale, key_cache),
            "NUM_KV_HEADS": key.shape[1],
            "HEAD_SIZE": key.shape[2],
            "VALUE_SIZE": value.shape[2],
            "PAGE_SIZE": key_cache.shape[2],
            "BLOCK": _write_block(key),
            "CODED": stored.k_scale is not None,
        },
        options={"num_warps": 4},
        device=key.device,
    )


def write_grid(key: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[int]:
    """Programs of the write kernel."""
    return (triton.cdiv(slot_mapping.shape[0] * key.shape[1], _write_block(key)),)


def write_changes(
    key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> dict[str, Any]:
    """Arguments of `write_call` that differ from one step to the next."""
    return {
        "key_ptr": key,
        "value_ptr": value,
        "slot_mapping_ptr": slot_mapping,
        "num_tokens": slot_mapping.shape[0],
    }


def _write_block(key: torch.Tensor) -> int:
    # 16 KiB of keys a program: 16-byte accesses of 128 threads, eight each.
    return 8192 // key.shape[2]


def unpack_call(
    codes: Operands, pages: torch.Tensor, seq_lens: torch.Tensor, pool: torch.Tensor
) -> KernelCall:
    """Pages of codes as pages of numbers, exactly, the layer's scales left out.

    Args:
        codes: `key`, `value` and `block_table` are read.
        pages: int32 (2, P), requests and which of their pages.
        seq_lens: int32 (R,); pages past a request's end stay as they are.
        pool: (P, num_kv_heads, block_size, 2 * head_size), keys and then values of page i, to be filled.
    """
    _, num_kv_heads, page_size, head_size = codes.key.shape
    return KernelCall(
        kernel=unpack_kernel,
        grid=(pages.shape[1], num_kv_heads),
        arguments={
            "k_ptr": codes.key,
            "v_ptr": codes.value,
            "pool_ptr": pool,
            "pages_ptr": pages,
            "num_pages": pages.shape[1],
            "table_ptr": codes.block_table,
            "table_stride": codes.block_table.stride(0),
            "seq_lens_ptr": seq_lens,
            "k_stride_page": codes.key.stride(0),
            "k_stride_head": codes.key.stride(1),
            "k_stride_row": codes.key.stride(2),
            "v_stride_page": codes.value.stride(0),
            "v_stride_head": codes.value.stride(1),
            "v_stride_row": codes.value.stride(2),
            "NUM_KV_HEADS": num_kv_heads,
            "PAGE_SIZE": page_size,
            "HEAD_SIZE": head_size,
            "ROWS": 16,
        },
        options={"num_warps": 4},
        device=pool.device,
    )
