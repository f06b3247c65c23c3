"""Tensors for a case: seeded numbers, scattered pages, and poison wherever nobody may read.

In: a `Case`, the layer's cache spec, a device. Out: `Inputs`: q, k, v of the step, a filled cache,
a batch, and for the judge the same tokens as whole sequences.

Poison goes into every page and slot that no query of the step sees (free pages, the null block,
slots past the length, keys left of every window), into the padding rows of q, and into the slots
this step is about to write. Block-table cells past a request's length name pages of poison
and pages of other requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attnkit.batch import make_batch
from attnkit.conformance.case import Case
from attnkit.conformance.pages import (
    PLAIN_NAMES,
    Pages,
    as_cached,
    fill_context,
    make_cache,
    poison_pages,
)
from attnkit.conformance.sequences import Tokens, WholeSequence, meaning_of, random_tokens
from attnkit.conformance.step import make_step, step_tensors
from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    CommonAttentionMetadata,
    kv_cache_torch_dtype,
)
from attnkit.kvcache.formats import cache_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a case is run with.

    Attributes:
        query: (num_tokens + padding, num_heads, head_size).
        key, value: of the step; not to be written for cross attention, whose keys are in the cache
            already.
        kv_cache: (num_blocks, num_kv_heads, block_size, C), C being head_size + head_size_v unless
            the cache format has codes. Empty for types without a cache.
        other_cache: cache of another layer in the same memory, where the layout interleaves them.
        batch: the step.
        sequences: per real request.
        first_block: pages below this one, the null block aside, are not part of the case.
    """

    case: Case
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    other_cache: torch.Tensor | None
    batch: CommonAttentionMetadata
    sequences: tuple[WholeSequence, ...]
    first_block: int

    @property
    def is_logical(self) -> bool:
        """The cache has the contract's shape, not one of an older backend's own."""
        return _is_logical(self.case, self.kv_cache)

    def cache_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the null block and of all pages of the case."""
        return self.kv_cache[:1], self.kv_cache[max(1, self.first_block) :]


def make_inputs(
    case: Case,
    spec: AttentionSpec | None,
    device: torch.device | str = "cpu",
    *,
    poison: float = math.nan,
    page_seed: int = 0,
    tokens: Sequence[Tokens] | None = None,
    backend: type[AttentionBackend] | None = None,
) -> Inputs:
    """Build a case's tensors.

    Args:
        case: what to build.
        spec: what the layer keeps; None for types without a cache.
        device: where the tensors live.
        poison: what stands where nothing may be read; anything but NaN is clamped to the dtype.
        page_seed: other values give other pages and free pages, and the same numbers.
        tokens: per request, instead of random numbers.
        backend: asked for a score of its own, and for a cache shape, which older ones have. Such a cache
            is all poison: only the backend knows how to put the context there (`context_of`).
    """
    if tokens is None:
        tokens = random_tokens(case, np.random.default_rng(case.seed))
    own = None if backend is None else backend.own_score
    sequences = [
        WholeSequence(q=t.q, k=t.k, v=t.v, meaning=meaning_of(case, request, own))
        for request, t in enumerate(tokens)
    ]
    query, key, value = step_tensors(case, sequences, poison)
    pages = Pages(case, np.random.default_rng((case.seed, page_seed)))
    device = torch.device(device)
    kv_cache, other = torch.empty(0, device=device), None
    if not case.is_cacheless:
        assert spec is not None
        kv_cache, other = make_cache(case, spec, pages, device, backend)
        if _is_logical(case, kv_cache):
            fill_context(case, sequences, pages, kv_cache, poison)
        else:
            poison_pages(kv_cache, poison)
        if other is not None:
            other.fill_(7.0)
    return Inputs(
        case=case,
        query=query.to(device),
        key=key.to(device),
        value=value.to(device),
        kv_cache=kv_cache,
        other_cache=other,
        batch=make_step(case, pages, device),
        sequences=tuple(as_cached(case, s) for s in sequences),
        first_block=case.first_block,
    )


def context_of(inputs: Inputs) -> Inputs | None:
    """The step before this one, which puts every request's context into its pages; None if there is
    no context."""
    case = inputs.case
    contexts = [max(0, s - q) for q, s in zip(case.query_lens, case.seq_lens, strict=True)]
    if not any(contexts):
        return None
    table = inputs.batch.block_table_tensor.tolist()
    # Pages of a shared prefix are written by the first request that has them.
    written, starts = 0, []
    for n in contexts:
        starts.append(min(n, written))
        written = max(written, min(n, case.shared_blocks * case.block_size))
    batch = make_batch(
        [n - start for n, start in zip(contexts, starts, strict=True)],
        contexts,
        [row[: -(-n // case.block_size)] for row, n in zip(table, contexts, strict=False)],
        case.block_size,
        device=inputs.query.device,
    )
    k, v = (
        torch.cat(
            [
                getattr(s, name)[start:n]
                for s, start, n in zip(inputs.sequences, starts, contexts, strict=True)
            ]
        )
        for name in ("k", "v")
    )
    query = torch.zeros(len(k), *inputs.query.shape[1:], dtype=case.dtype)
    return replace(
        inputs,
        query=query.to(inputs.query.device),
        key=k.to(inputs.query),
        value=v.to(inputs.query),
        batch=batch,
    )


def _is_logical(case: Case, kv_cache: torch.Tensor) -> bool:
    page = (case.num_kv_heads, case.block_size)
    dtype = kv_cache_torch_dtype(case.kv_cache_dtype, case.dtype)
    stored = case.stored if case.kv_cache_dtype != "auto" else cache_format(PLAIN_NAMES[dtype])
    num_bytes = stored.layout(case.head_size, case.value_size).num_bytes
    content = kv_cache.shape[-1] * kv_cache.element_size()
    return kv_cache.shape[1:3] == page and content == num_bytes
