"""Whole sequences of a case: seeded tokens of each request, and what the judge expects of them.

In: a `Case`. Out: `Tokens` as a model makes them, and `WholeSequence`s with the oracle's answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from attnkit.conformance.budget import Budget, budget_for
from attnkit.conformance.case import Case
from attnkit.conformance.oracle import Answer, Array, Meaning, OwnScore, attend


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


def meaning_of(case: Case, request: int, own: OwnScore | None = None) -> Meaning:
    """What the layer means for one request of the case; `own` is the backend's `own_score`."""
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
        own=own,
    )


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


def random_tokens(case: Case, rng: np.random.Generator) -> list[Tokens]:
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
