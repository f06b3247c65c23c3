"""Mistakes in plans and batches, and in what a backend says of itself.

In: nothing. Out: `PLAN_FAULTS`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attnkit.conformance.faults.fault import FaultTable
from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import CommonAttentionMetadata, CommonMetadataBuilder
from attnkit.errors import UnsupportedConfiguration

Tensor = torch.Tensor

PLAN_FAULTS = FaultTable(TwinBackend)


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


@PLAN_FAULTS.caught_by("case:padding-decode-fp32", builder_cls=_ClampingBuilder)
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


@PLAN_FAULTS.caught_by("law:plans_are_not_remembered", builder_cls=_ForgetfulBuilder)
class LengthsOfAnEarlierBatch(TwinImpl):
    pass


class _StuckBuilder(CommonMetadataBuilder):
    def update_block_table(
        self, metadata: CommonAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> CommonAttentionMetadata:
        return metadata.replace(slot_mapping=slot_mapping)


@PLAN_FAULTS.caught_by("law:plan_follows_another_block_table", builder_cls=_StuckBuilder)
class UpdatedTableForgotten(TwinImpl):
    pass


@PLAN_FAULTS.caught_by("law:runs_are_repeatable")
class AddsNoise(TwinImpl):
    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().softmax(score, seen, v)
        return out * (1 + 1e-7 * torch.randint(0, 2, out.shape)), lse


@PLAN_FAULTS.caught_by(
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


@PLAN_FAULTS.caught_by("law:the_device_has_the_last_word_on_lengths")
class LengthsOfTheHost(TwinImpl):
    def rows(self, batch: CommonAttentionMetadata, request: int) -> slice:
        start, end = batch.query_start_loc_cpu[request : request + 2].tolist()
        return slice(start, end)


# Claims.


@PLAN_FAULTS.caught_by("claim:attention sinks")
class ClaimsSinksAndRefusesThem(TwinImpl):
    def __init__(self, *args: Any, **extras: Any) -> None:
        if "sinks" in extras:
            raise UnsupportedConfiguration("no sinks", ("no sinks",))
        super().__init__(*args, **extras)


@PLAN_FAULTS.caught_by("claim:attention sinks")
class SaysNoToSinksAndTakesThem(TwinBackend):
    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        return super().validate_configuration(*args, **{**asked, "has_sink": False})


@PLAN_FAULTS.caught_by("claim:dtype float64")
class RefusesWithoutAReason(TwinBackend):
    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        return ["" for _ in super().validate_configuration(*args, **asked)]
