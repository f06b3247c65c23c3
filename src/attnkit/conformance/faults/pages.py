"""Mistakes with pages: which are read, up to which length, and what is written to them.

In: nothing. Out: `PAGE_FAULTS`.
"""

from __future__ import annotations

from typing import Any

import torch

from attnkit.conformance.faults.fault import FaultTable
from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import CommonAttentionMetadata

Tensor = torch.Tensor

PAGE_FAULTS = FaultTable(TwinBackend)


# Pages and lengths.


@PAGE_FAULTS.caught_by("case:block_ids_above_32768")
class BlockIdsOf16SignedBits(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        return super().block_table(batch, request).to(torch.int16).long()


@PAGE_FAULTS.caught_by("case:block_ids_above_65536")
class BlockIdsOf16Bits(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        return super().block_table(batch, request) & 0xFFFF


@PAGE_FAULTS.caught_by("case:plain-decode-fp32")
class ReadsPastTheLength(TwinImpl):
    def kv_len(self, batch: CommonAttentionMetadata, request: int) -> int:
        return super().kv_len(batch, request) + 1


@PAGE_FAULTS.caught_by("case:padding-decode-fp32")
class LongestLengthForAll(TwinImpl):
    def kv_len(self, batch: CommonAttentionMetadata, request: int) -> int:
        width = batch.block_table_tensor.shape[1] * 16
        return min(batch.max_seq_len, width) if super().kv_len(batch, request) else 0


@PAGE_FAULTS.caught_by("case:plain-mixed-fp32")
class EmptyRequestsShiftTheOthers(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        lens = batch.query_start_loc.diff().tolist()
        return super().block_table(batch, sum(n > 0 for n in lens[:request]))


@PAGE_FAULTS.caught_by("case:plain-decode-fp32")
class LastPageOfAnotherRequest(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        table = super().block_table(batch, request).clone()
        last = max(0, self.kv_len(batch, request) - 1) // 16
        table[last:] = batch.block_table_tensor[request - 1][0].long()
        return table


@PAGE_FAULTS.caught_by("case:block_size_32-extend")
class PagesOf16Assumed(TwinImpl):
    def gather(self, kv_cache: Tensor, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(kv_len)
        blocks = table[(positions // 16).clamp(max=table.shape[0] - 1)]
        tokens = kv_cache[blocks, :, positions % min(16, kv_cache.shape[2])].float()
        return tokens[..., : self.head_size], tokens[..., self.head_size :]


@PAGE_FAULTS.caught_by("case:layout_LBNHC-decode")
class HeadsBeforeTokensAssumed(TwinImpl):
    def gather(self, kv_cache: Tensor, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        dense = torch.empty(kv_cache.shape, device="meta").stride()
        return super().gather(kv_cache.as_strided(kv_cache.shape, dense), table, kv_len)


@PAGE_FAULTS.caught_by("case:window-decode-fp32")
class WeightZeroTimesNaN(TwinImpl):
    def values(self, v: Tensor, seen: Tensor) -> Tensor:
        return v


@PAGE_FAULTS.caught_by("case:window-decode-fp32")
class MaskAddedToNaN(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().softmax(score + torch.where(seen, 0.0, -1e30), torch.ones_like(seen), v)


@PAGE_FAULTS.caught_by("law:unread_memory_does_not_matter")
class NaNTakenForNothing(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # A mask by NaN works until the unread memory holds numbers.
        window = self.variant.sliding_window
        if window is not None:
            seen = seen | ~torch.isnan(score).all(0)
        return super().softmax(score, seen, v)


# Writes.


class _Writer(TwinImpl):
    """A twin that writes slot by slot through `put`."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        for row, slot in enumerate(slot_mapping.tolist()):
            self.put(kv_cache, slot, key[row], value[row])

    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        if slot >= 0:
            block_size = kv_cache.shape[2]
            cell = kv_cache[slot // block_size, :, slot % block_size]
            cell[:, : self.head_size] = key.to(cell.dtype)
            cell[:, self.head_size :] = value.to(cell.dtype)


@PAGE_FAULTS.caught_by("case:padding-decode-fp32")
class SlotMinusOneIsTheLast(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, slot % (kv_cache.shape[0] * kv_cache.shape[2]), key, value)


@PAGE_FAULTS.caught_by("case:padding-decode-fp32")
class PaddingWrittenToTheNullBlock(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, max(0, slot), key, value)


@PAGE_FAULTS.caught_by("case:plain-decode-fp32")
class TokenWrittenTwice(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, slot, key, value)
        if slot >= 0:
            super().put(kv_cache, slot + 1, key, value)


@PAGE_FAULTS.caught_by("case:plain-decode-fp32")
class TokenRoundedOnTheWay(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, slot, key.bfloat16(), value)


@PAGE_FAULTS.caught_by("case:plain-decode-fp32")
class ValueBeforeKey(TwinImpl):
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, value, key, kv_cache, slot_mapping)


@PAGE_FAULTS.caught_by("law:strides_do_not_matter")
class RowsAssumedDense(TwinImpl):
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        dense = torch.empty(key.shape, device="meta").stride()
        super().do_kv_cache_update(
            layer, key.as_strided(key.shape, dense), value, kv_cache, slot_mapping
        )


class _WritesItself(TwinImpl):
    """A twin whose `forward` writes the cache."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if attn_metadata is not None and kv_cache.numel():
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)


@PAGE_FAULTS.caught_by("law:shared_cache_is_only_read", forward_includes_kv_cache_update=True)
class SharingLayerWrites(_WritesItself):
    pass


@PAGE_FAULTS.caught_by("case:plain-decode-fp32", forward_includes_kv_cache_update=True)
class NobodyWrites(TwinImpl):
    pass


@PAGE_FAULTS.caught_by("case:plain-decode-fp32", forward_includes_kv_cache_update=True)
class WrittenAfterAttention(TwinImpl):
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        if attn_metadata is not None and kv_cache.numel():
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        return result
