"""A batch for the kernels themselves: tensors, scattered and poisoned pages, and the right answer.

In: lengths and shapes. Out: `Problem`, whose operands go to a launcher and whose `check` compares the
output with the kit's float64 oracle. Device: a GPU if there is one, else the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attnkit.backends.stored import Stored
from attnkit.backends.triton.operands import Operands
from attnkit.conformance.oracle import Meaning, attend, visible
from attnkit.contract import AttentionVariant
from attnkit.contract.spans import spans_of_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Absolute, for values of size 1: a few roundings of the dtype. The kit judges by a measured budget."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Operands and what they mean.

    Attributes:
        operands: output and LSE start as NaN.
        variant: score and mask.
        sequences: q, k, v per request, float64.
        meanings: per request, for the oracle.
    """

    operands: Operands
    variant: AttentionVariant
    sequences: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    meanings: list[Meaning]

    def fresh(self) -> Problem:
        """The same with an output and LSE of NaN again."""
        o = self.operands
        values = {name: getattr(o, name) for name in Operands.__dataclass_fields__}
        values["output"] = torch.full_like(o.output, math.nan)
        values["lse"] = torch.full_like(o.lse, math.nan)
        return Problem(
            operands=Operands(**values),
            variant=self.variant,
            sequences=self.sequences,
            meanings=self.meanings,
        )

    def check(self, requests: Sequence[int] | None = None) -> None:
        """Compare the rows of these requests (all) with the oracle; the others must still be NaN."""
        o = self.operands
        starts = o.query_start_loc.tolist()
        out, lse = o.output.double().cpu().numpy(), o.lse.double().cpu().numpy()
        allowed = TOLERANCE[o.query.dtype]
        for r, ((q, k, v), meaning) in enumerate(zip(self.sequences, self.meanings, strict=True)):
            rows = slice(starts[r], starts[r + 1])
            if requests is not None and r not in requests:
                assert np.isnan(out[rows]).all(), f"request {r} is another kernel's"
                assert np.isnan(lse[rows]).all(), f"request {r} is another kernel's"
                continue
            answer = attend(q, k, v, meaning)
            np.testing.assert_allclose(out[rows], answer.out, atol=allowed, rtol=0)
            np.testing.assert_allclose(lse[rows], answer.lse, atol=allowed, rtol=allowed)


def make_problem(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    head_size_v: int | None = None,
    page: int | None = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    causal: bool | Sequence[bool] = True,
    poison: float = math.nan,
    seed: int = 0,
    scale: float | None = None,
    ranges: dict[int, list[tuple[int, int]]] | None = None,
    prefix_lens: Sequence[int] | None = None,
    **features: Any,
) -> Problem:
    """Random tokens in pages that are scattered, or in rows (`page` None).

    Args:
        poison: in every slot that holds no token, and for keys that no query of the request sees.
        ranges: request -> (first, last) positions that are seen in both directions.
        prefix_lens: per request, keys below are not left of any window.
        features: of the variant: sliding_window, logits_soft_cap, alibi_slopes, use_alibi_sqrt, sinks.
    """
    rng = np.random.default_rng(seed)
    size_v = head_size if head_size_v is None else head_size_v
    scale = head_size**-0.5 if scale is None else scale
    flags = [causal] * len(query_lens) if isinstance(causal, bool) else list(causal)
    sinks = features.get("sinks")
    meanings = [
        Meaning(
            scale=scale,
            causal=flag,
            window=features.get("sliding_window"),
            soft_cap=features.get("logits_soft_cap"),
            alibi_slopes=features.get("alibi_slopes"),
            alibi_sqrt=features.get("use_alibi_sqrt", False),
            sinks=None if sinks is None else [float(s) for s in sinks],
            ranges=(ranges or {}).get(request, ()),
            prefix=0 if prefix_lens is None else prefix_lens[request],
        )
        for request, flag in enumerate(flags)
    ]

    def draw(*shape: int, to: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(to)

    cached = cache_dtype or dtype
    tokens = [
        (
            draw(q_len, heads, head_size, to=dtype),
            draw(kv_len, kv_heads, head_size, to=cached),
            draw(kv_len, kv_heads, size_v, to=cached),
        )
        for q_len, kv_len in zip(query_lens, kv_lens, strict=True)
    ]
    table = None
    if page is None:
        key = torch.cat([k for _, k, _ in tokens])
        value = torch.cat([v for _, _, v in tokens])
    else:
        key, value, table = _pages(tokens, meanings, page, cached, poison, rng)
    num_tokens = sum(query_lens)
    starts = np.concatenate([[0], np.cumsum(query_lens)])

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(DEVICE)

    spans = None
    if ranges is not None:
        spans = spans_of_tokens(ranges, starts.tolist(), kv_lens, num_tokens)
    operands = Operands(
        query=torch.cat([q for q, _, _ in tokens]).to(DEVICE),
        stored=Stored(key=key.to(DEVICE), value=value.to(DEVICE)),
        output=torch.full((num_tokens, heads, size_v), math.nan, dtype=dtype, device=DEVICE),
        lse=torch.full((num_tokens, heads), math.nan, device=DEVICE),
        query_start_loc=ints(starts),
        kv_lens=ints(kv_lens),
        block_table=None if table is None else ints(table),
        causal=causal if isinstance(causal, bool) else torch.tensor(flags).to(DEVICE),
        spans=None if spans is None else torch.from_numpy(spans).to(DEVICE),
        prefix_lens=None if prefix_lens is None else ints(prefix_lens),
    )
    variant = AttentionVariant.from_impl_args(num_heads=heads, scale=scale, **features)
    return Problem(
        operands=operands,
        variant=variant.to(DEVICE),
        sequences=[tuple(x.double().numpy() for x in t) for t in tokens],  # type: ignore[misc]
        meanings=meanings,
    )


def _pages(
    tokens: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    meanings: list[Meaning],
    page: int,
    dtype: torch.dtype,
    poison: float,
    rng: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """K and V views of one cache, tokens before heads in memory, and the block table."""
    needs = [-(-k.shape[0] // page) for _, k, _ in tokens]
    num_blocks = 2 * sum(needs) + 3
    ids = 1 + rng.permutation(num_blocks - 1)
    table = np.full((len(needs), max(needs, default=0) + 2), ids[-1], dtype=np.int64)
    kv_heads, size, size_v = tokens[0][1].shape[1], tokens[0][1].shape[2], tokens[0][2].shape[2]
    cache = torch.full((num_blocks, page, kv_heads, size + size_v), poison, dtype=dtype)
    taken = 0
    for r, (q, k, v) in enumerate(tokens):
        table[r, : needs[r]] = ids[taken : taken + needs[r]]
        taken += needs[r]
        keys = np.arange(k.shape[0])
        seen = _seen(q.shape[0], k.shape[0], meanings[r])
        blocks, rows = table[r][keys // page][seen], (keys % page)[seen]
        cache[blocks, rows, :, :size] = k[seen]
        cache[blocks, rows, :, size:] = v[seen]
    logical = cache.transpose(1, 2)
    # A cache on the device is one tensor there too, its values right behind its keys.
    logical = logical.to(DEVICE)
    return logical[..., :size], logical[..., size:], table


def _seen(q_len: int, kv_len: int, meaning: Meaning) -> np.ndarray:
    """Bool (kv_len,): some query of the request sees the key."""
    queries = kv_len - q_len + np.arange(q_len, dtype=np.int64)
    return visible(queries, np.arange(kv_len, dtype=np.int64), meaning).any(axis=0)
