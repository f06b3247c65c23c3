"""Mistakes in scores and what is made of them: scale, cap, bias, sinks, softmax, LSE, heads.

In: nothing. Out: `SCORE_FAULTS`.
"""

from __future__ import annotations

import math

import torch

from attnkit.conformance.faults.fault import FaultTable
from attnkit.conformance.twin import TwinBackend, TwinImpl

Tensor = torch.Tensor

SCORE_FAULTS = FaultTable(TwinBackend)


# Scores.


@SCORE_FAULTS.caught_by("case:plain-decode-fp32")
class ScaleTwice(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return super().score(score * self.scale, ahead, seen)


@SCORE_FAULTS.caught_by("case:scale-decode-fp32")
class ScaleOfTheHeadSize(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return super().score(score * self.head_size**-0.5 / self.scale, ahead, seen)


@SCORE_FAULTS.caught_by("case:softcap-decode-fp32")
class SoftCapIgnored(TwinImpl):
    def cap(self, score: Tensor) -> Tensor:
        return score


@SCORE_FAULTS.caught_by("case:softcap-decode-fp32")
class SoftCapBeforeScale(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return self.cap(score) * self.scale + self.bias(ahead)


@SCORE_FAULTS.caught_by("case:softcap-prefill-fp32")
class SoftCapAfterMask(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        # tanh(-inf) is -1, so a masked key comes back with the score -cap.
        masked = (score * self.scale).masked_fill(~seen, -math.inf)
        return self.cap(masked) + self.bias(ahead)

    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().softmax(score, seen | (self.variant.logits_soft_cap is not None), v)


@SCORE_FAULTS.caught_by("case:saturated_cap-decode-fp32")
class SoftCapOverflows(TwinImpl):
    def cap(self, score: Tensor) -> Tensor:
        cap = self.variant.logits_soft_cap
        if cap is None:
            return score
        up, down = torch.exp(score / cap), torch.exp(-score / cap)
        return cap * (up - down) / (up + down)


@SCORE_FAULTS.caught_by("case:alibi-decode-fp32")
class AlibiIgnored(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        return torch.zeros(())


@SCORE_FAULTS.caught_by("case:alibi-decode-fp32")
class AlibiSignFlipped(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        return -super().bias(ahead)


@SCORE_FAULTS.caught_by("case:lse+alibi-decode-fp32")
class AlibiCountsFromTheNextToken(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        # A constant per row: the softmax does not show it, the LSE does.
        return super().bias(ahead - 1)


@SCORE_FAULTS.caught_by("case:alibi-decode-fp32")
class AlibiSlopesInKvHeadOrder(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        bias = super().bias(ahead)
        if bias.dim() == 0:
            return bias
        order = torch.arange(self.num_heads).view(self.num_kv_heads, -1).T.flatten()
        return bias[order]


@SCORE_FAULTS.caught_by("case:alibi_sqrt-decode-fp32")
class AlibiSquareRootIgnored(TwinImpl):
    def bias(self, ahead: Tensor) -> Tensor:
        slopes = self.variant.alibi_slopes
        return torch.zeros(()) if slopes is None else slopes[:, None, None] * ahead


@SCORE_FAULTS.caught_by("case:softcap+alibi-decode-fp32")
class AlibiInsideTheCap(TwinImpl):
    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return self.cap(score * self.scale + self.bias(ahead))


# Sinks and softmax.


@SCORE_FAULTS.caught_by("case:sinks-decode-fp32")
class SinkIgnored(TwinImpl):
    def sinks(self) -> Tensor:
        return torch.full((self.num_heads,), -math.inf)


@SCORE_FAULTS.caught_by("case:sinks-decode-fp32")
class SinkCountedTwice(TwinImpl):
    def sinks(self) -> Tensor:
        return super().sinks() + math.log(2)


@SCORE_FAULTS.caught_by("case:sinks-decode-fp32")
class SinkScaled(TwinImpl):
    def sinks(self) -> Tensor:
        return super().sinks() * self.scale


@SCORE_FAULTS.caught_by("case:softcap+sinks-decode-fp32")
class SinkCapped(TwinImpl):
    def sinks(self) -> Tensor:
        sinks = super().sinks()
        return torch.where(torch.isinf(sinks), sinks, self.cap(sinks))


@SCORE_FAULTS.caught_by("case:sinks-decode-fp32")
class SinkAddedToTheFirstKey(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.variant.sinks is not None and score.shape[-1]:
            score = score.clone()
            score[..., 0] += self.variant.sinks[:, None]
        return super().softmax(score, seen, v)

    def sinks(self) -> Tensor:
        return torch.full((self.num_heads,), -math.inf)


@SCORE_FAULTS.caught_by("case:lse+sinks-decode-fp32")
class SinkLeftOutOfTheMaximum(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        score = score.masked_fill(~seen, -math.inf)
        top = score.amax(-1, keepdim=True)
        weights = torch.exp(score - top)
        total = weights.sum(-1) + torch.exp(self.sinks()[:, None] - top[..., 0])
        out = torch.einsum("hqk,khd->qhd", weights, v) / total.T[..., None]
        return out, (top[..., 0] + torch.log(total)).T


@SCORE_FAULTS.caught_by("case:peaked-decode-fp32")
class NoMaximumSubtracted(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.exp(score.masked_fill(~seen, -math.inf))
        total = weights.sum(-1) + torch.exp(self.sinks()[:, None])
        out = torch.einsum("hqk,khd->qhd", weights, v) / total.T[..., None]
        return out, torch.log(total).T


@SCORE_FAULTS.caught_by("case:more_queries_than_keys")
class RowsWithoutKeysAverage(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # A finite sentinel: where every score is the sentinel, every key weighs the same.
        return super().softmax(score.masked_fill(~seen, -1e30), torch.ones_like(seen), v)


@SCORE_FAULTS.caught_by("case:more_queries_than_keys")
class RowsWithoutKeysLeft(TwinImpl):
    def store(self, output: Tensor, lse: Tensor, rows: slice, out: Tensor, row_lse: Tensor) -> None:
        some = ~torch.isneginf(row_lse)
        output[rows][some] = out[some].to(output.dtype)
        lse[rows] = row_lse


@SCORE_FAULTS.caught_by("case:long_context-bf16")
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


@SCORE_FAULTS.caught_by("case:lse-decode-fp32")
class LseInBaseTwo(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        return super().lse(top, total, sink) / math.log(2)


@SCORE_FAULTS.caught_by("case:lse+sinks-decode-fp32")
class LseWithoutTheSink(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        return super().lse(top, total - torch.exp(sink - top), sink)


@SCORE_FAULTS.caught_by("case:more_queries_than_keys")
class LsePlusInfinityWithoutKeys(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        lse = super().lse(top, total, sink)
        return torch.where(torch.isneginf(lse), math.inf, lse)


@SCORE_FAULTS.caught_by("case:lse-decode-fp32")
class LseInKvHeadOrder(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        lse = super().lse(top, total, sink)
        return lse.unflatten(1, (self.num_kv_heads, -1)).transpose(1, 2).flatten(1)


@SCORE_FAULTS.caught_by("law:parts_merge_by_their_lse")
class LseOfTheMaximumOnly(TwinImpl):
    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        return torch.where(total == 0, -math.inf, top.expand_as(total)).T


# Heads.


@SCORE_FAULTS.caught_by("case:plain-decode-fp32")
class HeadsInterleaved(TwinImpl):
    def per_query_head(self, x: Tensor) -> Tensor:
        return x.float().repeat(1, self.num_heads // self.num_kv_heads, 1)


@SCORE_FAULTS.caught_by("case:heads_40_2-decode")
class HeadTileCrossesIntoTheNextGroup(TwinImpl):
    def per_query_head(self, x: Tensor) -> Tensor:
        tile_start = torch.arange(self.num_heads) // 16 * 16
        group = self.num_heads // self.num_kv_heads
        heads = torch.arange(self.num_heads) if group <= 16 else tile_start
        return x.float()[:, heads // group]
