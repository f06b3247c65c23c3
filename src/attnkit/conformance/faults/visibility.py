"""Mistakes in what a query sees: windows, causality, trees, ranges, prefixes.

In: nothing. Out: `VISIBILITY_FAULTS`.
"""

from __future__ import annotations

import math

import torch

from attnkit.conformance.faults.fault import FaultTable
from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import AttentionType, CommonAttentionMetadata

Tensor = torch.Tensor

VISIBILITY_FAULTS = FaultTable(TwinBackend)


@VISIBILITY_FAULTS.caught_by("case:window-decode-fp32")
class WindowOneWider(TwinImpl):
    def window(self) -> int | None:
        window = super().window()
        return None if window is None else window + 1


@VISIBILITY_FAULTS.caught_by("case:window-decode-fp32")
class WindowOneNarrower(TwinImpl):
    def window(self) -> int | None:
        window = super().window()
        return None if window is None else window - 1


@VISIBILITY_FAULTS.caught_by("case:window-prefill-bf16")
class WindowIgnored(TwinImpl):
    def window(self) -> int | None:
        return None


@VISIBILITY_FAULTS.caught_by("case:window+non_causal-mixed-fp32")
class WindowOneSidedWhenNotCausal(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        window = self.window()
        return seen if window is None else seen & (ahead > -window)


@VISIBILITY_FAULTS.caught_by("case:window+encoder_only-mixed-fp32")
class WindowOneSidedInEncoders(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        seen, window = super().seen(ahead, causal), self.window()
        if self.variant.attn_type is AttentionType.ENCODER_ONLY and window is not None:
            return ahead > -window
        return seen


@VISIBILITY_FAULTS.caught_by("case:plain-prefill-fp32")
class CausalityIgnored(TwinImpl):
    def causal(self, batch: CommonAttentionMetadata, request: int) -> bool:
        return False


@VISIBILITY_FAULTS.caught_by("case:plain-prefill-fp32")
class NextTokenSeen(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        return super().seen(ahead - 1, causal) if causal else super().seen(ahead, causal)


@VISIBILITY_FAULTS.caught_by("case:plain-extend-fp32")
class CausalFromTheTopLeft(TwinImpl):
    def ahead(self, q_len: int, kv_len: int) -> Tensor:
        return torch.arange(kv_len)[None, :] - torch.arange(q_len)[:, None]


@VISIBILITY_FAULTS.caught_by("case:encoder_only-prefill-fp32")
class EncoderIsCausal(TwinImpl):
    def causal(self, batch: CommonAttentionMetadata, request: int) -> bool:
        return (
            True
            if self.variant.attn_type is not AttentionType.DECODER
            else super().causal(batch, request)
        )


@VISIBILITY_FAULTS.caught_by("law:causality_is_per_request")
class OneCausalFlagForAll(TwinImpl):
    def causal(self, batch: CommonAttentionMetadata, request: int) -> bool:
        return super().causal(batch, 0)


@VISIBILITY_FAULTS.caught_by("law:new_tokens_are_seen_once")
class NewestTokenMissed(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        return super().seen(ahead, causal) & (ahead != 0)


@VISIBILITY_FAULTS.caught_by("law:new_tokens_are_seen_once")
class NewestTokenCountedTwice(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return super().score(score, ahead, seen) + math.log(2) * (ahead == 0)


# Trees.


@VISIBILITY_FAULTS.caught_by("case:tree-prefill-fp32")
class TreeIgnored(TwinImpl):
    def words(self, batch: CommonAttentionMetadata, rows: slice) -> Tensor | None:
        return None


@VISIBILITY_FAULTS.caught_by("law:a_tree_is_its_paths")
class TreeCountsFromTheFirstKey(TwinImpl):
    def new(self, keys: Tensor, context: int) -> Tensor:
        return keys


@VISIBILITY_FAULTS.caught_by("case:tree-extend-fp32")
class TreeHidesTheContext(TwinImpl):
    def of_tree(self, seen: Tensor, ahead: Tensor, words: Tensor) -> Tensor:
        context = ahead.shape[1] - ahead.shape[0]
        return super().of_tree(seen, ahead, words) & (torch.arange(ahead.shape[1]) >= context)


@VISIBILITY_FAULTS.caught_by("case:tree-mixed-fp32")
class WordsOfTheFirstRequest(TwinImpl):
    def words(self, batch: CommonAttentionMetadata, rows: slice) -> Tensor | None:
        return super().words(batch, slice(0, rows.stop - rows.start))


@VISIBILITY_FAULTS.caught_by("case:tree-of_64")
class TreeOf63(TwinImpl):
    def words(self, batch: CommonAttentionMetadata, rows: slice) -> Tensor | None:
        words = super().words(batch, rows)
        return None if words is None else words & ((1 << 63) - 1)


# Ranges that are seen in both directions.


@VISIBILITY_FAULTS.caught_by("case:mm_prefix-prefill-fp32")
class RangesIgnored(TwinImpl):
    def ranges(self, batch: CommonAttentionMetadata, request: int) -> list[tuple[int, int]]:
        return []


@VISIBILITY_FAULTS.caught_by("case:mm_prefix-prefill-fp32")
class RangeEndsBeforeItsLastPosition(TwinImpl):
    def inside(self, positions: Tensor, first: int, last: int) -> Tensor:
        return super().inside(positions, first, last - 1)


@VISIBILITY_FAULTS.caught_by("case:mm_prefix-extend-fp32")
class RangesCountFromTheFirstNewToken(TwinImpl):
    def with_range(self, seen: Tensor, ahead: Tensor, first: int, last: int) -> Tensor:
        context = ahead.shape[1] - ahead.shape[0]
        return super().with_range(seen, ahead, first + context, last + context)


@VISIBILITY_FAULTS.caught_by("case:mm_prefix-mixed-fp32")
class RangesOfTheFirstRequest(TwinImpl):
    def ranges(self, batch: CommonAttentionMetadata, request: int) -> list[tuple[int, int]]:
        return super().ranges(batch, 0)


@VISIBILITY_FAULTS.caught_by("case:mm_prefix-prefill-fp32")
class AllRangesAreOne(TwinImpl):
    def ranges(self, batch: CommonAttentionMetadata, request: int) -> list[tuple[int, int]]:
        spans = super().ranges(batch, request)
        return [(spans[0][0], spans[-1][1])] if spans else []


@VISIBILITY_FAULTS.caught_by("case:gemma3-mixed-fp32")
class RangeCutByTheWindow(TwinImpl):
    def with_range(self, seen: Tensor, ahead: Tensor, first: int, last: int) -> Tensor:
        window = self.window()
        wider = super().with_range(seen, ahead, first, last)
        return wider if window is None else wider & (ahead > -window)


@VISIBILITY_FAULTS.caught_by("case:gemma3-mixed-fp32")
class RangeSwitchesTheWindowOff(TwinImpl):
    def with_range(self, seen: Tensor, ahead: Tensor, first: int, last: int) -> Tensor:
        wider = super().with_range(seen, ahead, first, last)
        q_len, kv_len = ahead.shape
        rows = self.inside(torch.arange(kv_len - q_len, kv_len), first, last)
        return wider | rows[:, None] & (ahead <= 0)


# Prefixes that no window hides.


@VISIBILITY_FAULTS.caught_by("case:rswa-decode-fp32")
class PrefixIgnored(TwinImpl):
    def prefix(self, batch: CommonAttentionMetadata, request: int) -> int:
        return 0


@VISIBILITY_FAULTS.caught_by("case:rswa-decode-fp32")
class PrefixWithoutItsLastToken(TwinImpl):
    def prefix(self, batch: CommonAttentionMetadata, request: int) -> int:
        return super().prefix(batch, request) - 1


@VISIBILITY_FAULTS.caught_by("case:rswa-decode-fp32")
class PrefixOfTheFirstRequest(TwinImpl):
    def prefix(self, batch: CommonAttentionMetadata, request: int) -> int:
        return super().prefix(batch, 0)


@VISIBILITY_FAULTS.caught_by("case:rswa-prefill-fp32")
class PrefixSeesItsOwnFuture(TwinImpl):
    def in_prefix(self, ahead: Tensor, prefix: int) -> Tensor:
        return (torch.arange(ahead.shape[1]) < prefix).expand_as(ahead)


@VISIBILITY_FAULTS.caught_by("case:rswa-mixed-fp32")
class PrefixInPlaceOfTheWindow(TwinImpl):
    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        return super().seen(ahead, causal) & (self.variant.sliding_window is None)
