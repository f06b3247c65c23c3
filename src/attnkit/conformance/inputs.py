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
import numpy.typing as npt
import torch

from attnkit.batch import make_batch
from attnkit.conformance.budget import Budget, budget_for
from attnkit.conformance.case import Case
from attnkit.conformance.oracle import Answer, Array, Meaning, attend, visible
from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    CommonAttentionMetadata,
    kv_cache_torch_dtype,
)
from attnkit.kvcache.formats import cache_format
from attnkit.kvcache.pool import PagedKVCache

UNWRITTEN = 1234.0
"""In rows of key and value whose slot is -1."""

LAYER = "layer"
_OTHER_LAYER = "other"
_PLAIN_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_SPARE = 3
"""Free pages beside the used ones, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One request's tensors as the model makes them, on the CPU, in the layer's dtype.

    Attributes:
        q: (q_len, num_heads, head_size).
        k: (kv_len, num_kv_heads, head_size).
        v: (kv_len, num_kv_heads, head_size_v).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSequence(Tokens):
    """One request as the judge sees it: k and v in the dtype of the cache they are read back from.

    Attributes:
        meaning: score and mask.
    """

    meaning: Meaning

    def expected(self) -> tuple[Answer, Budget]:
        """The oracle's answer for the request and how far from it a backend may be."""
        answer = attend(float64(self.q), float64(self.k), float64(self.v), self.meaning)
        return answer, budget_for(self.q, self.k, self.v, self.meaning, answer)


def float64(x: torch.Tensor) -> Array:
    """A tensor as the oracle takes it."""
    return x.double().cpu().numpy()


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


def alibi_slopes(case: Case) -> list[float] | None:
    """One distinct slope per head, geometric as in the paper (arXiv 2108.12409), from 1/2 down."""
    if not case.alibi:
        return None
    return [2.0 ** -(8.0 * (h + 1) / case.num_heads) * 8 for h in range(case.num_heads)]


def sink_logits(case: Case) -> list[float] | None:
    """One distinct logit per head: from small to larger than most scores, and in layers of four
    heads and more one that adds nothing and one whose exponential overflows float32."""
    if not case.sinks:
        return None
    sinks = [-1.0 + 4.0 * h / max(1, case.num_heads - 1) for h in range(case.num_heads)]
    if case.num_heads >= 4:
        sinks[0], sinks[-1] = -math.inf, 120.0
    return sinks


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


def meaning_of(case: Case, request: int) -> Meaning:
    """What the layer means for one request of the case."""
    return Meaning(
        scale=case.softmax_scale,
        causal=case.is_causal(request),
        window=case.sliding_window,
        soft_cap=case.logits_soft_cap,
        alibi_slopes=alibi_slopes(case),
        alibi_sqrt=case.alibi_sqrt,
        sinks=sink_logits(case),
        ranges=case.ranges_of(request),
        prefix=case.prefix_of(request),
        chunk=case.attention_chunk_size,
        parents=case.parents_of(request) or None,
    )


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
        backend: asked for a cache shape of its own, which older ones have. Such a cache is all
            poison: only the backend knows how to put the context there (`context_of`).
    """
    if tokens is None:
        tokens = _random_tokens(case, np.random.default_rng(case.seed))
    sequences = [
        WholeSequence(q=t.q, k=t.k, v=t.v, meaning=meaning_of(case, request))
        for request, t in enumerate(tokens)
    ]
    query, key, value = _step_tensors(case, sequences, poison)
    pages = _Pages(case, np.random.default_rng((case.seed, page_seed)))
    device = torch.device(device)
    kv_cache, other = torch.empty(0, device=device), None
    if not case.is_cacheless:
        assert spec is not None
        kv_cache, other = _cache(case, spec, pages, device, backend)
        if _is_logical(case, kv_cache):
            _fill(case, sequences, pages, kv_cache, poison)
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
        batch=_batch(case, pages, device),
        sequences=tuple(_as_cached(case, s) for s in sequences),
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
    stored = case.stored if case.kv_cache_dtype != "auto" else cache_format(_PLAIN_NAMES[dtype])
    num_bytes = stored.layout(case.head_size, case.value_size).num_bytes
    content = kv_cache.shape[-1] * kv_cache.element_size()
    return kv_cache.shape[1:3] == page and content == num_bytes


def _random_tokens(case: Case, rng: np.random.Generator) -> list[Tokens]:
    """Random tokens per request; shared pages hold the same tokens in all."""

    def draw(*shape: int, gain: float = 1.0) -> torch.Tensor:
        numbers = rng.standard_normal(shape).astype(np.float32) * np.float32(gain)
        return torch.from_numpy(numbers).to(case.dtype)

    heads, size, size_v = case.num_kv_heads, case.head_size, case.value_size
    shared = case.shared_blocks * case.block_size
    k_shared, v_shared = draw(shared, heads, size), draw(shared, heads, size_v)
    result = []
    for q_len, kv_len in zip(case.query_lens, case.seq_lens, strict=True):
        q = draw(q_len, case.num_heads, case.query_size, gain=case.query_gain)
        k = draw(kv_len, heads, size, gain=case.value_gain if case.is_latent else 1.0)
        v = draw(kv_len, heads, size_v, gain=case.value_gain)
        common = min(shared, kv_len)
        k[:common], v[:common] = k_shared[:common], v_shared[:common]
        result.append(Tokens(q=q, k=k, v=v))
    return result


def _step_tensors(
    case: Case, sequences: Sequence[WholeSequence], poison: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of the step, packed. Padding rows of q hold poison. Rows of k and v that are written
    nowhere hold a number that stands nowhere else: it shows if it is written over poison."""
    num_rows = case.num_tokens + case.padding_tokens
    query = torch.full(
        (num_rows, case.num_heads, case.query_size), _poison(case.dtype, poison), dtype=case.dtype
    )
    key = torch.full((num_rows, case.num_kv_heads, case.head_size), UNWRITTEN, dtype=case.dtype)
    value = torch.full((num_rows, case.num_kv_heads, case.value_size), UNWRITTEN, dtype=case.dtype)
    row = 0
    for s in sequences:
        end, new = row + s.q.shape[0], min(s.q.shape[0], s.k.shape[0])
        query[row:end] = s.q
        if new and not _is_cross(case):
            key[end - new : end], value[end - new : end] = s.k[-new:], s.v[-new:]
        row = end
    return query, key, value


class _Pages:
    """Which pages a case's requests own: scattered, unordered, never starting at block 0."""

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


def _cache(
    case: Case,
    spec: AttentionSpec,
    pages: _Pages,
    device: torch.device,
    backend: type[AttentionBackend] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
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


def _fill(
    case: Case,
    sequences: Sequence[WholeSequence],
    pages: _Pages,
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


def poison_pages(pages: torch.Tensor, poison: float) -> None:
    """Fill pages with a number, or, where they hold codes, with bytes that read as something like it:
    NaN, infinity or very large in codes and in scales, or zero."""
    if pages.dtype in _PLAIN_NAMES:
        pages.fill_(_poison(pages.dtype, poison))
        return
    code = 0xFF if math.isnan(poison) else 0x7C if math.isinf(poison) else 0x7E if poison else 0
    pages.view(torch.uint8).fill_(code)


def _seen(case: Case, request: int) -> npt.NDArray[np.bool_]:
    """Bool (kv_len,): in the cache before this step, and seen by some query of it."""
    q_len, kv_len = case.query_lens[request], case.seq_lens[request]
    keys = np.arange(kv_len, dtype=np.int64)
    queries = kv_len - q_len + np.arange(q_len, dtype=np.int64)
    seen = np.any(visible(queries, keys, meaning_of(case, request)), axis=0)
    if case.attn_type is AttentionType.ENCODER_DECODER:
        return seen
    return seen & (keys < kv_len - q_len)


def _batch(case: Case, pages: _Pages, device: torch.device) -> CommonAttentionMetadata:
    """The batch, written out by hand: it may say what `make_batch` refuses (more queries than keys)."""
    num_reqs = case.num_reqs + case.padding_reqs
    padded = [0] * case.padding_reqs
    query_lens = np.array([*case.query_lens, *padded], dtype=np.int64)
    kv_lens = np.array([*case.seq_lens, *padded], dtype=np.int64)
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)

    tables = [*pages.tables, *[[] for _ in padded]]
    width = max((len(t) for t in tables), default=0) + 2
    table = np.zeros((num_reqs, width), dtype=np.int32)
    slots, positions = [], []
    for r, ids in enumerate(tables):
        table[r, : len(ids)] = ids
        if ids:
            table[r, len(ids) :] = np.resize(pages.slack[r], width - len(ids))
        first = int(kv_lens[r] - query_lens[r])
        for position in range(first, int(kv_lens[r])):
            writes = bool(ids) and position >= 0 and not _is_cross(case)
            slots.append(_slot(ids, position, case.block_size) if writes else -1)
            positions.append(max(0, position))
        if case.freed_window and ids:
            # Whole pages before the first query's window or chunk.
            if (chunk := case.attention_chunk_size) is not None:
                gone = max(0, first) // chunk * chunk // case.block_size
            else:
                assert case.sliding_window is not None
                gone = max(0, first - case.sliding_window + 1) // case.block_size
            kept = -(-case.prefix_of(r) // case.block_size) if r < case.num_reqs else 0
            table[r, min(kept, len(ids)) : min(gone, len(ids))] = 0
    slots += [-1] * case.padding_tokens
    positions += [0] * case.padding_tokens

    def up(values: np.ndarray | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)

    causal: bool | torch.Tensor
    if isinstance(case.causal, tuple):
        causal = torch.tensor([*case.causal, *[True] * case.padding_reqs]).to(device)
    else:
        causal = case.causal
    ranges = {r: list(case.ranges_of(r)) for r in range(case.num_reqs)}
    prefixes = [case.prefix_of(r) for r in range(case.num_reqs)] + padded
    words = np.zeros(len(slots), dtype=np.int64)
    for r, start in enumerate(query_start_loc[: case.num_reqs]):
        for i, parent in enumerate(case.parents_of(r)):
            above = words[start + parent] if parent >= 0 else 0
            words[start + i] = above | np.left_shift(np.int64(1), i)
    cross = _is_cross(case)
    # A decoder's own lengths are no guide to what cross attention sees.
    seq_lens = query_lens + 3 * (query_lens > 0) if cross else kv_lens
    slack = 37 if case.padding_reqs else 0
    return CommonAttentionMetadata(
        query_start_loc=up(query_start_loc, torch.int32),
        query_start_loc_cpu=torch.from_numpy(query_start_loc),
        seq_lens=up(seq_lens, torch.int32),
        num_reqs=num_reqs,
        num_actual_tokens=case.num_tokens,
        max_query_len=int(query_lens.max(initial=0)),
        # An upper bound is allowed, so give one where the batch is padded.
        max_seq_len=int(seq_lens.max(initial=0)) + slack,
        block_table_tensor=up(table, torch.int32),
        slot_mapping=up(slots, torch.int64),
        causal=causal,
        encoder_seq_lens=up(kv_lens, torch.int32) if cross else None,
        encoder_seq_lens_cpu=kv_lens.astype(np.int32) if cross else None,
        positions=up(positions, torch.int64),
        is_prefilling=torch.from_numpy((query_lens == seq_lens) & (query_lens > 0)),
        seq_lens_cpu_upper_bound=torch.as_tensor(seq_lens, dtype=torch.int32),
        mm_req_doc_ranges=ranges if case.mm_prefix else None,
        rswa_prefix_lens=up(prefixes, torch.int32) if case.rswa else None,
        tree_mask=up(words, torch.int64) if case.tree else None,
    )


def _is_cross(case: Case) -> bool:
    return case.attn_type is AttentionType.ENCODER_DECODER


def _slot(ids: Sequence[int], position: int, block_size: int) -> int:
    return ids[position // block_size] * block_size + position % block_size


def _as_cached(case: Case, s: WholeSequence) -> WholeSequence:
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


def _poison(dtype: torch.dtype, value: float) -> float:
    """`value`, or the largest of the dtype where that is less (infinities and NaN stay)."""
    return value if not math.isfinite(value) else min(value, torch.finfo(dtype).max)
