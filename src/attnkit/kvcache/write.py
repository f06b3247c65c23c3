"""Write K and V of a step into their pages, in torch, for any device and any strides.

In: this step's keys and values and where each token goes. Out: the cache, written in place. GPU
backends have a kernel for it; this is what defines it.
"""

from __future__ import annotations

import torch

from attnkit.arguments import check_slots


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter tokens to their slots; slot -1 writes nothing.

    Args:
        key: (at least T, num_kv_heads, head_size).
        value: (at least T, num_kv_heads, head_size_v).
        kv_cache: (num_blocks, num_kv_heads, block_size, head_size + head_size_v).
        slot_mapping: int64 (T,): block * block_size + offset. Its length is the number of tokens,
            so rows of key and value past it are padding.

    Raises:
        BatchError: a slot is past the end of the cache (on a GPU: a device-side assert); nothing has
            been written.
    """
    block_size, head_size = kv_cache.shape[2], key.shape[-1]
    num_tokens = slot_mapping.shape[0]
    check_slots(slot_mapping, kv_cache.shape[0], block_size)
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks, offsets = slots // block_size, slots % block_size
    keys, values = key[:num_tokens][written], value[:num_tokens][written]
    kv_cache[blocks, :, offsets, :head_size] = keys.to(kv_cache.dtype)
    kv_cache[blocks, :, offsets, head_size:] = values.to(kv_cache.dtype)
