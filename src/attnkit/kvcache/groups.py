"""KVCachePlan: which layers share block tables, which share memory, and how many blocks fit.

In: one `KVCacheSpec` per layer. Out: groups of layers with equal specs. In a model of several kinds
(say five sliding-window layers to one full) every group has the same number of layers, and layer j of
each group lies over the same memory: a block id belongs to one group at a time, so one pool of ids
serves them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from attnkit.contract import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.retention import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that read the same block table.

    Attributes:
        layer_names: in the order of their storages; the last group of a kind may have fewer.
        spec: of each of them, with the block size that makes pages of all groups equal.
        companions: names and specs of what is kept beside these layers under the same block table, with
            as many tokens in a block and bytes of its own.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    companions: tuple[tuple[str, KVCacheSpec], ...] = ()

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """Name -> spec of all that lies under its block table."""
        return {**dict.fromkeys(self.layer_names, self.spec), **dict(self.companions)}

    @property
    def retention(self) -> Retention:
        """How long the group needs a page.

        Raises:
            ConfigurationError: block tables are not managed for this kind of spec.
        """
        spec = self.spec
        if isinstance(spec, SlidingWindowSpec):
            return Retention(block_size=spec.block_size, sliding_window=spec.sliding_window)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return Retention(
                block_size=spec.block_size, attention_chunk_size=spec.attention_chunk_size
            )
        if isinstance(spec, RSWASpec):
            return Retention(
                block_size=spec.block_size, sliding_window=spec.rswa_window, keeps_prefix=True
            )
        if isinstance(spec, CrossAttentionSpec):
            return Retention(block_size=spec.block_size, follows_encoder=True)
        if isinstance(spec, FullAttentionSpec):
            return Retention(block_size=spec.block_size)
        raise ConfigurationError(
            f"block tables of {spec.kind} layers ({', '.join(self.layer_names)}) are not managed here; "
            "full, sliding-window, chunked local and cross attention are"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCachePlan:
    """All groups of a model over one pool of block ids.

    Attributes:
        groups: in the order in which their first layers came; empty where no layer keeps anything.
        storages: per piece of memory, the layers that lie over it: `overlays` of `PagedKVCache`.
            Companions lie alone, and so do layers whose backends shape their own caches.
    """

    groups: tuple[KVCacheGroup, ...]
    storages: tuple[tuple[str, ...], ...]

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> spec, with unified block sizes."""
        return {name: spec for group in self.groups for name, spec in group.specs.items()}

    @property
    def retentions(self) -> tuple[Retention, ...]:
        """One per group, for `BlockManager`."""
        return tuple(group.retention for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block id stands for, over all storages."""
        specs = self.specs
        return sum(specs[names[0]].page_size_bytes for names in self.storages)

    def num_blocks(self, num_bytes: int) -> int:
        """Blocks that fit into a budget, the null block included.

        Raises:
            CacheError: fewer than 2 fit.
        """
        assert self.storages, "a model that keeps nothing has no blocks"
        num_blocks = num_bytes // self.block_bytes
        if num_blocks < 2:
            raise CacheError(
                f"{num_bytes} bytes hold {num_blocks} blocks of {self.block_bytes} bytes (all "
                f"layers); give at least {2 * self.block_bytes}: one page beside the null block"
            )
        return num_blocks

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks one request holds at once, over all groups; arguments as `KVCacheSpec`'s."""
        return sum(g.spec.max_num_blocks(max_model_len, max_in_flight_tokens) for g in self.groups)


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    companions: Mapping[str, tuple[str, KVCacheSpec]] | None = None,
    alone: Collection[str] = (),
) -> KVCachePlan:
    """Group the layers of a model.

    Layers that keep nothing between steps (encoder-only) are in no group. Layers that read another's
    cache have no spec and take the group of that layer.

    Args:
        specs: layer name -> spec, in the model's order.
        companions: layer name -> name and spec of what is kept beside it, of the same tokens; the pages
            of both need not be equal. None: nothing.
        alone: layers whose backends shape their own caches, which `PagedKVCache` overlays with nothing.

    Raises:
        ConfigurationError: pages of different kinds cannot be made equal.
    """
    kept = {n: s for n, s in specs.items() if not isinstance(s, EncoderOnlyAttentionSpec)}
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in _unify_pages(kept).items():
        kinds.setdefault(spec, []).append(name)
    if not kinds:
        return KVCachePlan(groups=(), storages=())
    size = _group_size([len(names) for names in kinds.values()])
    groups = tuple(
        _group(spec, tuple(names[i : i + size]), companions or {})
        for spec, names in kinds.items()
        for i in range(0, len(names), size)
    )
    over = [[g.layer_names[j] for g in groups if j < len(g.layer_names)] for j in range(size)]
    over = [[name for name in names if name not in alone] for names in over]
    over += [[name] for name in kept if name in alone]
    over += [[name] for group in groups for name, _ in group.companions]
    return KVCachePlan(groups=groups, storages=tuple(tuple(names) for names in over if names))


def _group(
    spec: KVCacheSpec,
    layer_names: tuple[str, ...],
    companions: Mapping[str, tuple[str, KVCacheSpec]],
) -> KVCacheGroup:
    beside = [companions[name] for name in layer_names if name in companions]
    return KVCacheGroup(
        layer_names=layer_names,
        spec=spec,
        companions=tuple((n, s.copy_with_new_block_size(spec.block_size)) for n, s in beside),
    )


def _group_size(num_layers: list[int]) -> int:
    """Layers per group, from the number of layers of each kind.

    The smallest kind sets it, so that its group has no empty places. Where the kinds are nearly equal
    the largest does: a few empty places cost less than one more group in every step (the rule and its
    bound of a quarter are vLLM's).
    """
    smallest, largest = min(num_layers), max(num_layers)
    return largest if largest < 1.25 * smallest else smallest


def _unify_pages(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The same layers with pages of equal bytes: smaller pages get more tokens."""
    if not specs:
        return {}
    biggest = max(specs, key=lambda name: specs[name].page_size_bytes)
    page = specs[biggest].page_size_bytes
    unified = {}
    for name, spec in specs.items():
        ratio, rest = divmod(page, spec.page_size_bytes)
        # Padding does not grow with the block.
        is_padded = getattr(spec, "page_size_padded", None) is not None
        if rest or (ratio > 1 and is_padded):
            raise ConfigurationError(
                f"layers {name} and {biggest} cannot share a pool: their pages of "
                f"{spec.page_size_bytes} and {page} bytes ({_describe(spec)}; "
                f"{_describe(specs[biggest])}) cannot be made equal by a whole number of tokens more; "
                "choose block sizes whose pages divide each other, or set page_size_padded of both"
            )
        unified[name] = spec.copy_with_new_block_size(spec.block_size * ratio)
    return unified


def _describe(spec: KVCacheSpec) -> str:
    text = f"{spec.kind}, block_size {spec.block_size}"
    if isinstance(spec, AttentionSpec):
        text += f", {spec.num_kv_heads} heads of {spec.head_size}, {spec.dtype}"
    return text
