"""The torch path: attention of one request in blocked matrix products, where no C compiler is.

In: the queries of one request, a way to read its keys and values, the layer's variant. Out: its rows
of output and LSE. Heads of a group and tokens are rows of one matrix; blocks that no row may see are
skipped; an online softmax in float32 joins the blocks, so nothing grows with queries times keys.

A request is computed by itself, with shapes that depend on it alone: batch mates cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnkit.contract import AttentionVariant

QUERY_BLOCK = 128
KEY_BLOCK = 512
"""128 x 512 measured fastest of 64..256 x 512..1024 for 32/8 heads of 128 on two Zen cores."""

ReadKV = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(start, end) -> keys and values of those positions, (num_kv_heads, end - start, size) each."""

_LOWEST = torch.finfo(torch.float32).min
"""Stands for the largest of no scores: exp(-inf - _LOWEST) is 0, where exp(-inf + inf) is NaN."""


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which keys each query of a request sees: one span per query.

    Attributes:
        kv_len: keys of the request.
        first: absolute position of its first query; may be negative.
        causal: queries do not see what comes after them.
        window: keys seen to the left, the query's own included, and without `causal` to the right.
    """

    kv_len: int
    first: int
    causal: bool
    window: int | None

    def span(self, query: int) -> tuple[int, int]:
        """Keys [lo, hi) that a query of the request sees; lo >= hi: none."""
        position = self.first + query
        lo, hi = 0, self.kv_len
        if self.causal:
            hi = min(hi, position + 1)
        if self.window is not None:
            lo = max(lo, position - self.window + 1)
            if not self.causal:
                hi = min(hi, position + self.window)
        return lo, hi


@dataclass(kw_only=True)
class _Block:
    """The running softmax of a block of queries; rows are (token, head of the group) pairs.

    Attributes:
        tokens: first and last + 1 token of the request.
        query: (num_kv_heads, group * tokens, head_size).
        largest: (num_kv_heads, group * tokens, 1) largest score; None: no key seen yet.
        denominator: the same shape.
        values: (num_kv_heads, group * tokens, head_size_v) weighted sums.
    """

    tokens: tuple[int, int]
    query: torch.Tensor
    largest: torch.Tensor | None = None
    denominator: torch.Tensor | None = None
    values: torch.Tensor | None = None


def attend_request(
    query: torch.Tensor,
    read: ReadKV,
    num_kv_heads: int,
    visibility: Visibility,
    variant: AttentionVariant,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill one request's rows of output and LSE.

    Args:
        query: (q_len, num_heads, head_size), q_len >= 1.
        read: its keys and values, in any dtype; asked for each position at most once.
        output: (q_len, num_heads, head_size_v).
        lse: float32 (q_len, num_heads), or None.
    """
    q_len, _, head_size = query.shape
    dtype = _matmul_dtype(query.dtype, q_len)
    # (num_kv_heads, group, q_len, head_size), so that a block of tokens is a slice.
    rows = query.to(dtype).view(q_len, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
    blocks = [
        _Block(
            tokens=(i, min(i + QUERY_BLOCK, q_len)),
            query=rows[:, :, i : i + QUERY_BLOCK].reshape(num_kv_heads, -1, head_size),
        )
        for i in range(0, q_len, QUERY_BLOCK)
    ]
    lowest, highest = visibility.span(0)[0], visibility.span(q_len - 1)[1]
    for base in range(lowest - lowest % KEY_BLOCK, highest, KEY_BLOCK):
        start, end = max(base, lowest), min(base + KEY_BLOCK, highest)
        keys, values = (x.to(dtype) for x in read(start, end))
        for block in blocks:
            first, last = block.tokens[0], block.tokens[1] - 1
            lo, hi = max(start, visibility.span(first)[0]), min(end, visibility.span(last)[1])
            if lo < hi:
                part = slice(lo - start, hi - start)
                _add_keys(block, keys[:, part], values[:, part], lo, visibility, variant)
    for block in blocks:
        tokens = slice(*block.tokens)
        _finish(block, variant, output[tokens], None if lse is None else lse[tokens])


def _matmul_dtype(dtype: torch.dtype, q_len: int) -> torch.dtype:
    """What to multiply in: bfloat16 where that is fast and pays, else float32.

    float16 products are done one by one on most CPUs (0.4 to 3 GFLOP/s where float32 does 200), and
    a few rows are bound by memory in any dtype.
    """
    fast = dtype == torch.bfloat16 and q_len >= 32 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _add_keys(
    block: _Block,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_key: int,
    visibility: Visibility,
    variant: AttentionVariant,
) -> None:
    """Let a block of queries attend to keys from position `first_key` on."""
    num_kv_heads, num_keys, _ = keys.shape
    num_tokens = block.tokens[1] - block.tokens[0]
    shape = (num_kv_heads, -1, num_tokens, num_keys)
    score = torch.bmm(block.query, keys.transpose(1, 2)).float() * variant.scale
    if variant.logits_soft_cap is not None:
        score.div_(variant.logits_soft_cap).tanh_().mul_(variant.logits_soft_cap)
    mask = None
    spans = [visibility.span(token) for token in (block.tokens[0], block.tokens[1] - 1)]
    masked = spans[1][0] > first_key or spans[0][1] < first_key + num_keys
    if masked or variant.alibi_slopes is not None:
        position = visibility.first + torch.arange(*block.tokens)
        ahead = torch.arange(first_key, first_key + num_keys) - position[:, None]
        if variant.alibi_slopes is not None:
            distance = -(-ahead).clamp(min=0).sqrt() if variant.use_alibi_sqrt else ahead
            slopes = variant.alibi_slopes.view(num_kv_heads, -1, 1, 1)
            score.view(shape).add_(slopes * distance)
        if masked:
            mask = torch.ones_like(ahead, dtype=torch.bool)
            if visibility.causal:
                mask &= ahead <= 0
            if visibility.window is not None:
                mask &= ahead > -visibility.window
                if not visibility.causal:
                    mask &= ahead < visibility.window
            score.view(shape).masked_fill_(~mask, -torch.inf)

    largest = score.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    if block.largest is not None:
        largest = torch.maximum(largest, block.largest)
    weights = score.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    added = _weigh(weights, values, mask)
    if block.largest is None:
        block.denominator, block.values = total, added
    else:
        assert block.denominator is not None
        assert block.values is not None
        factor = (block.largest - largest).exp_()
        block.denominator.mul_(factor).add_(total)
        block.values.mul_(factor).add_(added)
    block.largest = largest


def _weigh(weights: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """float32 weights @ values, where a value that is inf or NaN reaches only rows that see it."""
    if mask is None or bool(torch.isfinite(values.sum(dtype=torch.float32))):
        return torch.bmm(weights.to(values.dtype), values).float()
    finite = torch.isfinite(values)
    result = torch.bmm(weights.to(values.dtype), values.where(finite, 0)).float()
    num_kv_heads, _, size = result.shape
    num_tokens, num_keys = mask.shape
    by_token = result.view(num_kv_heads, -1, num_tokens, size)
    weight = weights.view(num_kv_heads, -1, num_tokens, num_keys)
    wild = values.float().where(~finite, 0)
    for key in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        seen = mask[:, key]
        by_token[:, :, seen] += weight[:, :, seen, key, None] * wild[:, None, None, key]
    return result


def _finish(
    block: _Block, variant: AttentionVariant, output: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Join the sink, divide, and write (tokens, num_heads, ...) rows."""
    num_tokens, num_heads, _ = output.shape
    num_kv_heads = block.query.shape[0]
    shape = (num_kv_heads, num_heads // num_kv_heads, num_tokens, -1)
    sinks = None
    if variant.sinks is not None:
        sinks = variant.sinks.view(num_kv_heads, -1, 1, 1).expand(*shape[:3], 1)
    if block.largest is None or block.denominator is None or block.values is None:
        output.zero_()
        if lse is not None:
            lse.copy_(_by_token(sinks).squeeze(-1)) if sinks is not None else lse.fill_(-torch.inf)
        return
    largest, denominator, values = (
        x.view(shape) for x in (block.largest, block.denominator, block.values)
    )
    if sinks is not None:
        joined = torch.maximum(largest, sinks)
        factor = (largest - joined).exp_()
        denominator = denominator * factor + (sinks - joined).exp_()
        values, largest = values * factor, joined
    # A row that saw no key has denominator 0 and values 0, or the sink's share alone.
    divisor = denominator.masked_fill(denominator == 0, 1)
    output.copy_(_by_token(values / divisor))
    if lse is not None:
        lse.copy_(_by_token(largest + denominator.log()).squeeze(-1))


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """(num_kv_heads, group, tokens, size) as (tokens, num_heads, size)."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)
