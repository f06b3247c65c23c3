"""Strides: how one logical cache shape lies in memory under each `KVCacheLayout`.

In: specs, a number of blocks and a layout. Out: tensors of the logical shape (B, H, N, C) per
layer, all of one allocation or one each, whose strides follow the layout. Kernels read strides and
never ask for the layout. `check_places` looks at caches that somebody else made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
from collections.abc import Sequence

import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    KVCacheLayout,
)
from attnkit.errors import BatchError, CacheError


def allocate(
    storages: Sequence[Sequence[AttentionSpec]],
    num_blocks: int,
    layout: KVCacheLayout,
    device: torch.device,
) -> list[list[torch.Tensor]]:
    """Zeroed memory per storage, seen through each spec that lies over it.

    Args:
        storages: the specs that share each piece of memory; their pages have equal bytes.

    Returns:
        Per storage, one tensor of logical shape (B, H, N, C) per spec.

    Raises:
        CacheError: the layout cannot hold these specs. Layer-compact layouts allocate each storage
            alone; the others interleave layers, whose pages must then have one shape. Or blocks would
            lie closer than a `block_stride_alignment` allows.
    """
    for spec in itertools.chain(*storages):
        _check_alignment(spec)
    if layout.is_layer_compact:
        return [_views(specs, num_blocks, layout, device) for specs in storages]
    first, everyone = storages[0][0], [spec for specs in storages for spec in specs]
    if any(_page(s) != _page(first) or s.page_size_padded is not None for s in everyone):
        raise CacheError(
            f"layout {layout.name} interleaves layers, so their pages need one shape without "
            "padding; use HND or NHD for layers that differ"
        )
    order = layout.value
    shape = (len(storages), num_blocks, *_page(first)[:3])
    memory = _zeros([shape[dim] for dim in order], first.dtype, device)
    layers = memory.permute([order.index(dim) for dim in range(5)]).unbind(0)
    return [[layer] * len(specs) for specs, layer in zip(storages, layers, strict=True)]


@functools.lru_cache(maxsize=256)  # A layer asks in every step.
def _are_places_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two numbers of a tensor lie in one place: each stride steps over all that the smaller
    ones reach. Strides that interleave otherwise are of no layout, and count as not apart."""
    reach = 0
    for stride, size in sorted((x, n) for x, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def check_places(layer_name: str, kv_cache: torch.Tensor) -> None:
    """Whether a cache has a place for each of its numbers, which an expanded one has not.

    Raises:
        BatchError: what is written to a block would be written to others too.
    """
    if not _are_places_apart(kv_cache.shape, kv_cache.stride()):
        raise BatchError(
            f"layer {layer_name} got a cache of shape {tuple(kv_cache.shape)} and strides "
            f"{kv_cache.stride()}, whose blocks or tokens lie in each other's memory; give one that has "
            "memory for all of them"
        )


def allocate_old_generation(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    num_blocks: int,
    kv_cache_dtype: str,
    device: torch.device,
) -> tuple[torch.Tensor, int] | None:
    """The tensor an older backend asks for by `get_kv_cache_shape`; None for a current one.

    Returns:
        A tensor of the promised shape that lies in memory in `get_kv_cache_stride_order`, and which
        of its dimensions counts blocks.

    Raises:
        CacheError: the stride order is no permutation of the shape's dimensions, or not exactly one
            of these grows with the number of blocks.
    """

    def shape_of(blocks: int) -> tuple[int, ...]:
        return tuple(
            backend.get_kv_cache_shape(
                blocks, spec.block_size, spec.num_kv_heads, spec.head_size, kv_cache_dtype
            )
        )

    try:
        shape = shape_of(num_blocks)
    except NotImplementedError:
        return None
    grown = shape_of(num_blocks + 1)
    block_dims = [dim for dim, size in enumerate(shape) if size != grown[dim]]
    if len(block_dims) != 1:
        raise CacheError(
            f"{backend.__name__}: a cache of {num_blocks} blocks has shape {shape} and one more makes "
            f"it {grown}; exactly one dimension must grow"
        )
    try:
        order = tuple(backend.get_kv_cache_stride_order())
    except NotImplementedError:
        order = tuple(range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        raise CacheError(
            f"{backend.__name__}: stride order {order} is not a permutation of the "
            f"{len(shape)} dimensions of its cache shape {shape}"
        )
    storage = _zeros([shape[dim] for dim in order], spec.dtype, device)
    return storage.permute([order.index(dim) for dim in range(len(shape))]), block_dims[0]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory; on a CPU such that a page takes room when it is first written.

    torch.zeros writes every byte: 4 GiB take seconds and are gone although a run uses a few pages.
    A private anonymous mapping is zero by definition. It asks for huge pages: without them a CPU
    waits for the translation of addresses, and decodes of long contexts take a third longer.

    Raises:
        CacheError: the device has no room for it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu" or num_bytes == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
            return torch.zeros(shape, dtype=dtype, device=device)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, RuntimeError) as error:  # of the system, and of torch
        raise CacheError(
            f"{num_bytes / 2**30:,.1f} GiB of pages in one piece are more than {device} gives "
            f"({error}); give fewer blocks"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel may know the word and have none.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _check_alignment(spec: AttentionSpec) -> None:
    """Whether blocks that lie page after page begin where the spec wants them to.

    Raises:
        CacheError: they would not.
    """
    if spec.block_stride_alignment is None:
        return
    num_tokens = spec.block_stride_alignment.base
    if spec.page_size_bytes * spec.block_size % (num_tokens * spec.unpadded_page_size_bytes):
        unit = num_tokens * spec.unpadded_page_size_bytes // spec.block_size
        raise CacheError(
            f"pages of {spec.page_size_bytes} bytes are no multiple of {unit}, the bytes of the "
            f"{num_tokens} tokens in block_stride_alignment; give a block_size that is one, or "
            "page_size_padded"
        )


def _page(spec: AttentionSpec) -> tuple[int, int, int, torch.dtype]:
    return spec.head_slots, spec.num_states, spec.content_size, spec.dtype


def _views(
    specs: Sequence[AttentionSpec], num_blocks: int, layout: KVCacheLayout, device: torch.device
) -> list[torch.Tensor]:
    """One piece of memory, seen through each spec."""
    first = specs[0]
    order = [dim - 1 for dim in layout.value[1:]]
    if all(_page(s) == _page(first) and s.page_size_padded is None for s in specs):
        shape = (num_blocks, *_page(first)[:3])
        memory = _zeros([shape[dim] for dim in order], first.dtype, device)
        return [memory.permute([order.index(dim) for dim in range(4)])] * len(specs)
    page_bytes = first.page_size_bytes
    if not layout.is_block_contiguous or any(page_bytes % s.dtype.itemsize for s in specs):
        raise CacheError(
            f"pages of {page_bytes} bytes that are padded or seen in several shapes need layout HND "
            f"or NHD and whole elements, but the layout is {layout.name}"
        )
    memory = _zeros([num_blocks * page_bytes], torch.uint8, device)
    return [_view(memory, spec, num_blocks, order) for spec in specs]


def _view(
    memory: torch.Tensor, spec: AttentionSpec, num_blocks: int, order: list[int]
) -> torch.Tensor:
    shape = (num_blocks, *_page(spec)[:3])
    strides = [spec.page_size_bytes // spec.dtype.itemsize, 0, 0, 0]
    step = 1
    for dim in reversed(order[1:]):
        strides[dim] = step
        step *= shape[dim]
    return memory.view(spec.dtype).as_strided(shape, strides)
