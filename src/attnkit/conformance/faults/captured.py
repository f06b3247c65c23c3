"""Wrong users of graphs, each with one mistake that real ones have made.

In: nothing. Out: `CAPTURED_FAULTS`, name -> the wrong backend and the check that has to catch it, and
`CapturedTwinBackend`, the twin without a mistake: it asks the device for nothing, so any of its steps
can be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnkit.conformance.faults.fault import Fault
from attnkit.conformance.twin import TwinBackend, TwinImpl
from attnkit.contract import (
    COMMON_METADATA_FIELDS,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
)

Tensor = torch.Tensor


class CapturedTwinImpl(TwinImpl):
    """All tokens at once, over all that their block tables have room for, with a mask."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        slot, size = slot_mapping.clamp(min=0), kv_cache.shape[2]
        block, offset = slot // size, slot % size
        new = torch.cat([key, value], dim=-1)[: len(slot)].to(kv_cache.dtype)
        # Tokens without a slot put back what stands in the first one.
        written = (slot_mapping >= 0)[:, None, None]
        kv_cache[block, :, offset] = torch.where(written, new, kv_cache[block, :, offset])

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
        if attn_metadata is None:
            return self.profile(output)
        batch = attn_metadata
        if batch.num_reqs == 0:
            return super().forward(layer, query, key, value, kv_cache, batch, output)
        ends = batch.query_start_loc[1:].contiguous()
        token = torch.arange(batch.num_actual_tokens, dtype=ends.dtype)
        request = torch.searchsorted(ends, token, right=True).clamp(max=batch.num_reqs - 1)
        length = batch.seq_lens[request]
        position = length - (ends[request] - token)
        pages = kv_cache[batch.block_table_tensor[request].long()]
        tokens = pages.transpose(2, 3).flatten(1, 2)[:, : self.num_keys(batch)].float()
        keys = torch.arange(tokens.shape[1])
        ahead = keys - position[:, None]
        seen = self.seen(ahead, True) & (keys < length[:, None]) & (token < ends[-1])[:, None]
        group = self.num_heads // self.num_kv_heads
        k, v = tokens.repeat_interleave(group, dim=2).split(
            [self.head_size, tokens.shape[-1] - self.head_size], dim=-1
        )
        score = torch.einsum("thd,tkhd->htk", query[: len(token)].float(), k)
        score = self.score(score, ahead, seen).masked_fill(~seen, -math.inf)
        sink = self.sinks()[:, None]
        top = torch.maximum(score.amax(-1), sink)
        base = torch.where(torch.isinf(top), 0.0, top)
        weights = torch.exp(score - base[..., None])
        total = weights.sum(-1) + torch.exp(sink - base)
        out = torch.einsum("htk,tkhd->thd", weights, torch.where(seen[..., None, None], v, 0.0))
        output[: len(token)] = (out / torch.where(total == 0, 1.0, total).T[..., None]).to(
            output.dtype
        )
        if not self.need_to_return_lse_for_decode:
            return output
        return output, (base + torch.log(total)).T

    def num_keys(self, batch: CommonAttentionMetadata) -> int | None:
        """Keys to look at; None: all there is room for."""
        return None


class CapturedTwinBuilder(CommonMetadataBuilder):
    """The batch itself is the plan, so what a graph reads is where the engine put it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class CapturedTwinBackend(TwinBackend):
    """Claims that its steps can be captured, and of the twin's features those of causal decoders."""

    impl_cls: ClassVar[type[TwinImpl]] = CapturedTwinImpl
    builder_cls: ClassVar[type[AttentionMetadataBuilder[Any]]] = CapturedTwinBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_tree_mask(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False


@dataclass
class _BoundedBatch(CommonAttentionMetadata):
    """A plan with a number of the host's."""

    longest: int | None = None


class FreshTensorsBuilder(CapturedTwinBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        batch = common_attn_metadata
        return batch.replace(block_table_tensor=batch.block_table_tensor.clone())


class LongestBuilder(CapturedTwinBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        batch = common_attn_metadata
        assert batch.seq_lens_cpu_upper_bound is not None
        return _BoundedBatch(
            **{name: getattr(batch, name) for name in COMMON_METADATA_FIELDS},
            longest=int(batch.seq_lens_cpu_upper_bound.max()),
        )


class LongestOfThePlan(CapturedTwinImpl):
    def num_keys(self, batch: CommonAttentionMetadata) -> int | None:
        assert isinstance(batch, _BoundedBatch)
        return batch.longest


class LongestReadAtLaunch(CapturedTwinImpl):
    def num_keys(self, batch: CommonAttentionMetadata) -> int | None:
        assert batch.seq_lens_cpu_upper_bound is not None
        return int(batch.seq_lens_cpu_upper_bound.max())


class LengthsReadFromTheDevice(CapturedTwinImpl):
    def num_keys(self, batch: CommonAttentionMetadata) -> int | None:
        return max(batch.seq_lens.tolist())


def _fault(**attributes: Any) -> Fault:
    backend = type("WrongCapturedTwinBackend", (CapturedTwinBackend,), attributes)
    return Fault(backend=backend, caught_by="law:captured_steps_replay")


CAPTURED_FAULTS: dict[str, Fault] = {
    # The graph goes on reading the tensors of its capture.
    "plans in fresh tensors": _fault(builder_cls=FreshTensorsBuilder),
    # It goes on with the number of its capture, which no error says.
    "a host number of the plan": _fault(builder_cls=LongestBuilder, impl_cls=LongestOfThePlan),
    "a host copy read at launch": _fault(impl_cls=LongestReadAtLaunch),
    # It cannot be captured at all.
    "lengths read from the device": _fault(impl_cls=LengthsReadFromTheDevice),
}
