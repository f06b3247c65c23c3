"""Tokens whose answers are known, for replays of public bug reports.

PROBE: q = 0, value of key j one-hot in channel j mod D: the output is the share of each visible key,
the LSE the log of their number. MEAN: q = 0, value j: the output is the mean of the visible indices.
RAND(seed): numpy's default generator, q, k, v of each request in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from attnkit.conformance.case import Case
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.sequences import Tokens
from attnkit.conformance.subject import Result
from attnkit.layer import Attention

Replay = Callable[..., Result]
InputsOf = Callable[..., tuple[Attention, Inputs]]
LayerOf = Callable[..., Attention]


def tokens_of(
    case: Case, fill: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
) -> list[Tokens]:
    """Tokens of every request: zeros, then `fill(request, q, k, v)` writes into them."""
    result = []
    for request, (q_len, kv_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        q = torch.zeros(q_len, case.num_heads, case.head_size)
        k = torch.zeros(kv_len, case.num_kv_heads, case.head_size)
        v = torch.zeros(kv_len, case.num_kv_heads, case.value_size)
        fill(request, q, k, v)
        result.append(Tokens(q=q.to(case.dtype), k=k.to(case.dtype), v=v.to(case.dtype)))
    return result


def mean(case: Case, start: Sequence[float] | None = None) -> list[Tokens]:
    """MEAN; `start` is added to the values of each request."""

    def fill(request: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k.copy_(torch.randn(k.shape, generator=torch.Generator().manual_seed(request)))
        first = 0.0 if start is None else start[request]
        v.copy_((first + torch.arange(v.shape[0]))[:, None, None].expand_as(v))

    return tokens_of(case, fill)


def probe(case: Case) -> list[Tokens]:
    """PROBE."""

    def fill(request: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k.copy_(torch.randn(k.shape, generator=torch.Generator().manual_seed(request)))
        for j in range(v.shape[0]):
            v[j, :, j % v.shape[2]] = 1.0

    return tokens_of(case, fill)


def rand(case: Case, seed: int) -> list[Tokens]:
    """RAND(seed)."""
    rng = np.random.default_rng(seed)

    def fill(request: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for x in (q, k, v):
            x.copy_(torch.from_numpy(rng.standard_normal(tuple(x.shape))))

    return tokens_of(case, fill)


def close(got: torch.Tensor | float, want: float, tolerance: float = 2e-6) -> None:
    """Each number of `got` is `want` within `tolerance` relatively (absolutely below 1)."""
    got = torch.as_tensor(got).double()
    assert got.numel() > 0
    off = (got - want).abs().max().item()
    assert off <= tolerance * max(1.0, abs(want)), f"{got.flatten()[:4].tolist()} is not {want}"


def seen_keys(out: torch.Tensor) -> list[set[int]]:
    """Which keys each row saw, read off a PROBE output (rows, heads, D); equal in every head."""
    rows = []
    for row in out:
        keys = [set(torch.nonzero(head).flatten().tolist()) for head in row]
        assert all(k == keys[0] for k in keys)
        rows.append(keys[0])
    return rows
