"""Pages of a case: scattered, filled with what queries see, and poison wherever nobody may read.

In: a `Case` and its sequences. Out: a cache, and which pages each request owns. How codes are made is
the format's; where a token goes is computed here, not by the code under judgement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from attnkit.conformance.case import Case
from attnkit.conformance.oracle import visible
from attnkit.conformance.sequences import WholeSequence, meaning_of
from attnkit.contract import AttentionBackend, AttentionSpec, AttentionType, kv_cache_torch_dtype
from attnkit.kvcache.pool import PagedKVCache

LAYER = "layer"
_OTHER_LAYER = "other"
PLAIN_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Formats that hold numbers, by their dtype."""

_SPARE = 3
"""Free pages beside the used ones, at least."""


class Pages:
    """Which pages a case's requests own: scattered, unordered, never starting at block 0.

    Attributes:
        num_blocks: of the pool, free pages included.
        tables: per request, its block ids in order.
        slack: (num_reqs, 2), ids for cells behind a request's last block.
    """

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        needs = [-(-s // case.block_size) for s in case.seq_lens]
        if case.is_cacheless:
            needs = [0] * len(needs)
        shared = min([case.shared_blocks, *[n for n in needs if n]], default=0)
        num_used = sum(needs)
        self.num_blocks = case.first_block + 2 * num_used + _SPARE + 1
        ids = case.first_block + 1 + rng.permutation(2 * num_used + _SPARE)
        taken = iter(int(i) for i in ids)
        common = [next(taken) for _ in range(shared)]
        self.tables = [
            common[:need] + [next(taken) for _ in range(need - min(shared, need))] for need in needs
        ]
        self.slack = rng.choice(ids, size=(len(needs) + case.padding_reqs, 2))


def make_cache(
    case: Case,
    spec: AttentionSpec,
    pages: Pages,
    device: torch.device,
    backend: type[AttentionBackend] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An empty cache of the layer, and that of another where the layout interleaves both."""
    specs = {LAYER: spec}
    if not case.layout.is_layer_compact:
        specs[_OTHER_LAYER] = spec
    cache = PagedKVCache(
        specs,
        pages.num_blocks,
        device=device,
        layout=case.layout,
        backends=None if backend is None else dict.fromkeys(specs, backend),
        kv_cache_dtype=case.kv_cache_dtype,
    )
    return cache[LAYER], cache[_OTHER_LAYER] if _OTHER_LAYER in specs else None


def fill_context(
    case: Case,
    sequences: Sequence[WholeSequence],
    pages: Pages,
    kv_cache: torch.Tensor,
    poison: float,
) -> None:
    """Poison everywhere, then each context token that some query of its request may see."""
    poison_pages(kv_cache[:1], poison)
    poison_pages(kv_cache[max(1, case.first_block) :], poison)
    # A shared page holds what any of its requests sees, so it is filled once for all of them.
    for request, s in enumerate(sequences):
        positions = np.flatnonzero(_seen(case, request))
        table = np.array(pages.tables[request], dtype=np.int64)
        blocks, offsets = (
            torch.from_numpy(x).to(kv_cache.device)
            for x in (table[positions // case.block_size], positions % case.block_size)
        )
        rows = torch.from_numpy(positions)
        tokens = contents(case, s.k[rows], s.v[rows]).to(kv_cache.device)
        # As bytes, since not every operation knows every 8-bit dtype.
        kv_cache.view(torch.uint8)[blocks, :, offsets] = tokens.view(torch.uint8)


def contents(case: Case, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What the cache holds of tokens: (num_tokens, num_kv_heads, C) in the cache's dtype.

    Plain formats are K and V side by side, each number rounded once. How codes are made is the
    format's; where a token goes is computed here, not by the code under judgement.
    """
    stored = case.stored
    if stored.codec is None:
        dtype = kv_cache_torch_dtype(case.kv_cache_dtype, case.dtype)
        return torch.cat([key, value], dim=-1).to(dtype)
    return stored.encode(key, value, *(scale.to(key.device) for scale in cache_scales(case)))


def as_cached(case: Case, s: WholeSequence) -> WholeSequence:
    """K and V as they are read back: through the cache's format, unless there is no cache."""
    stored = case.stored
    if case.is_cacheless:
        return s
    if stored.codec is None:
        dtype = kv_cache_torch_dtype(case.kv_cache_dtype, case.dtype)
        return replace(s, k=s.k.to(dtype), v=s.v.to(dtype))
    scales = cache_scales(case)
    k, v = stored.decode(contents(case, s.k, s.v), case.head_size, case.value_size, *scales)
    return replace(s, k=k, v=v)


def cache_scales(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's `_k_scale` and `_v_scale`: no powers of two, and different from each other; rows of
    latents have one for both parts."""
    k, v = torch.tensor(0.037), torch.tensor(0.19)
    if not case.stored.reads_layer_scales:
        return torch.ones(()), torch.ones(())
    if case.is_latent:
        return k, k
    if not case.per_head_scales:
        return k, v
    heads = 1.0 + torch.arange(case.num_kv_heads)
    return k * heads, v / heads


def poison_pages(pages: torch.Tensor, poison: float) -> None:
    """Fill pages with a number, or, where they hold codes, with bytes that read as something like it:
    NaN, infinity or very large in codes and in scales, or zero."""
    if pages.dtype in PLAIN_NAMES:
        pages.fill_(poison_of(pages.dtype, poison))
        return
    code = 0xFF if math.isnan(poison) else 0x7C if math.isinf(poison) else 0x7E if poison else 0
    pages.view(torch.uint8).fill_(code)


def poison_of(dtype: torch.dtype, value: float) -> float:
    """`value`, or the largest of the dtype where that is less (infinities and NaN stay)."""
    return value if not math.isfinite(value) else min(value, torch.finfo(dtype).max)


def _seen(case: Case, request: int) -> npt.NDArray[np.bool_]:
    """Bool (kv_len,): in the cache before this step, and seen by some query of it."""
    q_len, kv_len = case.query_lens[request], case.seq_lens[request]
    keys = np.arange(kv_len, dtype=np.int64)
    queries = kv_len - q_len + np.arange(q_len, dtype=np.int64)
    seen = np.any(visible(queries, keys, meaning_of(case, request)), axis=0)
    if case.attn_type is AttentionType.ENCODER_DECODER:
        return seen
    return seen & (keys < kv_len - q_len)
