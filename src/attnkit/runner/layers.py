"""Layers for a model's attention modules, from what the probe has found out about these.

In: `LayerFacts` of a module, and what all layers of a model share. Out: an `attnkit.Attention`, or an
`attnkit.MLAAttention` where the module expands latents and no backend for keys and values is named.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from attnkit.backends.wrappers import cross_attention
from attnkit.contract import AttentionBackend, AttentionType, VllmConfig
from attnkit.indexer import LightningIndexer
from attnkit.paged_layer import PagedLayer
from attnkit.runner import hook
from attnkit.runner.discovery import LayerFacts
from attnkit.runner.indexers import IndexerFacts, make_indexer
from attnkit.runner.latents import LatentFacts
from attnkit.selection import Choose, find_named, select


class LayerMaker:
    """Makes the layers of one model, and chooses once for all that ask alike."""

    def __init__(
        self,
        *,
        backend: str | type[AttentionBackend],
        device: torch.device,
        use_kv_connector: bool,
        use_batch_invariant: bool,
        index_cache_dtype: str,
        takes_ranges: bool,
    ) -> None:
        """
        Args:
            backend: as in `attnkit.Attention`.
            device: where the model is.
            use_kv_connector: pages will be copied out of and into the cache.
            use_batch_invariant: as in `attnkit.Attention`.
            index_cache_dtype: what indexers' keys are stored as.
            takes_ranges: prompts will come whose tokens see each other by type.

        Raises:
            BackendError: there is no such backend.
        """
        self._backend, self._device = backend, device
        self._asked: dict[str, Any] = {
            "use_kv_connector": use_kv_connector,
            "use_batch_invariant": use_batch_invariant,
        }
        self._index_cache_dtype = index_cache_dtype
        self._takes_ranges = takes_ranges
        self._keeps_latents = serves_latents(backend, use_batch_invariant=use_batch_invariant)
        self._choose: Choose = functools.cache(select)
        self._lists: dict[tuple[int, int], torch.Tensor] = {}

    def make(
        self, fact: LayerFacts, block_size: int, config: VllmConfig
    ) -> hook.ModelLayer | hook.ModelLatentLayer:
        """One layer.

        Args:
            fact: what its module is.
            block_size: tokens in a kernel block.
            config: handed to its builder.

        Raises:
            BackendError: no backend can serve it.
        """
        if fact.latent is not None and (fact.indexer is not None or self._keeps_latents):
            return self._latent(fact, fact.latent, block_size, config)
        if fact.attn_type is AttentionType.ENCODER_DECODER:
            # To the backend underneath it is a batch without causality.
            chosen = self._dense(fact, self._backend, block_size, config, use_non_causal=True)
            crossing = cross_attention(chosen.backend)
            layer = self._dense(fact, crossing, block_size, config, fact.attn_type)
        else:
            layer = self._dense(fact, self._backend, block_size, config, fact.attn_type)
        layer.temperature = fact.temperature
        return layer

    def _latent(
        self, fact: LayerFacts, latent: LatentFacts, block_size: int, config: VllmConfig
    ) -> hook.ModelLatentLayer:
        chooser = None
        if fact.indexer is not None:
            chooser = self._chooser(fact, fact.indexer, block_size, config)
        layer = hook.ModelLatentLayer(
            fact.num_heads,
            latent.dimensions,
            latent.kv_b_proj,
            fact.scale,
            dtype=fact.dtype,
            device=self._device,
            backend=self._backend,
            layer_name=fact.name,
            block_size=block_size,
            indexer=None if chooser is None else chooser.indexer,
            vllm_config=config,
            choose=self._choose,
            **self._asked,
        )
        layer.chooser = chooser
        return layer

    def _chooser(
        self, fact: LayerFacts, facts: IndexerFacts, block_size: int, config: VllmConfig
    ) -> hook.ModelIndexer:
        """Of the keys of a sparse layer. Layers run in turn, so they share their lists."""
        scheduler = config.scheduler_config
        rows = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        shape = (rows, facts.topk_tokens)
        if shape not in self._lists:
            self._lists[shape] = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        ours = make_indexer(
            f"{fact.name}.indexer",
            facts,
            self._lists[shape],
            kv_cache_dtype=self._index_cache_dtype,
            dtype=fact.dtype,
            block_size=block_size,
            backend=self._backend,
        )
        return hook.ModelIndexer(facts, ours)

    def _dense(
        self,
        fact: LayerFacts,
        backend: str | type[AttentionBackend],
        block_size: int,
        config: VllmConfig,
        attn_type: AttentionType = AttentionType.DECODER,
        *,
        use_non_causal: bool = False,
    ) -> hook.ModelLayer:
        return hook.ModelLayer(
            fact.num_heads,
            fact.head_size,
            fact.scale,
            fact.num_kv_heads,
            alibi_slopes=fact.alibi_slopes,
            sliding_window=fact.sliding_window,
            attention_chunk_size=fact.attention_chunk_size,
            logits_soft_cap=fact.logits_soft_cap,
            sinks=fact.sinks,
            head_size_v=fact.head_size_v,
            attn_type=attn_type,
            use_non_causal=use_non_causal,
            use_mm_prefix=self._takes_ranges,
            dtype=fact.dtype,
            device=self._device,
            backend=backend,
            layer_name=fact.name,
            block_size=block_size,
            vllm_config=config,
            choose=self._choose,
            **self._asked,
        )


def indexers_of(layers: Mapping[str, PagedLayer]) -> dict[str, LightningIndexer]:
    """Layer name -> who chooses its keys."""
    return {
        name: layer.chooser.indexer
        for name, layer in layers.items()
        if isinstance(layer, hook.ModelLatentLayer) and layer.chooser is not None
    }


def serves_latents(
    backend: str | type[AttentionBackend], *, use_batch_invariant: bool = False
) -> bool:
    """Layers that may keep latents do, unless somebody names a backend for keys and values, or names
    none and asks for the batch invariance that some of those promise and none of ours over latents.

    Raises:
        BackendError: there is no such backend.
    """
    named = find_named(backend, here=False)
    return not use_batch_invariant if named is None else named.is_mla()


def takes_ranges(fact: LayerFacts, backend: str | type[AttentionBackend]) -> bool:
    """Layers whose tokens may see each other by type are built for it, unless somebody names a backend
    that does not do it: with that one they run prompts without types.

    Raises:
        BackendError: there is no such backend.
    """
    named = find_named(backend, here=False)
    return fact.token_types is not None and (named is None or named.supports_mm_prefix())
