"""IndexKernels: what a `LightningIndexer` runs, and the kernels of torch, which define what is right.

In: a step's small keys and queries, and pages of keys. Out: keys in the pages, and lists of the best
positions. Pages hold float8 codes with a float32 scale behind them as uint8, or plain numbers.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from attnkit.arguments import check_slots
from attnkit.contract import CommonAttentionMetadata
from attnkit.kvcache.codecs import Fp8PerTokenHeadCodec
from attnkit.kvcache.read import read_tokens

_MAX_PRODUCTS = 1 << 25
"""Float32 elements (128 MiB) that products of one request's queries and keys may take at once."""


class IndexKernels(Protocol):
    """Kernels of one indexer, under a name of `attnkit.backends.INDEX_KERNELS`."""

    is_capturable: bool
    """Neither waits for the device, so that a CUDA graph may hold both."""

    @staticmethod
    def refusal(num_heads: int, head_size: int, device: torch.device) -> str | None:
        """Why they cannot run an indexer of these sizes there; None: they can."""
        ...

    def write(self, k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write keys (at least T, head_size) to their slots (T,) of a cache (num_blocks, block_size, C);
        -1 writes nothing."""
        ...

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        batch: CommonAttentionMetadata,
        lists: torch.Tensor,
    ) -> None:
        """Fill `lists`, int32 (T, k), with the best positions of each query as `top_positions` gives
        them; rows of nobody with -1.

        Args:
            q: (at least T, num_heads, head_size).
            weights: (at least T, num_heads).
            cache: as of `write`, this step's keys in it.
            batch: the step. Replayed in a graph it may have other lengths, up to `max_seq_len`.
            lists: out.
        """
        ...


class TorchIndexKernels:
    """Eager torch on any device, request after request; waits for lengths on a device."""

    is_capturable = False

    @staticmethod
    def refusal(num_heads: int, head_size: int, device: torch.device) -> str | None:
        return None

    def write(self, k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        check_slots(slot_mapping, *cache.shape[:2])
        written = slot_mapping >= 0
        slots, rows = slot_mapping[written], k[: slot_mapping.shape[0]][written]
        if cache.dtype is torch.uint8:
            rows = Fp8PerTokenHeadCodec().encode(rows, rows.new_ones(1, dtype=torch.float32))
        block_size = cache.shape[1]
        cache[slots // block_size, slots % block_size] = rows.to(cache.dtype)

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        batch: CommonAttentionMetadata,
        lists: torch.Tensor,
    ) -> None:
        starts, kv_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        num_heads, head_size = q.shape[1:]
        for request, kv_len in enumerate(kv_lens):
            start, end = starts[request], starts[request + 1]
            if start == end:
                continue
            if kv_len <= lists.shape[1]:
                num_seen = torch.arange(start - end + 1, 1, device=q.device) + kv_len
                lists[start:end] = _first_positions(num_seen, lists.shape[1])
                continue
            keys = _keys_of(cache, batch.block_table_tensor[request], kv_len, head_size)
            rows = max(1, _MAX_PRODUCTS // max(1, kv_len * num_heads))
            for first in range(start, end, rows):
                part = slice(first, min(first + rows, end))
                num_seen = torch.arange(part.start - end, part.stop - end, device=q.device)
                num_seen = num_seen + kv_len + 1
                scores = index_scores(q[part], keys, weights[part])
                lists[part] = top_positions(scores, num_seen, lists.shape[1])
        lists[starts[-1] :] = -1


def _keys_of(cache: torch.Tensor, table: torch.Tensor, kv_len: int, head_size: int) -> torch.Tensor:
    """Keys of a request in order, float32 (kv_len, head_size)."""
    rows = read_tokens(cache, table, kv_len)
    if cache.dtype is not torch.uint8:
        return rows.float()
    return Fp8PerTokenHeadCodec().decode(rows, head_size, rows.new_ones(1, dtype=torch.float32))


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """How much each query wants each key.

    Args:
        q: (T, num_heads, head_size).
        keys: (n, head_size).
        weights: (T, num_heads).

    Returns:
        float32 (T, n).
    """
    products = torch.einsum("thd,nd->thn", q.float(), keys.float())
    return torch.einsum("th,thn->tn", weights.float(), products.relu_())


def top_positions(scores: torch.Tensor, num_seen: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the best keys of each query; of equal scores the lower position is the better.

    Args:
        scores: (T, n). NaN counts as the least.
        num_seen: int (T,): keys at the front that a query sees; 0 and less: none.
        k: positions to give.

    Returns:
        int32 (T, k), ascending, -1 behind the last: all seen keys where these are no more than k.
    """
    num_queries, num_keys = scores.shape
    positions = torch.arange(num_keys, device=scores.device)
    hidden = (positions[None] >= num_seen[:, None]) | scores.isnan()
    order = scores.masked_fill(hidden, -math.inf).sort(dim=1, descending=True, stable=True)[1]
    best = order[:, :k]
    best = torch.where(best < num_seen[:, None], best, num_keys).sort(dim=1)[0]
    lists = torch.full((num_queries, k), -1, dtype=torch.int32, device=scores.device)
    lists[:, : best.shape[1]] = torch.where(best < num_keys, best, -1)
    return lists


def _first_positions(num_seen: torch.Tensor, k: int) -> torch.Tensor:
    """All that queries see of no more than k keys, as `top_positions` would list them."""
    positions = torch.arange(k, dtype=torch.int32, device=num_seen.device)
    return torch.where(positions < num_seen[:, None], positions, -1)
