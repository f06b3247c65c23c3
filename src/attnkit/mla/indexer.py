"""LightningIndexer: which keys each query of a sparse layer attends to, as in DeepSeek-V3.2.

In: per token a small key, and per query a few small heads with a weight each. Out: for every query the
positions of the `topk_tokens` best keys of its request, itself included, in `topk_indices_buffer`:

    score(query, key) = sum over heads h of weight[h] * relu(q[h] . key)

Keys live in pages of their own, with the block tables of the layer that is served: as float8 codes
with a float32 scale per token behind them (`head_size + 4` bytes), or as plain numbers.
"""

from __future__ import annotations

import math

import torch

from attnkit.contract import (
    CommonAttentionMetadata,
    MLAAttentionSpec,
    kv_cache_torch_dtype,
)
from attnkit.errors import BatchError, ConfigurationError
from attnkit.kvcache.codecs import Fp8PerTokenHeadCodec

_FORMATS = ("fp8", "auto", "float16", "bfloat16", "float32")
_MAX_PRODUCTS = 1 << 25
"""Float32 elements (128 MiB) that products of one request's queries and keys may take at once."""


class LightningIndexer:
    """The indexer of one layer, or of a group of layers that share its lists.

    Attributes:
        layer_name: unique name; key of its cache.
        topk_tokens: keys a query is told at most.
        topk_indices_buffer: int32 (max_num_batched_tokens, topk_tokens), rows in the step's order,
            positions ascending, -1 behind them.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        topk_tokens: int,
        *,
        max_num_batched_tokens: int = 8192,
        kv_cache_dtype: str = "fp8",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layer_name: str = "indexer",
        block_size: int = 16,
    ) -> None:
        """
        Args:
            num_heads: of queries; they share a key.
            head_size: of both.
            topk_tokens: keys a query is told at most.
            max_num_batched_tokens: most tokens of a step.
            kv_cache_dtype: "fp8" (codes and a scale per token), "auto" (`dtype`) or a plain dtype.
            dtype: of keys that are stored plainly.
            device: where it runs.
            layer_name: key of its cache.
            block_size: tokens in a block, as in the layer that it serves.

        Raises:
            ConfigurationError: a size below 1, or a format that keys are not stored in.
        """
        sizes = {
            "num_heads": num_heads,
            "head_size": head_size,
            "topk_tokens": topk_tokens,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigurationError(f"{name} {size} is not allowed; give at least 1")
        if kv_cache_dtype not in _FORMATS:
            raise ConfigurationError(
                f"keys of an indexer are not stored as {kv_cache_dtype!r}; use one of "
                f"{', '.join(_FORMATS)}"
            )
        if kv_cache_dtype == "fp8" and head_size % 4:
            raise ConfigurationError(
                f"fp8 keys of {head_size} numbers would leave their scales unaligned; give a multiple "
                "of 4, or a plain kv_cache_dtype"
            )
        self.num_heads, self.head_size, self.topk_tokens = num_heads, head_size, topk_tokens
        self.kv_cache_dtype, self.layer_name, self.block_size = (
            kv_cache_dtype,
            layer_name,
            block_size,
        )
        self._codec = Fp8PerTokenHeadCodec() if kv_cache_dtype == "fp8" else None
        self._dtype = torch.uint8 if self._codec else kv_cache_torch_dtype(kv_cache_dtype, dtype)
        self.topk_indices_buffer = torch.full(
            (max_num_batched_tokens, topk_tokens), -1, dtype=torch.int32, device=device
        )

    def get_kv_cache_spec(self, block_size: int | None = None) -> MLAAttentionSpec:
        """What it keeps in the cache: one key a token.

        Args:
            block_size: tokens in a block; None: the indexer's.
        """
        codec = self._codec
        return MLAAttentionSpec(
            block_size=self.block_size if block_size is None else block_size,
            head_size=self.head_size,
            dtype=self._dtype,
            state_content_bytes=None if codec is None else self.head_size + codec.scale_bytes(1),
        )

    def choose(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: CommonAttentionMetadata,
    ) -> torch.Tensor:
        """Write this step's keys and fill `topk_indices_buffer`; waits for lengths on the device.

        Args:
            q: (num_tokens, num_heads, head_size).
            k: (num_tokens, head_size).
            weights: (num_tokens, num_heads), scales of the score included.
            kv_cache: (num_blocks, 1, block_size, C), of `get_kv_cache_spec`.
            batch: the step, as the layer's builder gets it.

        Returns:
            The rows of this step, int32 (num_tokens, topk_tokens).

        Raises:
            BatchError: tensors that do not fit the indexer or the batch; nothing has been written.
        """
        num_tokens = int(batch.query_start_loc_cpu[-1])
        shapes = {
            "q": (q, (self.num_heads, self.head_size)),
            "k": (k, (self.head_size,)),
            "weights": (weights, (self.num_heads,)),
        }
        for name, (x, shape) in shapes.items():
            if x.shape[1:] != shape or x.shape[0] < num_tokens:
                raise BatchError(
                    f"{name} of {self.layer_name} has shape {tuple(x.shape)}; give "
                    f"({num_tokens}, {', '.join(map(str, shape))}) for a batch of {num_tokens} tokens"
                )
        page = (1, self.block_size, self.get_kv_cache_spec().content_size)
        if kv_cache.shape[1:] != page or kv_cache.dtype != self._dtype:
            raise BatchError(
                f"{self.layer_name} got a cache of {kv_cache.dtype} {tuple(kv_cache.shape)}; its blocks "
                f"are {page} of {self._dtype}"
            )
        lists = self.topk_indices_buffer
        if num_tokens > lists.shape[0]:
            raise BatchError(
                f"the batch has {num_tokens} tokens, {self.layer_name} lists for {lists.shape[0]}; make "
                "it with a larger max_num_batched_tokens"
            )
        cache = kv_cache[:, 0]
        self._write(k, cache, batch.slot_mapping)
        starts, kv_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for request, kv_len in enumerate(kv_lens):
            start, end = starts[request], starts[request + 1]
            if start == end:
                continue
            keys = self._read(cache, batch.block_table_tensor[request], kv_len)
            rows = max(1, _MAX_PRODUCTS // max(1, kv_len * self.num_heads))
            for first in range(start, end, rows):
                part = slice(first, min(first + rows, end))
                num_seen = torch.arange(part.start - end, part.stop - end, device=q.device)
                num_seen = num_seen + kv_len + 1
                scores = index_scores(q[part], keys, weights[part])
                lists[part] = top_positions(scores, num_seen, self.topk_tokens)
        return lists[:num_tokens]

    def _write(self, k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        written = slot_mapping >= 0
        slots, rows = slot_mapping[written], k[: slot_mapping.shape[0]][written]
        if self._codec is None:
            rows = rows.to(cache.dtype)
        else:
            rows = self._codec.encode(rows, rows.new_ones(1, dtype=torch.float32))
        cache[slots // self.block_size, slots % self.block_size] = rows

    def _read(self, cache: torch.Tensor, table: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Keys of a request in order, float32 (kv_len, head_size)."""
        blocks = table[: -(-kv_len // self.block_size)].long()
        rows = cache[blocks].flatten(0, 1)[:kv_len]
        if self._codec is None:
            return rows.float()
        return self._codec.decode(rows, self.head_size, rows.new_ones(1, dtype=torch.float32))


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
