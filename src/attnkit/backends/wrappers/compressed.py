"""Compressed latents over any backend for latents: a cached row stands for several tokens (DeepSeek-V4's
C128A: for 128).

In: a backend whose cache has a row per token. Out: one whose cache has a row, a state, per
`tokens_per_state` of them. What a query sees follows from its position alone: the states that are whole
where it stands, its own included if it is the last of its tokens. To the wrapped backend every query is
a request of its own with as many tokens as it sees states, so it needs to know nothing.

The model makes the states. A step brings a row for every token; that of the last token of a state is
the state, and the others are read by nobody.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch

from attnkit.backends.wrappers.builder import WrappingBuilder
from attnkit.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionSpec,
    CommonAttentionMetadata,
    KVCacheSpec,
    subclass_attention_backend,
)
from attnkit.errors import BatchError, ConfigurationError
from attnkit.mla.plan import seen_by_queries


@functools.cache
def compressed(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """`backend` for layers whose cache spec has several `tokens_per_state`.

    `MLAAttention` makes it of its backend with `tokens_per_state`; the same class every time.
    """

    class Builder(CompressedBuilder):
        inner_cls = backend.get_builder_cls()

    return subclass_attention_backend("Compressed", backend, Builder)


class CompressedBuilder(WrappingBuilder):
    """Turns a batch of tokens into one of states and lets the wrapped builder plan that.

    Graphs of decodes, of however many queries each, are to the wrapped builder graphs of single ones.
    What is made of a batch of as many tokens as one that was captured goes where that one's went.
    """

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        # Every token is a request to the wrapped builder, which sizes what it keeps by their number.
        scheduler = vllm_config.scheduler_config
        most = max(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        config = _changed(vllm_config, scheduler_config=_changed(scheduler, max_num_seqs=most))
        super().__init__(kv_cache_spec, layer_names, config, device)
        self._captured: dict[int, CommonAttentionMetadata] = {}

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        inner = cls.inner_cls.get_cudagraph_support(vllm_config, kv_cache_spec)
        never = inner is AttentionCGSupport.NEVER
        return AttentionCGSupport.NEVER if never else AttentionCGSupport.UNIFORM_BATCH

    def inner_spec(self, kv_cache_spec: KVCacheSpec) -> KVCacheSpec:
        assert isinstance(kv_cache_spec, AttentionSpec), kv_cache_spec
        check_tokens_per_state(kv_cache_spec.tokens_per_state, kv_cache_spec.block_size)
        self._tokens_per_state = kv_cache_spec.tokens_per_state
        return replace(kv_cache_spec, block_size=kv_cache_spec.num_states, tokens_per_state=1)

    @classmethod
    def view_of(cls, kv_cache_spec: KVCacheSpec) -> str:
        assert isinstance(kv_cache_spec, AttentionSpec), kv_cache_spec
        return f"states of {kv_cache_spec.tokens_per_state} tokens"

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Plan a batch. A common prefix is not handed on: it is of tokens.

        Raises:
            BatchError: as `batch_of_states`.
        """
        batch = self.shown(batch_of_states(common_attn_metadata, self._tokens_per_state))
        kept = self._captured.get(batch.num_reqs)
        if kept is not None and _is_wide_enough(kept, batch):
            batch = _moved(batch, kept)
        return self.inner.build(0, batch, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Plan for every batch of decodes of as many tokens; what it is made of stays where it is."""
        batch = self.shown(batch_of_states(common_attn_metadata, self._tokens_per_state))
        kept = self._captured.get(batch.num_reqs)
        if kept is None or not _is_wide_enough(kept, batch):
            kept = self._captured[batch.num_reqs] = batch
        return self.inner.build_for_cudagraph_capture(_moved(batch, kept))


def _changed(config: Any, **values: Any) -> Any:
    """A copy with other values: engines' own configurations are not to be made anew."""
    changed = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed


def _is_wide_enough(kept: CommonAttentionMetadata, batch: CommonAttentionMetadata) -> bool:
    """A graph's steps have its block table; a batch with a wider one is another step."""
    return kept.block_table_tensor.shape[1] >= batch.block_table_tensor.shape[1]


def _moved(
    batch: CommonAttentionMetadata, kept: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """A batch with its contents in the memory of another of as many requests."""
    width = batch.block_table_tensor.shape[1]
    kept.block_table_tensor[:, :width].copy_(batch.block_table_tensor)
    return batch.replace(
        block_table_tensor=kept.block_table_tensor,
        query_start_loc=kept.query_start_loc,
        seq_lens=kept.seq_lens.copy_(batch.seq_lens),
        slot_mapping=kept.slot_mapping.copy_(batch.slot_mapping),
    )


def check_tokens_per_state(tokens_per_state: int, block_size: int) -> None:
    """Refuse states that would lie in two blocks.

    Raises:
        ConfigurationError: the block size is no multiple.
    """
    if block_size % tokens_per_state:
        raise ConfigurationError(
            f"a block of {block_size} tokens has no whole number of states of {tokens_per_state}; "
            "choose a block size that is a multiple"
        )


def batch_of_states(
    batch: CommonAttentionMetadata, tokens_per_state: int
) -> CommonAttentionMetadata:
    """A batch of one request per token, whose length is how many states the token sees and whose slot
    is that of the state it completes, if it does.

    Nothing waits for the device.

    Args:
        batch: of tokens. Without `positions` these follow from the lengths.
        tokens_per_state: divides the blocks of its table.

    Raises:
        BatchError: the batch has shares of lengths over ranks, or positions of several axes.
    """
    if batch.dcp_local_seq_lens is not None:
        raise BatchError(
            "the batch has dcp_local_seq_lens, which layers with tokens_per_state do not do; leave it "
            "out"
        )
    num_tokens = batch.num_actual_tokens
    request, num_seen = seen_by_queries(batch.query_start_loc, batch.seq_lens, num_tokens)
    position = num_seen.long() - 1
    if batch.positions is not None:
        if batch.positions.dim() != 1:
            raise BatchError(
                f"positions have shape {tuple(batch.positions.shape)}; layers with tokens_per_state "
                "take one a token"
            )
        position = torch.where(num_seen > 0, batch.positions[:num_tokens], -1)
    num_states = torch.div(position + 1, tokens_per_state, rounding_mode="floor").clamp(min=0)
    is_last = (position >= 0) & ((position + 1) % tokens_per_state == 0)
    # Floor leaves -1 what it is.
    slots = torch.div(batch.slot_mapping[:num_tokens], tokens_per_state, rounding_mode="floor")
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    return batch.replace(
        query_start_loc=starts.to(request.device, non_blocking=True),
        query_start_loc_cpu=starts,
        seq_lens=num_states.int(),
        num_reqs=num_tokens,
        max_query_len=min(batch.max_query_len, 1),
        max_seq_len=batch.max_seq_len // tokens_per_state,
        block_table_tensor=batch.block_table_tensor[request],
        slot_mapping=torch.where(is_last, slots, -1),
        positions=None,
        block_size=None if batch.block_size is None else batch.block_size // tokens_per_state,
        # Of requests, which these are not.
        is_prefilling=None,
        seq_lens_cpu_upper_bound=None,
        req_idx=None,
        freed_cpu=None,
        encoder_seq_lens=None,
        encoder_seq_lens_cpu=None,
        rswa_prefix_lens=None,
        replayssm_decode_base_cpu=None,
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
    )
