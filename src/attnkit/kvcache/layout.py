"""Strides: how one logical cache shape lies in memory under each `KVCacheLayout`.

In: specs, a number of blocks and a layout. Out: tensors of the logical shape (B, H, N, C) per
layer, all of one allocation or one each, whose strides follow the layout. Kernels read strides and
never ask for the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    KVCacheLayout,
)
from attnkit.errors import CacheError


def allocate(
    specs: Sequence[AttentionSpec],
    num_blocks: int,
    layout: KVCacheLayout,
    device: torch.device,
) -> list[torch.Tensor]:
    """One zeroed tensor of logical shape (B, H, N, C) per spec.

    Layer-compact layouts allocate each layer alone, so specs may differ; the others interleave
    layers and need equal specs without padding.

    Raises:
        CacheError: the layout cannot hold these specs.
    """
    if layout.is_layer_compact:
        return [_layer(spec, num_blocks, layout, device) for spec in specs]
    first = specs[0]
    if any(spec != first for spec in specs) or first.page_size_padded is not None:
        raise CacheError(
            f"layout {layout.name} interleaves layers, so all need one spec without padding; "
            "use HND or NHD for layers that differ"
        )
    order = layout.value
    shape = (len(specs), num_blocks, *_page_shape(first))
    storage = torch.zeros([shape[dim] for dim in order], dtype=first.dtype, device=device)
    return list(storage.permute([order.index(dim) for dim in range(5)]).unbind(0))


def allocate_old_generation(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    num_blocks: int,
    kv_cache_dtype: str,
    device: torch.device,
) -> torch.Tensor | None:
    """The tensor an older backend asks for by `get_kv_cache_shape`; None for a current one.

    The tensor has the promised shape, and lies in memory in `get_kv_cache_stride_order`.

    Raises:
        CacheError: shape and stride order have different numbers of dimensions.
    """
    try:
        shape = backend.get_kv_cache_shape(
            num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size, kv_cache_dtype
        )
    except NotImplementedError:
        return None
    try:
        order = tuple(backend.get_kv_cache_stride_order())
    except NotImplementedError:
        order = tuple(range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        raise CacheError(
            f"{backend.__name__}: stride order {order} is not a permutation of the "
            f"{len(shape)} dimensions of its cache shape {tuple(shape)}"
        )
    storage = torch.zeros([shape[dim] for dim in order], dtype=spec.dtype, device=device)
    return storage.permute([order.index(dim) for dim in range(len(shape))])


def _page_shape(spec: AttentionSpec) -> tuple[int, int, int]:
    return spec.head_slots, spec.num_states, spec.content_size


def _layer(
    spec: AttentionSpec, num_blocks: int, layout: KVCacheLayout, device: torch.device
) -> torch.Tensor:
    order = [dim - 1 for dim in layout.value[1:]]
    shape = (num_blocks, *_page_shape(spec))
    if spec.page_size_padded is None:
        storage = torch.zeros([shape[dim] for dim in order], dtype=spec.dtype, device=device)
        return storage.permute([order.index(dim) for dim in range(4)])
    if not layout.is_block_contiguous or spec.page_size_padded % spec.dtype.itemsize:
        raise CacheError(
            f"a page padded to {spec.page_size_padded} bytes needs layout HND or NHD and whole "
            f"{spec.dtype} elements, but the layout is {layout.name}"
        )
    page = spec.page_size_padded // spec.dtype.itemsize
    storage = torch.zeros(num_blocks * page, dtype=spec.dtype, device=device)
    strides = [0, 0, 0, 1]
    step = 1
    for dim in reversed(order[1:]):
        strides[dim] = step
        step *= shape[dim]
    strides[0] = page
    return storage.as_strided(shape, strides)
