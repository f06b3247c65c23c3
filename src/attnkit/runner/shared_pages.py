"""Pages that every backend of a model reads: how large its kernels' blocks are, and in which layout.

In: the plan of a cache and the layers that use it. Out: a number, a layout, the memory, or an error that
names who reads what.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from attnkit.contract import AttentionBackend, KVCacheLayout, MultipleOf
from attnkit.errors import ConfigurationError
from attnkit.kvcache.groups import KVCachePlan
from attnkit.kvcache.pool import PagedKVCache
from attnkit.paged_layer import PagedLayer


class PagedModel(Protocol):
    """Layers over pages, whose steps are planned together.

    Attributes:
        layers: by name, in the order of the forward pass.
        kv_plan: what they keep in the cache, and which of them share a block table.
        blocks_per_block: kernel blocks in a page.
        device: where they run.
    """

    @property
    def layers(self) -> Mapping[str, PagedLayer]: ...

    @property
    def kv_plan(self) -> KVCachePlan: ...

    @property
    def blocks_per_block(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, num_blocks: int) -> PagedKVCache:
        """Memory for `num_blocks` pages of every layer, the null block included."""
        ...


def blocks_per_block(plan: KVCachePlan, layers: Mapping[str, PagedLayer]) -> int:
    """Into how few kernel blocks a page must be split for every layer's kernels to read them."""
    pairs = {(plan.specs[name].block_size, layer.backend) for name, layer in layers.items()}
    for ratio in range(1, min(size for size, _ in pairs) + 1):
        if all(size % ratio == 0 and _reads(b, size // ratio) for size, b in pairs):
            return ratio
    named = ", ".join(
        f"pages of {size} tokens for {b.get_name()}, whose kernels read "
        f"{' or '.join(map(str, b.get_supported_kernel_block_sizes()))}"
        for size, b in sorted(pairs, key=lambda pair: (pair[0], pair[1].get_name()))
    )
    raise ConfigurationError(f"no kernel block size fits: {named}; choose another block_size")


def common_layout(backends: set[type[AttentionBackend]]) -> KVCacheLayout:
    """A layout that all of them read and that keeps layers apart.

    Raises:
        ConfigurationError: there is none.
    """
    asked = {b.get_name(): b.supported_kv_cache_layouts() for b in backends}
    limited = {name: layouts for name, layouts in asked.items() if layouts is not None}
    order = next(iter(limited.values()), (KVCacheLayout.LBHNC,))
    for layout in order:
        if layout.is_layer_compact and all(layout in layouts for layouts in limited.values()):
            return layout
    named = "; ".join(f"{n}: {', '.join(x.name for x in ls)}" for n, ls in limited.items())
    raise ConfigurationError(
        f"the chosen backends have no KV cache layout in common that keeps layers apart ({named}); "
        "choose one backend for all layers"
    )


def allocate_pages(
    plan: KVCachePlan,
    layers: Mapping[str, PagedLayer],
    blocks_per_block: int,
    device: torch.device,
    num_blocks: int,
    *,
    poison: bool = False,
) -> PagedKVCache:
    """Memory for `num_blocks` pages of every layer, in a layout all backends can read.

    Args:
        plan: of the cache.
        layers: that use it.
        blocks_per_block: kernel blocks in a page.
        device: where they run.
        num_blocks: the null block included.
        poison: fill pages with NaN (see `PagedKVCache`).

    Raises:
        ConfigurationError: the layers' backends have no layout in common.
    """
    backends = {name: layer.backend for name, layer in layers.items()}
    first = next(iter(plan.specs.values()))
    return PagedKVCache(
        plan.specs,  # type: ignore[arg-type]
        num_blocks,
        device=device,
        layout=common_layout(set(backends.values())),
        kernel_block_size=first.block_size // blocks_per_block,
        overlays=plan.storages,
        backends=backends,
        poison=poison,
    )


def _reads(backend: type[AttentionBackend], size: int) -> bool:
    sizes = backend.get_supported_kernel_block_sizes()
    return not sizes or any(
        size % s.base == 0 if isinstance(s, MultipleOf) else size == s for s in sizes
    )
