"""How far a right answer may be from the float64 one: an error budget measured on the data itself.

In: a request's inputs in the tested dtype, its meaning and the oracle's answer. Out: an allowed
error for every element of output and LSE. No tolerance is written down anywhere else.

The budget of an element is

    2 * E + (rounding of its own size)

where E is the largest error that the plain computation makes on this request: the textbook formula
in eager torch with every intermediate (scores, weights, output) rounded to the tested dtype. A
kernel that keeps float32 accumulators is well inside; one that loses more than the plain formula
loses is wrong. The rounding terms keep the budget from vanishing where the plain computation happens
to be exact (one visible key, small integers):

- Weights and output are each rounded once to the tested dtype, by at most eps / 2. What all weights
  have in common moves the output in proportion to itself, the rest in proportion to the norm of its
  terms: 2 * eps * (|output| + sqrt(sum((weight * value)^2))), which is twice the largest error of
  the first kind and seven standard deviations (eps / sqrt(12)) of the second.
- A score is computed in float32 by some order of operations (fused or not, products summed up in
  pairs or in a row, log2(e) folded into the scale or not), which moves it by 4 * eps(float32) times
  its size: |score|, |bias| or the norm of the products in q.k, whichever is largest. A weight moves
  by that much relatively, and adding up n of them adds eps(float32) * log2(n). Both times
  sum(|weight * value|).
- An output that comes out of a product of its own (values out of latents) is added up in float32 by some
  order too: 4 * eps(float32) times the norm of its products.

An LSE is always float32, so its own rounding is that of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attnkit.conformance.oracle import Answer, Array, Meaning, own_score, visible

_EPS32 = float(torch.finfo(torch.float32).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Allowed absolute errors, elementwise, for one request.

    Attributes:
        out: (q_len, num_heads, head_size_v).
        lse: (q_len, num_heads).
    """

    out: Array
    lse: Array


def budget_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meaning: Meaning,
    answer: Answer,
) -> Budget:
    """The budget of one request whose queries are its last tokens.

    Args:
        q: (q_len, num_heads, head_size) in the tested dtype.
        k: (kv_len, num_kv_heads, head_size) as read from the cache.
        v: (kv_len, num_kv_heads, head_size_v) as read from the cache.
        meaning: what `answer` was computed with.
        answer: the oracle's.
    """
    return budget_from([plain(q, k, v, meaning, q.dtype)], answer, k.shape[0], q.dtype)


def budget_from(
    runs: Sequence[tuple[Array, Array]],
    answer: Answer,
    kv_len: int,
    dtype: torch.dtype,
    factors: Array | float = 0.0,
    projected: Array | float = 0.0,
) -> Budget:
    """The budget that plain runs leave.

    Args:
        runs: output and LSE of the plain computation, in each form that is as plain as the others: the
            largest error of any counts.
        answer: the oracle's.
        kv_len: keys of the request.
        dtype: the tested one.
        factors: (q_len, num_heads), the norm of the products of a score whose factors are themselves
            rounded to the tested dtype; 0: they are given in it. Each is off by at most eps / 2, so
            eps * norm is three and a half standard deviations of what that moves the score by.
        projected: (q_len, num_heads, head_size_v), the norm of the products of an output that is itself
            a product, which is summed up in float32 by some order as a score is; 0: it is none.
    """
    finite = np.isfinite(answer.lse)
    out_error = max(_largest(np.abs(out - answer.out)) for out, _ in runs)
    lse_error = max(_largest(np.abs(lse[finite] - answer.lse[finite])) for _, lse in runs)
    eps = float(torch.finfo(dtype).eps)
    score_rounding = _EPS32 * (4.0 * answer.score_size + np.log2(2.0 + kv_len)) + eps * factors
    tiny = float(torch.finfo(dtype).smallest_normal)
    return Budget(
        out=2.0 * out_error
        + 2.0 * eps * (np.abs(answer.out) + answer.norm_of_terms)
        + score_rounding[..., None] * answer.sum_of_terms
        + 4.0 * _EPS32 * projected
        + tiny,
        lse=2.0 * lse_error
        + score_rounding
        + 2.0 * _EPS32 * np.abs(np.where(finite, answer.lse, 0.0)),
    )


def _largest(error: Array) -> float:
    """Largest error of the plain run; where it overflows (float16 scores) it sets no budget."""
    error = error[np.isfinite(error)]
    return float(error.max(initial=0.0))


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meaning: Meaning, dtype: torch.dtype
) -> tuple[Array, Array]:
    """The formula in eager torch on the CPU, each step's result rounded to `dtype`."""
    q, k, v = (x.detach().cpu().to(dtype) for x in (q, k, v))
    q_len, num_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    key_positions = np.arange(kv_len, dtype=np.int64)
    query_positions = kv_len - q_len + np.arange(q_len, dtype=np.int64)
    seen = torch.from_numpy(visible(query_positions, key_positions, meaning))
    score = torch.einsum("qhd,khd->hqk", q, k) * meaning.scale
    if meaning.soft_cap is not None:
        score = meaning.soft_cap * torch.tanh(score / meaning.soft_cap)
    if meaning.alibi_slopes is not None:
        ahead = torch.from_numpy(key_positions[None, :] - query_positions[:, None])
        slopes = torch.tensor(list(meaning.alibi_slopes), dtype=torch.float32)[:, None, None]
        if meaning.alibi_sqrt:
            bias = -slopes * torch.sqrt((-ahead).clamp_min(0).float())
        else:
            bias = slopes * ahead.float()
        score = (score.float() + bias).to(dtype)
    if meaning.own is not None:
        for head, scores in enumerate(score.double().numpy()):
            changed = own_score(scores, head, query_positions, key_positions, meaning.own)
            score[head] = torch.from_numpy(changed.copy()).to(dtype)
    score = score.masked_fill(~seen, -torch.inf)
    if meaning.sinks is None:
        sink = torch.full((num_heads,), -torch.inf)
    else:
        sink = torch.tensor(list(meaning.sinks), dtype=torch.float32)
    column = sink[:, None, None].expand(num_heads, q_len, 1)
    logits = torch.cat([score.float(), column], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.nan_to_num(torch.softmax(logits, dim=-1)[..., :-1]).to(dtype)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out.double().numpy(), lse.T.double().numpy()
