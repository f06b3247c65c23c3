"""Launchers of the writes into pages: K and V of new tokens, copied or encoded.

In: tensors of a step and the cache's views. Out: frozen `KernelCall`s and what changes in them, as in
`launch`.
"""

from __future__ import annotations

from typing import Any

import torch

from attnkit.backends.kernel_call import KernelCall
from attnkit.backends.stored import Encoding, Stored
from attnkit.backends.triton.configs import padded
from attnkit.backends.triton.write import encode_kernel, write_kernel

_BLOCK_T = 16
"""Tokens of a program."""


def launch_write(
    key: torch.Tensor, value: torch.Tensor, stored: Stored, slot_mapping: torch.Tensor
) -> None:
    """Write K and V to their slots. See `write_call`."""
    write_call(key, value, stored, slot_mapping).launch()


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
            "HAS_FLOAT8": stored.has_float8,
        }
    return KernelCall(
        kernel=kernel,
        grid=write_grid(key.shape[1], slot_mapping),
        arguments={
            **write_changes(key, value, slot_mapping),
            "k_ptr": k,
            "v_ptr": v,
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
            "BLOCK_T": _BLOCK_T,
            **codes,
        },
        device=key.device,
        options={"num_warps": 4, "num_stages": 1},
    )


def write_grid(num_kv_heads: int, slot_mapping: torch.Tensor) -> tuple[int, int]:
    """Programs of the write kernels."""
    return -(-slot_mapping.shape[0] // _BLOCK_T), num_kv_heads


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
