"""The judge's own arithmetic: one request's attention in float64 on whole, contiguous sequences.

In: q, k, v of one request as numpy arrays and the meaning of the layer as plain numbers. Out: the
output, its LSE and two magnitudes from which `budget` derives how far a rounded computation may be
off. It knows no pages, no batch and no backend, and shares no code with any of them, so that a
mistake in one of those cannot hide here. `docs/semantics.md` is the law it implements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
OwnScore = Callable[[Array, int, npt.NDArray[np.int64], npt.NDArray[np.int64]], Array]
"""Arguments and answer broadcast to (q_len, kv_len)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a score is and which keys a query sees, without defaults from anywhere else.

    Attributes:
        scale: factor on q.k.
        causal: keys after the query are invisible.
        window: keys at a distance of `window` or more before the query are invisible; without
            `causal`, after it too. None: no window.
        soft_cap: c in c * tanh(score / c). None: no cap.
        alibi_slopes: per head, added as slope * (key position - query position).
        alibi_sqrt: added as -slope * sqrt(query position - key position) instead, and nothing for
            keys after the query.
        sinks: per head, a logit in the denominator that carries no value.
        ranges: (first, last) positions, both inside: a query in one sees all its keys, whatever else
            it sees.
        chunk: keys in another chunk of positions, position // chunk, are invisible. None: no chunks.
        prefix: keys below this are inside any window of a later query.
        parents: the queries are a tree: per query, which earlier one it follows, -1: none. It sees all
            keys before the first query, itself and what it follows. None: they are no tree.
        told: of the keys it sees otherwise, a query sees this many, those that the kit's rule tells it
            (`told`). None: all.
        own: what the backend makes of a score at last, before the mask: (scores, head, query positions,
            key positions) -> scores. None: nothing.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Sequence[float] | None = None
    alibi_sqrt: bool = False
    sinks: Sequence[float] | None = None
    ranges: Sequence[tuple[int, int]] = ()
    prefix: int = 0
    chunk: int | None = None
    parents: Sequence[int] | None = None
    told: int | None = None
    own: OwnScore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Float64 results for q rows and heads.

    Attributes:
        out: (q_len, num_heads, head_size_v); zero where a row sees no key.
        lse: (q_len, num_heads), natural log of the denominator; -inf where it is zero.
        sum_of_terms: (q_len, num_heads, head_size_v), sum of |weight * value|: what one relative
            error of all weights can move.
        norm_of_terms: the same shape, root of the sum of (weight * value)^2: what independent
            relative errors of the weights move.
        score_size: (q_len, num_heads), what a relative error of the arithmetic of a visible score is
            multiplied with: the largest of |capped score|, |bias|, and the norm of the products
            that q.k sums up.
    """

    out: Array
    lse: Array
    sum_of_terms: Array
    norm_of_terms: Array
    score_size: Array


def visible(
    query_positions: npt.NDArray[np.int64], key_positions: npt.NDArray[np.int64], meaning: Meaning
) -> npt.NDArray[np.bool_]:
    """Bool (q_len, kv_len): the key is seen by the query."""
    ahead = key_positions[None, :] - query_positions[:, None]
    seen = np.ones(ahead.shape, dtype=np.bool_)
    if meaning.causal:
        seen &= ahead <= 0
    if meaning.window is not None:
        in_prefix = (key_positions < meaning.prefix)[None, :] & (ahead <= 0)
        seen &= (ahead > -meaning.window) | in_prefix
        if not meaning.causal:
            seen &= ahead < meaning.window
    if meaning.chunk is not None:
        seen &= query_positions[:, None] // meaning.chunk == key_positions[None, :] // meaning.chunk
    if meaning.parents is not None:
        for query, row in enumerate(seen):
            row &= key_positions < query_positions[0]
            ancestor = query
            while ancestor >= 0:
                row |= key_positions == query_positions[ancestor]
                ancestor = meaning.parents[ancestor]
    for first, last in meaning.ranges:
        queries = (first <= query_positions) & (query_positions <= last)
        keys = (first <= key_positions) & (key_positions <= last)
        seen |= queries[:, None] & keys[None, :]
    if meaning.told is not None:
        for query, row in zip(query_positions.tolist(), seen, strict=True):
            row &= np.isin(key_positions, told(query, meaning.told))
    return seen


def own_score(
    score: Array,
    head: int,
    query_positions: npt.NDArray[np.int64],
    key_positions: npt.NDArray[np.int64],
    own: OwnScore,
) -> Array:
    """What `own` makes of one head's scores (q_len, kv_len)."""
    changed = own(score, head, query_positions[:, None], key_positions[None, :])
    return np.broadcast_to(np.asarray(changed, dtype=np.float64), score.shape)


def told(query: int, number: int) -> npt.NDArray[np.int64]:
    """Positions of the keys that a sparse layer of the kit tells a query at a position: the first ones
    of a shuffle of all up to itself, which depends on the position alone."""
    keys = np.arange(max(0, query + 1), dtype=np.int64)
    rank = (keys * 2654435761 + query * 40503) % (1 << 20)
    return keys[np.argsort(rank, kind="stable")][:number]


def attend(
    q: Array,
    k: Array,
    v: Array,
    meaning: Meaning,
    *,
    first_query: int | None = None,
    first_key: int = 0,
) -> Answer:
    """Attention of one request.

    Args:
        q: (q_len, num_heads, head_size).
        k: (kv_len, num_kv_heads, head_size); head h reads kv head h // (num_heads / num_kv_heads).
        v: (kv_len, num_kv_heads, head_size_v).
        meaning: score and mask.
        first_query: position of q[0]. None: the last query stands on the last key.
        first_key: position of k[0], for a part of a sequence.
    """
    q_len, num_heads, _ = q.shape
    kv_len, num_kv_heads, head_size_v = v.shape
    start = first_key + kv_len - q_len if first_query is None else first_query
    query_positions = start + np.arange(q_len, dtype=np.int64)
    key_positions = first_key + np.arange(kv_len, dtype=np.int64)
    seen = visible(query_positions, key_positions, meaning)

    out = np.zeros((q_len, num_heads, head_size_v))
    lse = np.full((q_len, num_heads), -np.inf)
    sum_of_terms, norm_of_terms = np.zeros_like(out), np.zeros_like(out)
    score_size = np.zeros_like(lse)
    distance = (key_positions[None, :] - query_positions[:, None]).astype(np.float64)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        score = meaning.scale * (q[:, head] @ k[:, kv_head].T)
        if meaning.soft_cap is not None:
            score = meaning.soft_cap * np.tanh(score / meaning.soft_cap)
        products = abs(meaning.scale) * np.sqrt(q[:, head] ** 2 @ (k[:, kv_head] ** 2).T)
        size = np.maximum(np.abs(score), products)
        if meaning.alibi_slopes is not None:
            slope = float(meaning.alibi_slopes[head])
            bias = slope * (
                -np.sqrt(np.maximum(-distance, 0.0)) if meaning.alibi_sqrt else distance
            )
            score = score + bias
            size = np.maximum(size, np.abs(bias))
        if meaning.own is not None:
            score = own_score(score, head, query_positions, key_positions, meaning.own)
            size = np.maximum(size, np.where(np.isfinite(score), np.abs(score), 0.0))
        sink = -np.inf if meaning.sinks is None else float(meaning.sinks[head])
        logits = np.where(seen, score, -np.inf)
        top = np.maximum(sink, logits.max(axis=1, initial=-np.inf))
        rows = top > -np.inf
        weights = np.exp(logits[rows] - top[rows, None])
        total = weights.sum(axis=1) + np.exp(sink - top[rows])
        weights /= total[:, None]
        values = v[:, kv_head]
        out[rows, head] = weights @ values
        lse[rows, head] = top[rows] + np.log(total)
        sum_of_terms[rows, head] = weights @ np.abs(values)
        norm_of_terms[rows, head] = np.sqrt(weights**2 @ values**2)
        score_size[:, head] = np.where(seen, size, 0.0).max(axis=1, initial=0.0)
    return Answer(
        out=out,
        lse=lse,
        sum_of_terms=sum_of_terms,
        norm_of_terms=norm_of_terms,
        score_size=score_size,
    )


def merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """One answer from answers over disjoint parts of the keys.

    Args:
        outs: each (rows, num_heads, head_size_v).
        lses: each (rows, num_heads), natural log. A part without keys has -inf and counts for
            nothing; a sink was given to at most one part.
    """
    stacked = np.stack([np.asarray(x, dtype=np.float64) for x in lses])
    top = stacked.max(axis=0)
    safe = np.where(np.isneginf(top), 0.0, top)
    shares = np.exp(stacked - safe)
    total = shares.sum(axis=0)
    weights = shares / np.where(total == 0.0, 1.0, total)
    parts = np.stack([np.asarray(o, dtype=np.float64) for o in outs])
    out = (weights[..., None] * parts).sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    return out, lse
