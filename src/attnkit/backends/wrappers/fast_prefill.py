"""Fast prefill over any backend: layers that share another's cache compute only the wanted tokens.

In: a backend. Out: one for layers that write no cache: a prompt's K and V are all there when the first
of them runs, so of its tokens only those go through them whose logits are wanted (the last one, as a
rule). The model hands these layers rows `logits_indices_padded` of its hidden states and nothing else.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from attnkit.backends.wrappers.builder import WrappingBuilder
from attnkit.backends.wrappers.impl import WrapperImpl, check_wrappable, dense_impl
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    CommonAttentionMetadata,
    KVCacheSpec,
    subclass_attention_backend_with_overrides,
)
from attnkit.errors import BatchError, UnsupportedConfiguration


@functools.cache
def fast_prefill(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """`backend` for layers with `kv_sharing_target_layer_name`. The same class every time.

    Raises:
        ConfigurationError: it cannot be wrapped.
    """
    check_wrappable(backend)

    class Builder(FastPrefillBuilder):
        inner_cls = backend.get_builder_cls()

    class Impl(FastPrefillImpl):
        inner_classes = (dense_impl(backend),)
        can_return_lse_for_decode = backend.supports_lse()

    return subclass_attention_backend_with_overrides(
        "FastPrefill",
        backend,
        {
            "get_builder_cls": staticmethod(lambda: Builder),
            "get_impl_cls": staticmethod(lambda: Impl),
            "supports_device_cpu_query_lens_mismatch": classmethod(lambda cls: False),
            # Words count a request's tokens of the step, of which some are left out.
            "supports_tree_mask": classmethod(lambda cls: False),
        },
    )


class FastPrefillBuilder(WrappingBuilder):
    """Plans the wanted tokens of a batch, or all where the batch does not say which are."""

    @classmethod
    def view_of(cls, kv_cache_spec: KVCacheSpec) -> str:
        return "wanted tokens"

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Plan a batch.

        Raises:
            BatchError: as `wanted_tokens`.
        """
        batch = common_attn_metadata
        if batch.logits_indices_padded is not None:
            batch = wanted_tokens(batch)
        return self.inner.build(0, self.shown(batch), fast_build)


def wanted_tokens(batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The batch of those tokens whose logits are wanted, of every request its last ones.

    Requests of which nothing is wanted have no tokens in it. Nothing is written: all slots are -1.

    Raises:
        BatchError: it is not said how many tokens are wanted, they are not in order, some request's are
            not its last ones, whose positions a plan takes for granted, or are more than was said.
    """
    indices, num_wanted = batch.logits_indices_padded, batch.num_logits_indices
    assert indices is not None
    if num_wanted is None or not 0 <= num_wanted <= indices.shape[0]:
        raise BatchError(
            f"num_logits_indices is {num_wanted} beside {indices.shape[0]} logits_indices_padded; say "
            "how many of them are real"
        )
    # How many tokens are wanted of a request is known on the device only where the indices are made
    # there: this is the one plan that waits for it, to leave out most of a prompt's work.
    wanted = indices[:num_wanted].cpu().numpy().astype(np.int64)
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy().astype(np.int64)
    counts = np.bincount(
        np.searchsorted(starts[1:], wanted, side="right"), minlength=batch.num_reqs
    )
    ends = starts[1:]
    expected = np.repeat(ends - counts[: batch.num_reqs], counts[: batch.num_reqs])
    offsets = np.concatenate([[0], np.cumsum(counts[: batch.num_reqs])])
    expected = (
        expected + np.arange(len(expected)) - np.repeat(offsets[:-1], counts[: batch.num_reqs])
    )
    if len(counts) > batch.num_reqs or not np.array_equal(expected, wanted):
        raise BatchError(
            f"logits_indices_padded begins with {wanted[:8].tolist()}, which are not the last tokens of "
            f"their requests in order (these end at {ends[:8].tolist()}); fast prefill does no others"
        )
    longest, most = int(counts.max(initial=0)), batch.max_logits_per_req
    if most is not None and most < longest:
        raise BatchError(
            f"max_logits_per_req is {most}, and logits_indices_padded has {longest} tokens of one "
            f"request; say {longest} or more, or None"
        )
    device = batch.query_start_loc.device
    host_starts = torch.from_numpy(offsets.astype(np.int32))
    slots = torch.full((indices.shape[0],), -1, dtype=torch.int64, device=device)
    positions = batch.positions
    return batch.replace(
        query_start_loc=host_starts.to(device, non_blocking=True),
        query_start_loc_cpu=host_starts,
        num_actual_tokens=num_wanted,
        max_query_len=longest,
        slot_mapping=slots,
        positions=None if positions is None else positions[..., indices.long()],
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
    )


class FastPrefillImpl(WrapperImpl):
    """The wrapped impl, for layers that share a cache only."""

    def check_layer(self) -> None:
        if self.kv_sharing_target_layer_name is None:
            reason = "the layer keeps keys and values of its own, of which every token's are needed"
            raise UnsupportedConfiguration(
                f"fast prefill: {reason}; give kv_sharing_target_layer_name, or do not wrap",
                (reason,),
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend with the wanted tokens' queries; rows of padding stay as they were."""
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        (impl,) = self.inner
        lse = self.run_inner(impl, layer, query, key, value, kv_cache, attn_metadata, output)
        return output if lse is None else (output, lse)
