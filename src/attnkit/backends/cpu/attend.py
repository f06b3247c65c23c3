"""The torch path: attention in blocked matrix products, where no C compiler is.

In: a batch's queries, its requests with a way to read the keys and values of each, the layer's
variant. Out: rows of output and LSE. Heads of a group and tokens are rows of one matrix; blocks that
no row may see are skipped; an online softmax in float32 joins the blocks, so nothing grows with
queries times keys.

A request is computed by itself, with shapes that depend on it alone: batch mates cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnkit.contract import AttentionVariant

QUERY_BLOCK = 128
KEY_BLOCK = 512
"""128 x 512 measured fastest of 64..256 x 512..1024 for 32/8 heads of 128 on two Zen cores."""

_LOWEST = torch.finfo(torch.float32).min
"""Stands for the largest of no scores: exp(-inf - _LOWEST) is 0, where exp(-inf + inf) is NaN."""

ReadKV = Callable[[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""(start, end, dtype) -> keys and values of those positions, (num_kv_heads, end - start, size) each."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a batch; each of its queries sees one span of its keys.

    Attributes:
        start: its first row in the batch's tensors.
        q_len: its queries, at least 1; the last one stands on the last key.
        kv_len: its keys.
        causal: queries do not see what comes after them.
        window: keys seen to the left, the query's own included, and without `causal` to the right.
        spans: int (q_len, 2): keys [start, end) that a query sees besides; None: none.
        prefix: keys below this are not left of any window.
        tree: int64 (q_len,), bit j: this query sees the key of the j-th; None or 0: as the rest says.
        read: its keys and values; asked for each position at most once.
    """

    start: int
    q_len: int
    kv_len: int
    causal: bool
    window: int | None
    spans: torch.Tensor | None
    prefix: int
    tree: torch.Tensor | None = None
    read: ReadKV

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 (q_len,) each: keys [lo, hi) that a query sees, beside those below both `prefix` and
        hi; lo >= hi: none."""
        position = torch.arange(self.kv_len - self.q_len, self.kv_len)
        lo, hi = torch.zeros_like(position), torch.full_like(position, self.kv_len)
        if self.causal:
            hi = hi.minimum(position + 1)
        if self.window is not None:
            lo = lo.maximum(position - self.window + 1)
            if not self.causal:
                hi = hi.minimum(position + self.window)
        if self.spans is not None:
            lo, hi = lo.minimum(self.spans[:, 0]), hi.maximum(self.spans[:, 1])
        return lo, hi

    def in_tree(self, first: int, last: int, position: torch.Tensor) -> torch.Tensor | None:
        """bool (last - first, keys): the keys at these positions that queries first to last see of their
        tree; None: all."""
        context = self.kv_len - self.q_len
        if self.tree is None or int(position[-1]) < context or not bool(self.tree.any()):
            return None
        new = position - context
        seen = (self.tree[first:last, None] >> new.clamp(0, 63)) & 1
        return (new < 0) | (seen != 0)


class _Sums(NamedTuple):
    """The running softmax of some tokens, (num_kv_heads, group, tokens, ...).

    Attributes:
        largest: score so far, last dimension 1.
        denominator: last dimension 1.
        values: weighted sums, last dimension head_size_v.
    """

    largest: torch.Tensor
    denominator: torch.Tensor
    values: torch.Tensor


def attend(
    query: torch.Tensor,
    requests: Iterable[Request],
    num_kv_heads: int,
    variant: AttentionVariant,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Fill the rows of a batch's own tokens, without padding.

    Args:
        query: (num_tokens, num_heads, head_size).
        requests: whose rows make up the tokens, in the order of their rows.
        output: (num_tokens, num_heads, head_size_v).
        lse: float32 (num_tokens, num_heads), or None.
    """
    num_tokens, num_heads, head_size = query.shape
    group = num_heads // num_kv_heads
    rows: dict[torch.dtype, torch.Tensor] = {}
    blocks: list[_Sums] = []
    for request in requests:
        dtype = _matmul_dtype(query.dtype, request.q_len)
        if dtype not in rows:
            by_head = query.to(dtype).view(num_tokens, num_kv_heads, group, head_size)
            rows[dtype] = by_head.permute(1, 2, 0, 3)
        blocks += _attend_request(rows[dtype], request, variant, output.shape[2])
    if blocks:
        sums = _Sums(*(torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True)))
        _finish(sums, variant.sinks, output, lse)


def _matmul_dtype(dtype: torch.dtype, q_len: int) -> torch.dtype:
    """What to multiply in: bfloat16 where that is fast and pays, else float32.

    float16 products are done one by one on most CPUs (0.4 to 3 GFLOP/s where float32 does 200), and
    a few rows are bound by memory in any dtype.
    """
    fast = dtype == torch.bfloat16 and q_len >= 32 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _attend_request(
    rows: torch.Tensor, request: Request, variant: AttentionVariant, head_size_v: int
) -> list[_Sums]:
    """The sums of each block of a request's queries, over all keys these see.

    Args:
        rows: (num_kv_heads, group, num_tokens, head_size), of the whole batch.
    """
    starts = range(0, request.q_len, QUERY_BLOCK)
    blocks: list[_Sums | None] = [None] * len(starts)
    row_lo, row_hi = request.bounds()
    # Of each block of queries: what any of them sees, and what all of them see.
    los = [[int(x) for x in part.aminmax()] for part in row_lo.split(QUERY_BLOCK)]
    his = [[int(x) for x in part.aminmax()] for part in row_hi.split(QUERY_BLOCK)]
    lowest, highest = min(lo for lo, _ in los), max(hi for _, hi in his)
    prefix = request.prefix
    for start, end in _key_blocks(lowest, highest, prefix):
        keys, values = request.read(start, end, rows.dtype)
        for i, first in enumerate(starts):
            last = min(first + QUERY_BLOCK, request.q_len)
            lo = start if start < prefix else max(start, los[i][0])
            hi = min(end, his[i][1])
            if lo >= hi:
                continue
            ahead = mask = None
            position = torch.arange(lo, hi)
            if (los[i][1] > lo and hi > prefix) or his[i][0] < hi:
                mask = (position >= row_lo[first:last, None]) | (position < prefix)
                mask &= position < row_hi[first:last, None]
            tree = request.in_tree(first, last, position)
            if tree is not None:
                mask = tree if mask is None else mask & tree
            if variant.alibi_slopes is not None:
                shift = request.kv_len - request.q_len
                ahead = position - torch.arange(shift + first, shift + last)[:, None]
            whole = (lo, hi) == (start, end)
            blocks[i] = _add_keys(
                blocks[i],
                rows[:, :, request.start + first : request.start + last],
                keys if whole else keys[:, lo - start : hi - start],
                values if whole else values[:, lo - start : hi - start],
                ahead,
                mask,
                variant,
            )
    num_kv_heads, group, _, _ = rows.shape
    return [
        _no_keys(num_kv_heads, group, min(QUERY_BLOCK, request.q_len - first), head_size_v)
        if sums is None
        else sums
        for sums, first in zip(blocks, starts, strict=True)
    ]


def _key_blocks(lowest: int, highest: int, prefix: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the keys below `prefix` and of those from `lowest` on, cut where they may be."""
    for first, last in ((0, min(prefix, lowest, highest)), (lowest, highest)):
        for base in range(first - first % KEY_BLOCK, last, KEY_BLOCK):
            yield max(base, first), min(base + KEY_BLOCK, last)


def _no_keys(num_kv_heads: int, group: int, num_tokens: int, head_size_v: int) -> _Sums:
    shape = (num_kv_heads, group, num_tokens)
    return _Sums(
        torch.full((*shape, 1), _LOWEST), torch.zeros(*shape, 1), torch.zeros(*shape, head_size_v)
    )


def _add_keys(
    sums: _Sums | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ahead: torch.Tensor | None,
    mask: torch.Tensor | None,
    variant: AttentionVariant,
) -> _Sums:
    """The sums of a block of queries over one more block of keys.

    Args:
        sums: before, consumed; None: over no keys.
        query: (num_kv_heads, group, tokens, head_size).
        keys: (num_kv_heads, num_keys, head_size).
        values: (num_kv_heads, num_keys, head_size_v).
        ahead: int64 (tokens, num_keys), key position minus query position; None where not needed.
        mask: bool, the same shape: seen; None: all are.
    """
    num_kv_heads, group, num_tokens, _ = query.shape
    shape = (num_kv_heads, group, num_tokens, -1)
    score = torch.bmm(query.reshape(num_kv_heads, group * num_tokens, -1), keys.transpose(1, 2))
    score = (score.float() * variant.scale).view(shape)
    if variant.logits_soft_cap is not None:
        score.div_(variant.logits_soft_cap).tanh_().mul_(variant.logits_soft_cap)
    if variant.alibi_slopes is not None:
        assert ahead is not None
        distance = -(-ahead).clamp(min=0).sqrt() if variant.use_alibi_sqrt else ahead
        score.add_(variant.alibi_slopes.view(num_kv_heads, group, 1, 1) * distance)
    if mask is not None:
        score.masked_fill_(~mask, -torch.inf)
    largest = score.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    if sums is not None:
        largest = torch.maximum(largest, sums.largest)
    weights = score.sub_(largest).exp_()
    denominator = weights.sum(-1, keepdim=True)
    weighted = _weigh(weights.flatten(1, 2), values, mask).view(shape)
    if sums is not None:
        factor = (sums.largest - largest).exp_()
        denominator.add_(sums.denominator.mul_(factor))
        weighted.add_(sums.values.mul_(factor))
    return _Sums(largest, denominator, weighted)


def _weigh(weights: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """float32 weights @ values, where a value that is inf or NaN reaches only rows that see it.

    Args:
        weights: (num_kv_heads, group * tokens, num_keys).
        values: (num_kv_heads, num_keys, head_size_v).
        mask: bool (tokens, num_keys); None: all see all.
    """
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
    sums: _Sums, sinks: torch.Tensor | None, output: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Join the sink, divide, and write (num_tokens, num_heads, ...) rows."""
    largest, denominator, values = sums.largest, sums.denominator, sums.values
    if sinks is not None:
        sink = sinks.view(*largest.shape[:2], 1, 1)
        joined = torch.maximum(largest, sink)
        factor = (largest - joined).exp_()
        denominator = denominator * factor + (sink - joined).exp_()
        values, largest = values * factor, joined
    # A row that saw no key has denominator 0 and values 0, or the sink's share alone.
    divisor = denominator.masked_fill(denominator == 0, 1)
    output.copy_((values / divisor).permute(2, 0, 1, 3).flatten(1, 2))
    if lse is not None:
        lse.copy_((largest + denominator.log()).permute(2, 0, 1, 3).flatten(1))
