"""AttentionMetadataBuilder: plan once per batch for a group of equal layers.

In: a `CommonAttentionMetadata`. Out: the backend's own plan, which every layer of the group runs
with. Building is the one place that may allocate, read host lengths or launch planning work; it
never waits for the device and never writes into the common metadata.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

import numpy as np
import torch

from attnkit.contract.config import max_decode_query_len
from attnkit.contract.kv_cache_spec import CrossAttentionSpec, KVCacheSpec
from attnkit.contract.metadata import CommonAttentionMetadata
from attnkit.contract.types import AttentionCGSupport

M = TypeVar("M")
"""The plan a builder makes."""


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Made once per group of layers with equal spec and backend."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    """Default answer of `get_cudagraph_support`; ask that instead."""

    reorder_batch_threshold: int | None = None
    """Requests with at most this many query tokens should come first in a batch. None: no wish. The
    engine reorders by the minimum over its builders."""

    supports_update_block_table: bool = False
    """`update_block_table` is there."""

    requires_block_table_width: ClassVar[bool] = False
    """The constructor takes a keyword `block_table_width`: columns of the kernel block table. Layers,
    which do not know it, refuse such a builder."""

    supports_draft_decode_metadata_update: bool = False
    """`update_draft_decode_metadata` refreshes everything that changes between draft steps, so one
    build serves a whole chain of drafts."""

    @abstractmethod
    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        """Keep the group's facts; subclasses call this.

        Args:
            kv_cache_spec: of the group; its block_size is the kernel's.
            layer_names: of the group.
            vllm_config: `VllmConfig`, ours or vLLM's.
            device: where plans live.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        self.kernel_block_size: int | None = None

    @classmethod
    def get_plan_cls(cls) -> type | None:
        """The class of its plans: the parameter of `AttentionMetadataBuilder[Plan]`; layers refuse
        anything else before they write. None: it does not say."""
        for base in cls.__mro__:
            for parent in base.__dict__.get("__orig_bases__", ()):
                origin = get_origin(parent)
                if isinstance(origin, type) and issubclass(origin, AttentionMetadataBuilder):
                    plan = get_args(parent)[0]
                    is_protocol = getattr(plan, "_is_protocol", False)
                    return (
                        plan if isinstance(plan, type) and plan != Any and not is_protocol else None
                    )
        return None

    @classmethod
    def get_views(cls, kv_cache_spec: KVCacheSpec) -> tuple[str, ...]:
        """What its plans are of, where not of a batch as an engine makes it: `views` of a batch. Asked
        by layers, which refuse plans of anything else."""
        return ("encoder outputs",) if isinstance(kv_cache_spec, CrossAttentionSpec) else ()

    def views_of(self, batch: CommonAttentionMetadata) -> tuple[str, ...]:
        """What a plan for it is to say in its `views`."""
        return (*batch.views, *self.get_views(self.kv_cache_spec))

    def set_kernel_block_size(self, kernel_block_size: int) -> None:
        """Called by engines whose spec carries a larger block size than the kernel's."""
        self.kernel_block_size = kernel_block_size

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Which batches this builder's plans can be replayed for; asked before one is made."""
        return cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: Any, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        """Longest query L of the ragged decode batches one captured graph can replay.

        Such a graph replays every batch whose real requests have 1 to L tokens and whose padding
        rows have none, lengths read on the device. None: it cannot, or replays any batch anyway
        (ALWAYS).
        """
        return None

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """Set `reorder_batch_threshold` from the configuration; called by constructors.

        Args:
            reorder_batch_threshold: the least it is.
            supports_spec_as_decode: the decode kernel verifies drafts, so it grows to their width.
            supports_dcp_with_varlen: decodes of several tokens work over DCP ranks; without it the
                threshold is 1 under DCP.
        """
        self.reorder_batch_threshold = reorder_batch_threshold
        if reorder_batch_threshold is not None and supports_spec_as_decode:
            self.reorder_batch_threshold = max(
                reorder_batch_threshold, max_decode_query_len(self.vllm_config)
            )
        dcp = self.vllm_config.parallel_config.decode_context_parallel_size
        if dcp > 1 and not supports_dcp_with_varlen:
            self.reorder_batch_threshold = 1

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """Plan a batch; called once per step.

        Args:
            common_prefix_len: leading tokens that all requests share in the same pages; 0 if unknown.
            common_attn_metadata: the batch, not to be written.
            fast_build: the plan serves few layers, so prefer a quick build to a quick run.
        """
        raise NotImplementedError

    def update_block_table(
        self, metadata: M, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """The same plan for a group that differs only in its pages; equal to building anew."""
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Plan the batch a graph is captured with: tensors it reads must stay at their address."""
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> M:
        """Plan a draft model's batch.

        Args:
            draft_index: which draft of a chain, or which level of a tree.
        """
        return self.build(
            common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True
        )

    def update_draft_decode_metadata(self, metadata: M) -> None:
        """Refresh a plan in place between draft steps; may run while a graph is captured, so it only
        launches, into tensors the plan already has."""
        raise NotImplementedError

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether attending to the shared prefix once for all requests would pay. Default: no."""
        return False


class CommonMetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """The builder of a backend that plans nothing: its metadata is the batch itself."""

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        views = self.views_of(common_attn_metadata)
        if views == common_attn_metadata.views:
            return common_attn_metadata
        return common_attn_metadata.replace(views=views)

    def update_block_table(
        self,
        metadata: CommonAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> CommonAttentionMetadata:
        return metadata.replace(block_table_tensor=blk_table, slot_mapping=slot_mapping)
