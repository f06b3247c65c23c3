"""SparseLatentImpl: attention over latents to the keys that each query was told to attend to; and
SparseMLAMetadataBuilder: which requests need not be told.

In: per query a list of positions (`SparseIndexer.topk_indices_buffer`). Out: attention over exactly
those. The rows of a list are pages of one token, and a query with its list is a request of its own, so
the dense decode of a backend does the rest, in every cache format and with every split it has.

A position counts if it is one of the request's and not after the query; anything else (-1, beyond the
length) names no key and reads nothing. A position that is named twice weighs twice. A list without a
key gives zeros, and an LSE of -inf. Lists longer than the context are padded with -1.

Prompts that are told all they see, as an indexer may promise of those that fit a list, are prefilled
like those of layers over all keys: the same keys, expanded once for all queries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch

from attnkit.contract import AttentionLayer, CommonAttentionMetadata, SparseIndexer
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.mla.builder import MLAMetadataBuilder
from attnkit.mla.impl import LatentImpl
from attnkit.mla.plan import DecodePart, MLAMetadata, seen_by_queries

M = TypeVar("M", bound=MLAMetadata)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenRows:
    """Lists of queries as addresses. T queries, lists of k.

    Attributes:
        num_chosen: int32 (T,): keys of each query.
        blocks, offsets: int64 (T, k): where they are, at the front of each row; block 0 behind them.
    """

    num_chosen: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, indices: torch.Tensor, plan: DecodePart, block_size: int) -> ChosenRows:
        """Where the listed keys are; nothing waits for the device.

        Args:
            indices: int32 (T, k), positions in each query's own request.
            plan: of these queries; rows past its last belong to nobody and see nothing.
            block_size: tokens in a block.
        """
        num_tokens, k = indices.shape
        request, num_seen = seen_by_queries(plan.query_start_loc, plan.seq_lens, num_tokens)
        kept = (indices >= 0) & (indices < num_seen[:, None])
        positions = torch.where(kept, indices, 0).long()
        blocks = plan.block_table[request[:, None], positions // block_size].long()
        # Kept ones move to the front, in order; the others meet in a column that is cut off.
        place = torch.where(kept, kept.cumsum(1) - 1, k)
        blocks, offsets = (
            torch.zeros(num_tokens, k + 1, dtype=torch.int64, device=indices.device).scatter_(
                1, place, x
            )[:, :k]
            for x in (blocks, positions % block_size)
        )
        return cls(num_chosen=kept.sum(1, dtype=torch.int32), blocks=blocks, offsets=offsets)

    def pages_of(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache as pages of one token, and the block table of these lists over it.

        Args:
            cache: (num_blocks, block_size, C).

        Returns:
            (pages, 1, C), a view where blocks lie whole rows apart, else a copy of the chosen rows;
            and int32 (T, k).
        """
        if (found := token_pages(cache)) is not None:
            pages, apart = found
            return pages, (self.blocks * apart + self.offsets).int()
        # As bytes, since not every operation knows every 8-bit dtype.
        plain = cache if cache.dtype.itemsize > 1 else cache.view(torch.uint8)
        rows = plain[self.blocks.flatten(), self.offsets.flatten()].view(cache.dtype)
        table = torch.arange(rows.shape[0], dtype=torch.int32, device=cache.device)
        return rows[:, None], table.view(self.blocks.shape)


def token_pages(cache: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """A cache as pages of one token, without copying.

    Args:
        cache: (num_blocks, block_size, C).

    Returns:
        (pages, 1, C), and how many pages lie from one block to the next; None where that is no whole
        number.
    """
    num_blocks, block_size, size = cache.shape
    block_stride, row_stride, _ = cache.stride()
    if not num_blocks or block_stride % row_stride:
        return None
    apart = block_stride // row_stride
    pages = cache.as_strided(
        ((num_blocks - 1) * apart + block_size, 1, size),
        (row_stride, row_stride, 1),
        cache.storage_offset(),
    )
    return pages, apart


def lists_of(indexer: SparseIndexer, num_tokens: int, device: torch.device) -> torch.Tensor:
    """What an indexer tells the queries of a step, int32 (num_tokens, k).

    Raises:
        BatchError: it has fewer lists than there are queries, not int32 ones, or elsewhere.
    """
    lists = indexer.topk_indices_buffer
    is_tensor = isinstance(lists, torch.Tensor)
    if (
        not is_tensor
        or lists.dim() != 2
        or lists.shape[0] < num_tokens
        or (lists.dtype, lists.device) != (torch.int32, device)
    ):
        given = type(lists).__name__
        if is_tensor:
            given = f"{lists.dtype} {tuple(lists.shape)} on {lists.device}"
        raise BatchError(
            f"topk_indices_buffer is {given}; give int32 on {device} with at least {num_tokens} rows, "
            "one per query of the step"
        )
    return lists[:num_tokens]


class SparseMLAMetadataBuilder(MLAMetadataBuilder):
    """Put before a backend's own builder: `class X(SparseMLAMetadataBuilder, DenseBuilder)`. Lists are
    of queries, so requests are decodes, whatever their length, but for those at the end of a batch
    that are told all they see."""

    longest_whole: Callable[[], int] | None = None
    """`SparseLatentImpl.longest_whole` of the layers that it plans for; None: nobody has said it."""

    def count_decodes(self, batch: CommonAttentionMetadata, query_lens: np.ndarray) -> int:
        longest = 0 if self.longest_whole is None else self.longest_whole()
        if not longest or batch.seq_lens_cpu_upper_bound is None:
            return batch.num_reqs
        short = super().count_decodes(batch, query_lens)
        seq_lens = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].numpy()
        told = np.flatnonzero((query_lens > 0) & (seq_lens > longest))
        if not told.size or told[-1] < short:
            return short
        first = int(told[-1]) + 1
        return first + super().count_decodes(batch, query_lens[first:])


class SparseLatentImpl(LatentImpl[M]):
    """Put before a backend's own impl: `class X(SparseLatentImpl[...], DenseImpl)`. Its indexer has
    filled `topk_indices_buffer` for the batch before `forward_mqa` is called."""

    is_sparse: ClassVar[bool] = True
    index_backend: ClassVar[str] = "torch"
    """Of an indexer that runs where this impl does: a name of `LightningIndexer`."""

    @property
    def lists_are_distinct(self) -> bool:
        """The indexer says that it names no position twice, as `LightningIndexer` does. Any other may:
        it is right all the same, and planned for full lists."""
        return bool(getattr(self.indexer, "lists_are_distinct", False))

    def longest_whole(self) -> int:
        """Tokens of a request up to which every query of it is told all that it sees, as an indexer may
        promise (`lists_are_whole_up_to`); 0: of none. Pages on the host are read by lists alone."""
        if self.hisparse_cache is not None:
            return 0
        return int(getattr(self.indexer, "lists_are_whole_up_to", 0))

    def prepare_layer(self) -> None:
        super().prepare_layer()
        if self.indexer is None:
            reason = "the layer has no indexer"
            raise UnsupportedConfiguration(
                f"{self.get_backend_cls().get_name()}: {reason}; give MLAAttention an indexer",
                (reason,),
            )

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """As the dense impl; with a `hisparse_cache` the pages are on the host, and written there."""
        if self.hisparse_cache is None:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
            )
            return
        host, slots = kv_cache.device, slot_mapping.flatten()
        key, value, slots, scale = (x.to(host) for x in (kv_c_normed, k_pe, slots, k_scale))
        self.layer.cache_format.write(key[:, None], value, kv_cache[:, None], slots, scale, scale)
        self.hisparse_cache.forget(slots)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: M,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the first rows of the indexer's lists.

        Raises:
            BatchError: as `lists_of`.
        """
        assert self.indexer is not None, "checked when the impl was made"
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        num_tokens = query.shape[0]
        lists = lists_of(self.indexer, num_tokens, query.device)
        plan = attn_metadata.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        pages, table, num_chosen = self.find_rows(lists, plan, kv_c_and_k_pe_cache)
        # A query a request: its list is its context.
        over_rows = copy.copy(attn_metadata)
        over_rows.decode = DecodePart(
            query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32, device=query.device),
            seq_lens=num_chosen,
            block_table=table,
            max_query_len=1,
            max_seq_len=lists.shape[1],
        )
        return super().forward_mqa(query, pages, over_rows, layer)

    def find_rows(
        self, lists: torch.Tensor, plan: DecodePart, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the listed keys are.

        Args:
            lists: int32 (T, k), positions in each query's own request.
            plan: of these queries.
            cache: (num_blocks, block_size, C), of the layer; on the host with a `hisparse_cache`.

        Returns:
            Pages of one token, (pages, 1, C); int32 (T, k), a block table over them; and int32 (T,), the
            keys of each query.
        """
        chosen = ChosenRows.of(lists, plan, cache.shape[1])
        hot = self.hisparse_cache
        pages, table = chosen.pages_of(cache) if hot is None else hot.pages_of(cache, chosen)
        return pages, table, chosen.num_chosen
