"""Wrong backends, each with one mistake that real ones have made: the kit must catch every one.

In: nothing. Out: `FAULTS`, name -> the wrong backend and the check that has to catch it. A judge that
cannot fail judges nothing; `tests/conformance/test_faults.py` shows that this one does, and that
the `twin` without a mistake passes the same check.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import (
    AttentionBackend,
    AttentionType,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    QuantKey,
    kFp8StaticTensorSym,
)
from attnkit.errors import UnsupportedConfiguration

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mistake.

    Attributes:
        backend: the twin with it.
        caught_by: name of the check that must fail.
    """

    backend: type[AttentionBackend]
    caught_by: str


FAULTS: dict[str, Fault] = {}

_Cls = TypeVar("_Cls", bound=type)


def _caught_by(check: str, **backend: Any) -> Callable[[_Cls], _Cls]:
    """Enter an impl with a mistake, or a backend, into the table.

    Args:
        check: that must fail.
        backend: attributes of its backend that differ from the twin's.
    """

    def enter(cls: _Cls) -> _Cls:
        if issubclass(cls, TwinBackend):
            wrong = cls
        else:
            wrong = type(f"{cls.__name__}Backend", (TwinBackend,), {"impl_cls": cls, **backend})
        FAULTS[cls.__name__] = Fault(backend=wrong, caught_by=check)
        return cls

    return enter


# What a query sees.


@_caught_by("case:window-decode-fp32")
class WindowOneWider(TwinImpl):
    def window(self) -> int | None:
        window = super().window()
        return None if window is None else window + 1


@_caught_by("case:window-decode-fp32")
class WindowOneNarrower(TwinImpl):
    def window(self) -> int | None:
        window = super().window()
        return None if window is None else window - 1


@_caught_by("case:window-prefill-bf16")
class WindowIgnored(TwinImpl):
    def window(self) -> int | None:
        return None


@_caught_by("case:window+non_causal-mixed-fp32")
class WindowOneSidedWhenNotCausal(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        window = self.window()
        return seen if window is None else seen & (ahead > -window)


@_caught_by("case:window+encoder_only-mixed-fp32")
class WindowOneSidedInEncoders(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        seen, window = super().seen(ahead, causal), self.window()
        if self.variant.attn_type is AttentionType.ENCODER_ONLY and window is not None:
            return ahead > -window
        return seen


@_caught_by("case:plain-prefill-fp32")
class CausalityIgnored(TwinImpl):
    def causal(self, batch: CommonAttentionMetadata, request: int) -> bool:
        return False


@_caught_by("case:plain-prefill-fp32")
class NextTokenSeen(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        return super().seen(ahead - 1, causal) if causal else super().seen(ahead, causal)


@_caught_by("case:plain-extend-fp32")
class CausalFromTheTopLeft(TwinImpl):
    def ahead(self, q_len: int, kv_len: int) -> Tensor:
        return torch.arange(kv_len)[None, :] - torch.arange(q_len)[:, None]


@_caught_by("case:encoder_only-prefill-fp32")
class EncoderIsCausal(TwinImpl):
    def causal(self, batch: CommonAttentionMetadata, request: int) -> bool:
        return (
            True
            if self.variant.attn_type is not AttentionType.DECODER
            else super().causal(batch, request)
        )


@_caught_by("law:causality_is_per_request")
class OneCausalFlagForAll(TwinImpl):
    def causal(self, batch: CommonAttentionMetadata, request: int) -> bool:
        return super().causal(batch, 0)


@_caught_by("law:new_tokens_are_seen_once")
class NewestTokenMissed(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        return super().seen(ahead, causal) & (ahead != 0)


@_caught_by("law:new_tokens_are_seen_once")
class NewestTokenCountedTwice(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return super().score(score, ahead, seen) + math.log(2) * (ahead == 0)


# Trees.


@_caught_by("case:tree-prefill-fp32")
class TreeIgnored(TwinImpl):
    def words(self, batch: CommonAttentionMetadata, rows: slice) -> Tensor | None:
        return None


@_caught_by("law:a_tree_is_its_paths")
class TreeCountsFromTheFirstKey(TwinImpl):
    def new(self, keys: Tensor, context: int) -> Tensor:
        return keys


@_caught_by("case:tree-extend-fp32")
class TreeHidesTheContext(TwinImpl):
    def of_tree(self, seen: Tensor, ahead: Tensor, words: Tensor) -> Tensor:
        context = ahead.shape[1] - ahead.shape[0]
        return super().of_tree(seen, ahead, words) & (torch.arange(ahead.shape[1]) >= context)


@_caught_by("case:tree-mixed-fp32")
class WordsOfTheFirstRequest(TwinImpl):
    def words(self, batch: CommonAttentionMetadata, rows: slice) -> Tensor | None:
        return super().words(batch, slice(0, rows.stop - rows.start))


@_caught_by("case:tree-of_64")
class TreeOf63(TwinImpl):
    def words(self, batch: CommonAttentionMetadata, rows: slice) -> Tensor | None:
        words = super().words(batch, rows)
        return None if words is None else words & ((1 << 63) - 1)


# Ranges that are seen in both directions.


@_caught_by("case:mm_prefix-prefill-fp32")
class RangesIgnored(TwinImpl):
    def ranges(self, batch: CommonAttentionMetadata, request: int) -> list[tuple[int, int]]:
        return []


@_caught_by("case:mm_prefix-prefill-fp32")
class RangeEndsBeforeItsLastPosition(TwinImpl):
    def inside(self, positions: Tensor, first: int, last: int) -> Tensor:
        return super().inside(positions, first, last - 1)


@_caught_by("case:mm_prefix-extend-fp32")
class RangesCountFromTheFirstNewToken(TwinImpl):
    def with_range(self, seen: Tensor, ahead: Tensor, first: int, last: int) -> Tensor:
        context = ahead.shape[1] - ahead.shape[0]
        return super().with_range(seen, ahead, first + context, last + context)


@_caught_by("case:mm_prefix-mixed-fp32")
class RangesOfTheFirstRequest(TwinImpl):
    def ranges(self, batch: CommonAttentionMetadata, request: int) -> list[tuple[int, int]]:
        return super().ranges(batch, 0)


@_caught_by("case:mm_prefix-prefill-fp32")
class AllRangesAreOne(TwinImpl):
    def ranges(self, batch: CommonAttentionMetadata, request: int) -> list[tuple[int, int]]:
        spans = super().ranges(batch, request)
        return [(spans[0][0], spans[-1][1])] if spans else []


@_caught_by("case:gemma3-mixed-fp32")
class RangeCutByTheWindow(TwinImpl):
    def with_range(self, seen: Tensor, ahead: Tensor, first: int, last: int) -> Tensor:
        window = self.window()
        wider = super().with_range(seen, ahead, first, last)
        return wider if window is None else wider & (ahead > -window)


@_caught_by("case:gemma3-mixed-fp32")
class RangeSwitchesTheWindowOff(TwinImpl):
    def with_range(self, seen: Tensor, ahead: Tensor, first: int, last: int) -> Tensor:
        wider = super().with_range(seen, ahead, first, last)
        q_len, kv_len = ahead.shape
        rows = self.inside(torch.arange(kv_len - q_len, kv_len), first, last)
        return wider | rows[:, None] & (ahead <= 0)


# Prefixes that no window hides.


@_caught_by("case:rswa-decode-fp32")
class PrefixIgnored(TwinImpl):
    def prefix(self, batch: CommonAttentionMetadata, request: int) -> int:
        return 0


@_caught_by("case:rswa-decode-fp32")
class PrefixWithoutItsLastToken(TwinImpl):
    def prefix(self, batch: CommonAttentionMetadata, request: int) -> int:
        return super().prefix(batch, request) - 1


@_caught_by("case:rswa-decode-fp32")
class PrefixOfTheFirstRequest(TwinImpl):
    def prefix(self, batch: CommonAttentionMetadata, request: int) -> int:
        return super().prefix(batch, 0)


@_caught_by("case:rswa-prefill-fp32")
class PrefixSeesItsOwnFuture(TwinImpl):
    def in_prefix(self, ahead: Tensor, prefix: int) -> Tensor:
        return (torch.arange(ahead.shape[1]) < prefix).expand_as(ahead)


@_caught_by("case:rswa-mixed-fp32")
class PrefixInPlaceOfTheWindow(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        return super().seen(ahead, causal) & (self.variant.sliding_window is None)


# Scores.


@_caught_by("case:plain-decode-fp32")
class ScaleTwice(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return super().score(score * self.scale, ahead, seen)


@_caught_by("case:scale-decode-fp32")
class ScaleOfTheHeadSize(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return super().score(score * self.head_size**-0.5 / self.scale, ahead, seen)


@_caught_by("case:softcap-decode-fp32")
class SoftCapIgnored(TwinImpl):
    def cap(self, score: Tensor) -> Tensor:
        return score


@_caught_by("case:softcap-decode-fp32")
class SoftCapBeforeScale(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return self.cap(score) * self.scale + self.bias(ahead)


@_caught_by("case:softcap-prefill-fp32")
class SoftCapAfterMask(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        # tanh(-inf) is -1, so a masked key comes back with the score -cap.
        masked = (score * self.scale).masked_fill(~seen, -math.inf)
        return self.cap(masked) + self.bias(ahead)

    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().softmax(score, seen | (self.variant.logits_soft_cap is not None), v)


@_caught_by("case:saturated_cap-decode-fp32")
class SoftCapOverflows(TwinImpl):
    def cap(self, score: Tensor) -> Tensor:
        cap = self.variant.logits_soft_cap
        if cap is None:
            return score
        up, down = torch.exp(score / cap), torch.exp(-score / cap)
        return cap * (up - down) / (up + down)


@_caught_by("case:alibi-decode-fp32")
class AlibiIgnored(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        return torch.zeros(())


@_caught_by("case:alibi-decode-fp32")
class AlibiSignFlipped(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        return -super().bias(ahead)


@_caught_by("case:lse+alibi-decode-fp32")
class AlibiCountsFromTheNextToken(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        # A constant per row: the softmax does not show it, the LSE does.
        return super().bias(ahead - 1)


@_caught_by("case:alibi-decode-fp32")
class AlibiSlopesInKvHeadOrder(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        bias = super().bias(ahead)
        if bias.dim() == 0:
            return bias
        order = torch.arange(self.num_heads).view(self.num_kv_heads, -1).T.flatten()
        return bias[order]


@_caught_by("case:alibi_sqrt-decode-fp32")
class AlibiSquareRootIgnored(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        slopes = self.variant.alibi_slopes
        return torch.zeros(()) if slopes is None else slopes[:, None, None] * ahead


@_caught_by("case:softcap+alibi-decode-fp32")
class AlibiInsideTheCap(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return self.cap(score * self.scale + self.bias(ahead))


# Sinks and softmax.


@_caught_by("case:sinks-decode-fp32")
class SinkIgnored(TwinImpl):
    def sinks(self) -> Tensor:
        return torch.full((self.num_heads,), -math.inf)


@_caught_by("case:sinks-decode-fp32")
class SinkCountedTwice(TwinImpl):
    def sinks(self) -> Tensor:
        return super().sinks() + math.log(2)


@_caught_by("case:sinks-decode-fp32")
class SinkScaled(TwinImpl):
    def sinks(self) -> Tensor:
        return super().sinks() * self.scale


@_caught_by("case:softcap+sinks-decode-fp32")
class SinkCapped(TwinImpl):
    def sinks(self) -> Tensor:
        sinks = super().sinks()
        return torch.where(torch.isinf(sinks), sinks, self.cap(sinks))


@_caught_by("case:sinks-decode-fp32")
class SinkAddedToTheFirstKey(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.variant.sinks is not None and score.shape[-1]:
            score = score.clone()
            score[..., 0] += self.variant.sinks[:, None]
        return super().softmax(score, seen, v)

    def sinks(self) -> Tensor:
        return torch.full((self.num_heads,), -math.inf)


@_caught_by("case:lse+sinks-decode-fp32")
class SinkLeftOutOfTheMaximum(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        score = score.masked_fill(~seen, -math.inf)
        top = score.amax(-1, keepdim=True)
        weights = torch.exp(score - top)
        total = weights.sum(-1) + torch.exp(self.sinks()[:, None] - top[..., 0])
        out = torch.einsum("hqk,khd->qhd", weights, v) / total.T[..., None]
        return out, (top[..., 0] + torch.log(total)).T


@_caught_by("case:peaked-decode-fp32")
class NoMaximumSubtracted(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.exp(score.masked_fill(~seen, -math.inf))
        total = weights.sum(-1) + torch.exp(self.sinks()[:, None])
        out = torch.einsum("hqk,khd->qhd", weights, v) / total.T[..., None]
        return out, torch.log(total).T


@_caught_by("case:more_queries_than_keys")
class RowsWithoutKeysAverage(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # A finite sentinel: where every score is the sentinel, every key weighs the same.
        return super().softmax(score.masked_fill(~seen, -1e30), torch.ones_like(seen), v)


@_caught_by("case:more_queries_than_keys")
class RowsWithoutKeysLeft(TwinImpl):
    def store(self, output: Tensor, lse: Tensor, rows: slice, out: Tensor, row_lse: Tensor) -> None:
        some = ~torch.isneginf(row_lse)
        output[rows][some] = out[some].to(output.dtype)
        lse[rows] = row_lse


@_caught_by("case:long_context-bf16")
class AccumulatesInTheOutputDtype(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().softmax(score, seen, v)
        weights = torch.exp(score.masked_fill(~seen, -math.inf) - lse.T[..., None])
        total = torch.zeros_like(out, dtype=torch.bfloat16)
        for key in range(v.shape[0]):
            term = weights[..., key].T[..., None].bfloat16() * v[key].bfloat16()
            total = total + term.nan_to_num()
        return total.float(), lse


# LSE.


@_caught_by("case:lse-decode-fp32")
class LseInBaseTwo(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        return super().lse(top, total, sink) / math.log(2)


@_caught_by("case:lse+sinks-decode-fp32")
class LseWithoutTheSink(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        return super().lse(top, total - torch.exp(sink - top), sink)


@_caught_by("case:more_queries_than_keys")
class LsePlusInfinityWithoutKeys(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        lse = super().lse(top, total, sink)
        return torch.where(torch.isneginf(lse), math.inf, lse)


@_caught_by("case:lse-decode-fp32")
class LseInKvHeadOrder(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        lse = super().lse(top, total, sink)
        return lse.unflatten(1, (self.num_kv_heads, -1)).transpose(1, 2).flatten(1)


@_caught_by("law:parts_merge_by_their_lse")
class LseOfTheMaximumOnly(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        return torch.where(total == 0, -math.inf, top.expand_as(total)).T


# Heads.


@_caught_by("case:plain-decode-fp32")
class HeadsInterleaved(TwinImpl):
    def per_query_head(self, x: Tensor) -> Tensor:
        return x.float().repeat(1, self.num_heads // self.num_kv_heads, 1)


@_caught_by("case:heads_40_2-decode")
class HeadTileCrossesIntoTheNextGroup(TwinImpl):
    def per_query_head(self, x: Tensor) -> Tensor:
        tile_start = torch.arange(self.num_heads) // 16 * 16
        group = self.num_heads // self.num_kv_heads
        heads = torch.arange(self.num_heads) if group <= 16 else tile_start
        return x.float()[:, heads // group]


# Pages and lengths.


@_caught_by("case:block_ids_above_32768")
class BlockIdsOf16SignedBits(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        return super().block_table(batch, request).to(torch.int16).long()


@_caught_by("case:block_ids_above_65536")
class BlockIdsOf16Bits(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        return super().block_table(batch, request) & 0xFFFF


@_caught_by("case:plain-decode-fp32")
class ReadsPastTheLength(TwinImpl):
    def kv_len(self, batch: CommonAttentionMetadata, request: int) -> int:
        return super().kv_len(batch, request) + 1


@_caught_by("case:padding-decode-fp32")
class LongestLengthForAll(TwinImpl):
    def kv_len(self, batch: CommonAttentionMetadata, request: int) -> int:
        width = batch.block_table_tensor.shape[1] * 16
        return min(batch.max_seq_len, width) if super().kv_len(batch, request) else 0


@_caught_by("case:plain-mixed-fp32")
class EmptyRequestsShiftTheOthers(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        lens = batch.query_start_loc.diff().tolist()
        return super().block_table(batch, sum(n > 0 for n in lens[:request]))


@_caught_by("case:plain-decode-fp32")
class LastPageOfAnotherRequest(TwinImpl):
    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        table = super().block_table(batch, request).clone()
        last = max(0, self.kv_len(batch, request) - 1) // 16
        table[last:] = batch.block_table_tensor[request - 1][0].long()
        return table


@_caught_by("case:block_size_32-extend")
class PagesOf16Assumed(TwinImpl):
    def gather(self, kv_cache: Tensor, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(kv_len)
        blocks = table[(positions // 16).clamp(max=table.shape[0] - 1)]
        tokens = kv_cache[blocks, :, positions % min(16, kv_cache.shape[2])].float()
        return tokens[..., : self.head_size], tokens[..., self.head_size :]


@_caught_by("case:layout_LBNHC-decode")
class HeadsBeforeTokensAssumed(TwinImpl):
    def gather(self, kv_cache: Tensor, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        dense = torch.empty(kv_cache.shape, device="meta").stride()
        return super().gather(kv_cache.as_strided(kv_cache.shape, dense), table, kv_len)


@_caught_by("case:window-decode-fp32")
class WeightZeroTimesNaN(TwinImpl):
    def values(self, v: Tensor, seen: Tensor) -> Tensor:
        return v


@_caught_by("case:window-decode-fp32")
class MaskAddedToNaN(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().softmax(score + torch.where(seen, 0.0, -1e30), torch.ones_like(seen), v)


@_caught_by("law:unread_memory_does_not_matter")
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


@_caught_by("case:padding-decode-fp32")
class SlotMinusOneIsTheLast(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, slot % (kv_cache.shape[0] * kv_cache.shape[2]), key, value)


@_caught_by("case:padding-decode-fp32")
class PaddingWrittenToTheNullBlock(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, max(0, slot), key, value)


@_caught_by("case:plain-decode-fp32")
class TokenWrittenTwice(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, slot, key, value)
        if slot >= 0:
            super().put(kv_cache, slot + 1, key, value)


@_caught_by("case:plain-decode-fp32")
class TokenRoundedOnTheWay(_Writer):
    def put(self, kv_cache: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
        super().put(kv_cache, slot, key.bfloat16(), value)


@_caught_by("case:plain-decode-fp32")
class ValueBeforeKey(TwinImpl):
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, value, key, kv_cache, slot_mapping)


@_caught_by("law:strides_do_not_matter")
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


@_caught_by("law:shared_cache_is_only_read", forward_includes_kv_cache_update=True)
class SharingLayerWrites(_WritesItself):
    pass


@_caught_by("case:plain-decode-fp32", forward_includes_kv_cache_update=True)
class NobodyWrites(TwinImpl):
    pass


@_caught_by("case:plain-decode-fp32", forward_includes_kv_cache_update=True)
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


@_caught_by("law:codes_of_outputs_are_those_of_numbers")
class ScaleOfTheOutputIgnored(TwinImpl):
    """Codes are the numbers themselves, whatever the next layer's scale is."""

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return quant_key == kFp8StaticTensorSym

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
        rows = torch.zeros(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, rows)
        output.copy_(rows.view_as(output))
        return (output, result[1]) if isinstance(result, tuple) else output


@_caught_by("case:padding-decode-fp32")
class PaddingRowsZeroed(TwinImpl):
    def finish(self, output: Tensor, lse: Tensor, batch: CommonAttentionMetadata) -> None:
        output[batch.num_actual_tokens :] = 0


@_caught_by("law:profiling_writes_zeros")
class ProfilingLeavesTheOutput(TwinImpl):
    def profile(self, output: Tensor) -> Tensor:
        return output


@_caught_by("case:plain-decode-fp32")
class QueryScaledInPlace(TwinImpl):
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
        query.mul_(self.scale)
        return result


@_caught_by("law:lse_is_float32_per_token_and_head")
class LseInTheOutputDtype(TwinImpl):
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
        return (result[0], result[1].to(output.dtype)) if isinstance(result, tuple) else result


# Plans and batches.


class _ClampingBuilder(CommonMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        common_attn_metadata.seq_lens.clamp_(min=1)
        return common_attn_metadata


@_caught_by("case:padding-decode-fp32", builder_cls=_ClampingBuilder)
class BuildingChangesTheBatch(TwinImpl):
    pass


class _ForgetfulBuilder(CommonMetadataBuilder):
    plan: CommonAttentionMetadata | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        first = self.plan or common_attn_metadata
        self.plan = first
        if common_attn_metadata.num_reqs == first.num_reqs:
            return common_attn_metadata.replace(seq_lens=first.seq_lens)
        return common_attn_metadata


@_caught_by("law:plans_are_not_remembered", builder_cls=_ForgetfulBuilder)
class LengthsOfAnEarlierBatch(TwinImpl):
    pass


class _StuckBuilder(CommonMetadataBuilder):
    def update_block_table(
        self, metadata: CommonAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> CommonAttentionMetadata:
        return metadata.replace(slot_mapping=slot_mapping)


@_caught_by("law:plan_follows_another_block_table", builder_cls=_StuckBuilder)
class UpdatedTableForgotten(TwinImpl):
    pass


@_caught_by("law:runs_are_repeatable")
class AddsNoise(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().softmax(score, seen, v)
        return out * (1 + 1e-7 * torch.randint(0, 2, out.shape)), lse


@_caught_by(
    "law:batch_mates_do_not_matter", supports_batch_invariance=classmethod(lambda cls: True)
)
class SplitsByTheBatch(TwinImpl):
    cut = 1

    def rows(self, batch: CommonAttentionMetadata, request: int) -> slice:
        self.cut = 1 if batch.num_reqs == 1 else 8
        return super().rows(batch, request)

    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cut = min(self.cut, v.shape[0])
        out, lse = super().softmax(score, seen, v)
        weights = torch.exp(score.masked_fill(~seen, -math.inf) - lse.T[..., None])
        parts = [
            torch.einsum("hqk,khd->qhd", weights[..., part], v[part])
            for part in (slice(0, cut), slice(cut, None))
        ]
        return sum(parts, torch.zeros_like(out)), lse


@_caught_by("law:the_device_has_the_last_word_on_lengths")
class LengthsOfTheHost(TwinImpl):
    def rows(self, batch: CommonAttentionMetadata, request: int) -> slice:
        start, end = batch.query_start_loc_cpu[request : request + 2].tolist()
        return slice(start, end)


# Claims.


@_caught_by("claim:attention sinks")
class ClaimsSinksAndRefusesThem(TwinImpl):
    def __init__(self, *args: Any, **extras: Any) -> None:
        if "sinks" in extras:
            raise UnsupportedConfiguration("no sinks", ("no sinks",))
        super().__init__(*args, **extras)


@_caught_by("claim:attention sinks")
class SaysNoToSinksAndTakesThem(TwinBackend):
    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        return super().validate_configuration(*args, **{**asked, "has_sink": False})


@_caught_by("claim:dtype float64")
class RefusesWithoutAReason(TwinBackend):
    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        return ["" for _ in super().validate_configuration(*args, **asked)]
