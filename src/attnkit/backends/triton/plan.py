"""The plan of a batch for the Triton kernels, and the builder that makes it.

In: a `CommonAttentionMetadata`. Out: `TritonMetadata`: the batch's device tensors as they are, and the
few host numbers that decide which kernels are launched and how much memory their parts need. Lengths
of single requests are read by the kernels on the device, so a plan serves any batch that is put into
the same tensors and stays within those numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from attnkit.backends.triton.operands import Parts, SplitOperands
from attnkit.contract import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    CrossAttentionSpec,
    KVCacheSpec,
    max_decode_query_len,
)


class Workspace:
    """Float32 memory shared by the layers of a group, which run one after the other.

    It grows and never shrinks, and keeps what it outgrew: captured graphs still write there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []
        self._parts: tuple[tuple[int, ...], Parts | None] = ((), None)

    def reserve(self, numel: int) -> torch.Tensor:
        """At least `numel` elements, the same ones as long as they suffice; contents are undefined."""
        if not self._memory or self._memory[-1].numel() < numel:
            self._memory.append(torch.empty(numel, dtype=torch.float32, device=self._device))
        return self._memory[-1]

    def parts(self, step: SplitOperands, part_rows: int, max_segments: int) -> Parts:
        """Parts of these sizes, the same ones as long as layers ask alike."""
        shape = (step.num_reqs, part_rows, step.query.shape[1], max_segments, step.head_size_v)
        known_shape, parts = self._parts
        if parts is None or shape != known_shape:
            memory = self.reserve(Parts.numel(step, part_rows, max_segments))
            parts = Parts.of(memory, step, part_rows, max_segments)
            self._parts = (shape, parts)
        return parts


# Neither frozen nor with slots: engines' wrappers subclass plans and assign their slot_mapping.
@dataclass(kw_only=True, eq=False)
class TritonMetadata:
    """A planned batch of R requests.

    Attributes:
        num_actual_tokens: rows of q and output to look at.
        query_start_loc: int32 (R + 1,).
        kv_lens: int32 (R,), keys in the cache: `seq_lens`, or the encoder's for cross attention.
        block_table: int32 (R, W).
        block_size: tokens in a page, as the batch says it; None: it does not.
        views: what wrappers made of the batch, outermost first.
        slot_mapping: int64 (T,).
        causal: of all requests, or bool (R,).
        spans: int32 (T, 2), keys that a token sees beside its layer's mask (`mm_token_spans`).
        prefix_lens: int32 (R,), keys below are not left of any window.
        tree: int64 (T,), which of its request's tokens a token sees (`tree_mask`).
        max_query_len: no request has more queries.
        min_query_len: no request but an empty one has fewer.
        max_kv_len: no request has more keys; sizes memory, never masks.
        longest_to_mean: how many times as long as the mean the longest context is; 1 if unknown.
        decode_query_len: width of the engine's decodes, 1 + drafts.
        is_captured: launched into a graph, which other lengths will be replayed with.
        workspace: for states of requests that programs share.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor
    block_size: int | None
    views: tuple[str, ...]
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    spans: torch.Tensor | None
    prefix_lens: torch.Tensor | None
    tree: torch.Tensor | None
    max_query_len: int
    min_query_len: int
    max_kv_len: int
    longest_to_mean: float
    decode_query_len: int
    is_captured: bool
    workspace: Workspace


class TritonMetadataBuilder(AttentionMetadataBuilder[TritonMetadata]):
    """Copies nothing and launches nothing: a plan costs a few host operations.

    The number of query heads is not part of a cache spec, so memory for parts is reserved by the first
    layer that runs, outside of any graph if the engine warms up before it captures.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._decode_query_len = max_decode_query_len(vllm_config)
        self._workspace = Workspace(torch.device(device))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMetadata:
        """Plan a batch. A common prefix is not used: its pages are read per request."""
        batch = common_attn_metadata
        kv_lens, kv_lens_cpu, max_kv_len = _kv_lens(batch, self.kv_cache_spec)
        return TritonMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            kv_lens=kv_lens,
            block_table=batch.block_table_tensor,
            block_size=batch.block_size,
            views=self.views_of(batch),
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
            spans=batch.mm_token_spans(),
            prefix_lens=batch.checked_rswa_prefix_lens(),
            tree=batch.checked_tree_mask(),
            max_query_len=batch.max_query_len,
            min_query_len=_min_query_len(batch),
            max_kv_len=max_kv_len,
            longest_to_mean=longest_to_mean(kv_lens_cpu),
            decode_query_len=self._decode_query_len,
            is_captured=False,
            workspace=self._workspace,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonMetadata:
        """Plan for any batch of at most these requests, tokens and queries per request, and of any
        contexts: every kernel that one of them may need is launched."""
        plan = self.build(0, common_attn_metadata)
        longest = self.vllm_config.model_config.max_model_len
        return replace(
            plan,
            min_query_len=1,
            max_kv_len=max(plan.max_kv_len, longest),
            is_captured=True,
        )

    def update_block_table(
        self, metadata: TritonMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TritonMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: TritonMetadata) -> None:
        """Nothing to do: kernels read the lengths that the engine updates in place."""


def _kv_lens(
    batch: CommonAttentionMetadata, spec: KVCacheSpec
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Lengths of what the cache holds: on the device, on the host if known, and their maximum."""
    if not isinstance(spec, CrossAttentionSpec):
        return batch.seq_lens, batch.seq_lens_cpu_upper_bound, batch.max_seq_len
    assert batch.encoder_seq_lens is not None, "cross attention needs encoder_seq_lens"
    if batch.encoder_seq_lens_cpu is None:
        return batch.encoder_seq_lens, None, spec.max_encoder_tokens
    lens_cpu = torch.as_tensor(batch.encoder_seq_lens_cpu)
    return batch.encoder_seq_lens, lens_cpu, int(lens_cpu.max()) if len(lens_cpu) else 0


def _min_query_len(batch: CommonAttentionMetadata) -> int:
    """Fewest queries of any request that is not empty.

    The device's lengths may differ from the host's among decodes, so only requests known to be
    prefilling count with their length; any other may have a single query.
    """
    if batch.is_prefilling is None or batch.max_query_len <= 1:
        return 1
    # numpy on the same memory: torch takes three times as long for arrays of this size.
    query_lens = np.diff(batch.query_start_loc_cpu.numpy())
    there = query_lens > 0
    if not there.any() or (there & ~batch.is_prefilling.numpy()).any():
        return 1
    return int(query_lens[there].min())


def longest_to_mean(kv_lens_cpu: torch.Tensor | None) -> float:
    """Ratio of the longest to the mean context, padding rows aside."""
    if kv_lens_cpu is None:
        return 1.0
    lens = kv_lens_cpu.numpy()
    num_there = np.count_nonzero(lens)
    return float(lens.max() * num_there / lens.sum(dtype=np.int64)) if num_there else 1.0
