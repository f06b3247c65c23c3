"""Pages that every backend of a model reads: how large its kernels' blocks are, and in which layout.

In: the plan of a cache and the layers that use it. Out: a number, a layout, or an error that names who
reads what.
"""

from __future__ import annotations

from collections.abc import Mapping

from attnkit.contract import AttentionBackend, KVCacheLayout, MultipleOf
from attnkit.errors import ConfigurationError
from attnkit.kvcache.groups import KVCachePlan
from attnkit.paged_layer import PagedLayer


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


def _reads(backend: type[AttentionBackend], size: int) -> bool:
    sizes = backend.get_supported_kernel_block_sizes()
    return not sizes or any(
        size % s.base == 0 if isinstance(s, MultipleOf) else size == s for s in sizes
    )
