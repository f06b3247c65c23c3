"""Wrong backends over latents, each with one mistake that real ones have made: the kit must catch each.

In: nothing. Out: `MLA_FAULTS`, as `conformance.faults.FAULTS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from attnkit.conformance.faults.fault import Fault
from attnkit.conformance.mla.twin import (
    SparseTwinMLABackend,
    SparseTwinMLAImpl,
    TwinMLABackend,
    TwinMLAImpl,
)
from attnkit.contract import CommonAttentionMetadata
from attnkit.errors import UnsupportedConfiguration
from attnkit.mla.builder import MLAMetadataBuilder
from attnkit.mla.plan import ContextChunk, MLAMetadata

Tensor = torch.Tensor

MLA_FAULTS: dict[str, Fault] = {}

_Cls = TypeVar("_Cls", bound=type)


def _caught_by(check: str) -> Callable[[_Cls], _Cls]:
    """Enter an impl, a builder or a backend with a mistake into the table."""

    def enter(cls: _Cls) -> _Cls:
        if issubclass(cls, TwinMLABackend):
            wrong: Any = cls
        else:
            part = "impl_cls" if issubclass(cls, TwinMLAImpl) else "builder_cls"
            right = SparseTwinMLABackend if issubclass(cls, SparseTwinMLAImpl) else TwinMLABackend
            wrong = type(f"{cls.__name__}Backend", (right,), {part: cls})
        MLA_FAULTS[cls.__name__] = Fault(backend=wrong, caught_by=check)
        return cls

    return enter


# Scores and values.


@_caught_by("case:plain-decode-fp32")
class RotatedPartForgotten(TwinMLAImpl):
    def latent_score(self, q: Tensor, latents: Tensor) -> Tensor:
        return super().latent_score(q[..., : self.rank], latents[:, : self.rank])


@_caught_by("case:plain-decode-fp32")
class ValuesFromTheEndOfTheRow(TwinMLAImpl):
    def latent_values(self, latents: Tensor) -> Tensor:
        return latents[:, self.rope :]


@_caught_by("case:plain-decode-fp32")
class ScaleOfTheLatent(TwinMLAImpl):
    """The absorbed query is longer, the scale is still that of the head."""

    def softmax_scale(self) -> float:
        return (self.rank + self.rope) ** -0.5


@_caught_by("case:scale-prefill-fp32")
class ScaleOfTheHead(TwinMLAImpl):
    def softmax_scale(self) -> float:
        return (self.nope + self.rope) ** -0.5


@_caught_by("case:plain-prefill-fp32")
class KeysOfTheNextHead(TwinMLAImpl):
    def expand(self, latents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, value = super().expand(latents, dtype)
        return key.roll(1, dims=-2), value


@_caught_by("case:plain-prefill-fp32")
class RotatedPartOfTheFirstHeadOnly(TwinMLAImpl):
    def expand(self, latents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key, value = super().expand(latents, dtype)
        key[..., 1:, self.nope :] = 0
        return key, value


# What a query sees.


@_caught_by("law:absorbed_is_expanded")
class DraftsSeeLaterDrafts(TwinMLAImpl):
    """A kernel for one query each, given several."""

    def seen(self, q_len: int, kv_len: int) -> Tensor:
        return torch.ones(q_len, kv_len, dtype=torch.bool)


@_caught_by("case:drafts-extend-fp32")
class CausalFromTheTopLeft(TwinMLAImpl):
    def seen(self, q_len: int, kv_len: int) -> Tensor:
        return torch.arange(kv_len)[None, :] <= torch.arange(q_len)[:, None]


@_caught_by("case:plain-decode-fp32")
class NewestTokenMissed(TwinMLAImpl):
    def seen(self, q_len: int, kv_len: int) -> Tensor:
        return super().seen(q_len, kv_len) & (torch.arange(kv_len) < kv_len - 1)


@_caught_by("case:drafts-extend-fp32")
class TablesIndexedByRow(TwinMLAImpl):
    """Right for one query a request only."""

    def table_row(self, plan: Any, request: int, first_row: int) -> Tensor:
        return plan.block_table[min(first_row, len(plan.block_table) - 1)]


# Context in chunks.


@_caught_by("case:plain-extend-fp32")
class ContextForgotten(TwinMLAImpl):
    def add_chunk(self, *args: Any) -> None:
        return


@_caught_by("case:plain-extend-fp32")
class PagesReadWhole(TwinMLAImpl):
    """What stands behind the context in its last page is taken for context."""

    def chunk_lens(self, chunk: ContextChunk, block_size: int) -> list[int]:
        return [-(-n // block_size) * block_size for n in chunk.kv_lens.tolist()]


@_caught_by("case:contexts_here_and_there-two_pages")
class EmptyPartsMergeToNaN(TwinMLAImpl):
    def merge(
        self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        empty = (part_lse == -math.inf)[..., None]
        out, lse = super().merge(out, lse, part, part_lse)
        return torch.where(empty, math.nan, out), lse


@_caught_by("law:workspace_does_not_matter")
class LaterChunksReplaceEarlierOnes(TwinMLAImpl):
    def add_chunk(self, q: Tensor, cache: Tensor, chunk: ContextChunk, *rest: Any) -> None:
        if chunk.rows.stop == q.shape[0]:
            super().add_chunk(q, cache, chunk, *rest)


@_caught_by("case:plain-extend-fp32")
class MergedByMeans(TwinMLAImpl):
    def merge(
        self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        return (out + part) / 2, torch.logaddexp(lse, part_lse)


@_caught_by("law:workspace_does_not_matter")
class ChunksBeginAtTheFirstPage(MLAMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if plan.prefill is None or len(plan.prefill.chunks) < 2:
            return plan
        first, *others = plan.prefill.chunks
        wrong = [dataclasses.replace(c, pages=first.pages[: len(c.pages)]) for c in others]
        wrong = [
            w if len(w.pages) == len(c.pages) else c for w, c in zip(wrong, others, strict=True)
        ]
        prefill = dataclasses.replace(plan.prefill, chunks=(first, *wrong))
        return dataclasses.replace(plan, prefill=prefill)


# The cache.


@_caught_by("case:plain-prefill-fp32")
class RotatedPartFirst(TwinMLAImpl):
    def row(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor) -> Tensor:
        return torch.cat([k_pe[0], kv_c])


@_caught_by("case:fp8-decode-fp32")
class ScaleOfTheCacheIgnored(TwinMLAImpl):
    def numbers(self, contents: Tensor, k_scale: Tensor) -> Tensor:
        return super().numbers(contents, torch.ones_like(k_scale))


@_caught_by("case:fp8-prefill-fp32")
class OwnTokensNotReadBack(TwinMLAImpl):
    """Prompts attend to what was not yet rounded, later chunks to what was."""

    def own(self, kv_c: Tensor, k_pe: Tensor, cache: Tensor, k_scale: Tensor) -> Tensor:
        return torch.cat([kv_c, k_pe[:, 0]], dim=-1).float()


@_caught_by("case:padding-decode-fp32")
class SlotMinusOneIsTheLastSlot(TwinMLAImpl):
    def slots(self, slot_mapping: Tensor) -> list[tuple[int, int]]:
        return list(enumerate(slot_mapping.tolist()))


@_caught_by("case:padding-decode-fp32")
class PaddingGoesToTheNullBlock(TwinMLAImpl):
    def slots(self, slot_mapping: Tensor) -> list[tuple[int, int]]:
        return list(enumerate(slot_mapping.clamp(min=0).tolist()))


@_caught_by("case:plain-decode-fp32")
class LastTokenNotWritten(TwinMLAImpl):
    def slots(self, slot_mapping: Tensor) -> list[tuple[int, int]]:
        return super().slots(slot_mapping)[:-1]


# Rows without keys, LSE.


@_caught_by("case:no_key_at_all-drafts")
class RowsWithoutKeysAreNaN(TwinMLAImpl):
    def softmax(self, score: Tensor, seen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().softmax(score, seen, value)
        return torch.where(lse[..., None] == -math.inf, math.nan, out), lse


@_caught_by("case:no_key_at_all-drafts")
class LseOfNothingIsZero(TwinMLAImpl):
    def lse(self, lse: Tensor) -> Tensor:
        return torch.where(lse == -math.inf, 0.0, lse)


@_caught_by("case:lse-decode-fp32")
class LseInBaseTwo(TwinMLAImpl):
    def lse(self, lse: Tensor) -> Tensor:
        return lse / math.log(2)


@_caught_by("case:lse-mixed-fp32")
class LseOfDecodesOnly(TwinMLAImpl):
    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        super().forward_mha(*args, **kwargs)


# Plans.


@_caught_by("law:order_of_requests_does_not_matter")
class AllShortRequestsCountAsDecodes(MLAMetadataBuilder):
    """Those behind a prompt too, whose rows are not at the front."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        batch = common_attn_metadata
        plan = super().build(common_prefix_len, batch, fast_build)
        lens = batch.query_start_loc_cpu.diff()
        short = int((lens <= (self.reorder_batch_threshold or 1)).sum())
        if plan.decode is None or short == plan.num_decodes:
            return plan
        tokens = int(batch.query_start_loc_cpu[short])
        decode = dataclasses.replace(
            plan.decode,
            query_start_loc=batch.query_start_loc[: short + 1],
            seq_lens=batch.seq_lens[:short],
            block_table=batch.block_table_tensor[:short],
        )
        return dataclasses.replace(
            plan,
            decode=decode,
            num_decode_tokens=tokens,
            num_prefill_tokens=plan.num_prefill_tokens - (tokens - plan.num_decode_tokens),
        )


@_caught_by("law:plans_are_not_remembered")
class FirstPlanKept(MLAMetadataBuilder):
    _plan: MLAMetadata | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        if self._plan is None:
            self._plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self._plan


@_caught_by("law:the_device_has_the_last_word_on_lengths")
class HostLengthsOfDecodes(MLAMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        batch = common_attn_metadata
        host = batch.replace(query_start_loc=batch.query_start_loc_cpu)
        return super().build(common_prefix_len, host, fast_build)


@_caught_by("case:plain-decode-fp32")
class LengthsMadeLocalInPlace(MLAMetadataBuilder):
    """The batch is everybody's."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if plan.decode is not None:
            local = plan.decode.seq_lens.clone()
            plan.decode.seq_lens.add_(1)
            plan = dataclasses.replace(
                plan, decode=dataclasses.replace(plan.decode, seq_lens=local)
            )
        return plan


@_caught_by("law:states_of_several_tokens")
class ContextsOfAtLeastOneKey(MLAMetadataBuilder):
    """A query that sees nothing looks at the first row of a page."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        lens = common_attn_metadata.seq_lens.clamp(min=1)
        batch = common_attn_metadata.replace(seq_lens=lens)
        return super().build(common_prefix_len, batch, fast_build)


# Chosen keys.


@_caught_by("case:told-decode-fp32")
class ListsIgnored(SparseTwinMLAImpl):
    def times_named(self, lists: Tensor, seen: Tensor) -> Tensor:
        return seen


@_caught_by("case:told-extend-fp32")
class ListOfTheFirstQuery(SparseTwinMLAImpl):
    def times_named(self, lists: Tensor, seen: Tensor) -> Tensor:
        return super().times_named(lists[:1].expand_as(lists), seen)


@_caught_by("law:lists_may_name_anything")
class MinusOneIsTheLastKey(SparseTwinMLAImpl):
    def times_named(self, lists: Tensor, seen: Tensor) -> Tensor:
        return super().times_named(torch.where(lists == -1, seen.sum(1)[:, None] - 1, lists), seen)


@_caught_by("law:lists_may_name_anything")
class ListsEndAtMinusOne(SparseTwinMLAImpl):
    def times_named(self, lists: Tensor, seen: Tensor) -> Tensor:
        return super().times_named(torch.where((lists < 0).cumsum(1) > 0, -1, lists), seen)


@_caught_by("law:lists_may_name_anything")
class NamedTwiceWeighsOnce(SparseTwinMLAImpl):
    def times_named(self, lists: Tensor, seen: Tensor) -> Tensor:
        return super().times_named(lists, seen).clamp(max=1)


@_caught_by("law:lists_may_name_anything")
class KeysAfterTheQueryAreTaken(SparseTwinMLAImpl):
    def seen(self, q_len: int, kv_len: int) -> Tensor:
        return torch.ones(q_len, kv_len, dtype=torch.bool)


@_caught_by("law:lists_may_name_anything")
class FarPositionsAreClamped(SparseTwinMLAImpl):
    def times_named(self, lists: Tensor, seen: Tensor) -> Tensor:
        return super().times_named(lists.clamp(max=seen.shape[1] - 1), seen)


# Noise.


@_caught_by("law:runs_are_repeatable")
class Noisy(TwinMLAImpl):
    def softmax(self, score: Tensor, seen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().softmax(score, seen, value)
        return out + 1e-9 * torch.randn_like(out), lse


# Words.


@_caught_by("claim:cache format fp8_ds_mla")
class FormatsOfWords(TwinMLABackend):
    """Says it takes a format and does not."""

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto", "fp8", "fp8_ds_mla")

    @classmethod
    def get_impl_cls(cls) -> type[TwinMLAImpl]:
        return _PlainOnly


class _PlainOnly(TwinMLAImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.stored.name == "fp8_ds_mla":
            raise UnsupportedConfiguration("mla_twin: no", ("no",))


@_caught_by("claim:keys and values")
class TakesKeysAndValues(TwinMLABackend):
    """A dense layer is let in."""

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        reasons = super().validate_configuration(*args, **kwargs)
        return [reason for reason in reasons if "dense" not in reason]
