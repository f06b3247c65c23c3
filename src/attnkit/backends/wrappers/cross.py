"""Cross attention over any backend that does non-causal batches.

In: a backend of decoder layers. Out: one whose queries see the encoder's output, which is in the cache:
to the wrapped backend that is a batch without causality whose requests are as long as their encoder
output. The wrapper also works out where that output is written, in the first step of a request.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import torch

from attnkit.backends.wrappers.builder import WrappingBuilder
from attnkit.backends.wrappers.impl import WrapperImpl, check_wrappable, dense_impl
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionSpec,
    AttentionType,
    CommonAttentionMetadata,
    FullAttentionSpec,
    KVCacheSpec,
    subclass_attention_backend_with_overrides,
)
from attnkit.errors import BatchError, ConfigurationError, UnsupportedConfiguration


@functools.cache
def cross_attention(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """`backend` for layers of type encoder_decoder, and no others. The same class every time.

    Raises:
        ConfigurationError: it does not do non-causal batches, or cannot be wrapped.
    """
    check_wrappable(backend)
    if not backend.supports_non_causal():
        raise ConfigurationError(
            f"backend {backend.get_name()} does not do non-causal batches, which cross attention is "
            "made of; wrap another"
        )

    class Builder(CrossAttentionBuilder):
        inner_cls = backend.get_builder_cls()

    class Impl(CrossAttentionImpl):
        inner_classes = (dense_impl(backend),)
        inner_writes = backend.forward_includes_kv_cache_update
        can_return_lse_for_decode = backend.supports_lse()

    return subclass_attention_backend_with_overrides(
        "CrossAttention",
        backend,
        {
            "get_builder_cls": staticmethod(lambda: Builder),
            "get_impl_cls": staticmethod(lambda: Impl),
            "supports_attn_type": classmethod(lambda cls, t: t == AttentionType.ENCODER_DECODER),
            "supports_sliding_window": classmethod(lambda cls: False),
            "supports_alibi": classmethod(lambda cls: False),
            "supports_alibi_sqrt": classmethod(lambda cls: False),
            "supports_mm_prefix": classmethod(lambda cls: False),
            "supports_rswa": classmethod(lambda cls: False),
            "supports_tree_mask": classmethod(lambda cls: False),
            "supports_non_causal": classmethod(lambda cls: False),
            # The layer's write goes to slots of the decoder's tokens.
            "forward_includes_kv_cache_update": True,
        },
    )


class CrossAttentionBuilder(WrappingBuilder):
    """Shows the wrapped builder the encoder's side of a batch."""

    def inner_spec(self, kv_cache_spec: KVCacheSpec) -> KVCacheSpec:
        return as_decoder(kv_cache_spec)

    @classmethod
    def get_views(cls, kv_cache_spec: KVCacheSpec) -> tuple[str, ...]:
        return cls.view_of(kv_cache_spec), *cls.inner_cls.get_views(as_decoder(kv_cache_spec))

    @classmethod
    def view_of(cls, kv_cache_spec: KVCacheSpec) -> str:
        return "encoder outputs, wrapped"

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Plan a batch. Its block table is of the encoder's pages.

        Raises:
            BatchError: as `encoder_side`.
        """
        batch = encoder_side(common_attn_metadata, self.kv_cache_spec.block_size)
        return self.inner.build(0, self.shown(batch), fast_build)


def as_decoder(spec: KVCacheSpec) -> FullAttentionSpec:
    """The spec of a decoder layer whose pages are those of `spec`."""
    assert isinstance(spec, AttentionSpec), spec
    facts = {f.name: getattr(spec, f.name) for f in fields(AttentionSpec)}
    return FullAttentionSpec(**facts)


def encoder_side(batch: CommonAttentionMetadata, block_size: int) -> CommonAttentionMetadata:
    """A batch whose requests are as long as their encoder output, all of it visible.

    `slot_mapping` says where K and V of encoder tokens go: those of requests without computed tokens,
    whose first step this is, one after another.

    Args:
        batch: the decoder's, its block table of the encoder's pages.
        block_size: tokens in a block of that.

    Raises:
        BatchError: the batch does not say on the host how long encoder outputs are.
    """
    lens, lens_cpu = batch.encoder_seq_lens, batch.encoder_seq_lens_cpu
    if lens is not None and lens_cpu is None and lens.device.type == "cpu":
        lens_cpu = lens.numpy()
    if lens is None or lens_cpu is None:
        raise BatchError(
            "cross attention needs encoder_seq_lens and encoder_seq_lens_cpu, which this batch does "
            "not have; set them on the CommonAttentionMetadata"
        )
    num_reqs = batch.num_reqs
    host_lens = np.asarray(lens_cpu[:num_reqs], dtype=np.int64)
    query_lens = np.diff(batch.query_start_loc_cpu[: num_reqs + 1].numpy())
    computed = batch.host_seq_lens("cross attention")[:num_reqs].numpy() - query_lens
    is_first = (computed <= 0) & (query_lens > 0)
    new_lens = np.where(is_first, host_lens, 0)
    rows = np.repeat(np.arange(num_reqs), new_lens)
    positions = np.arange(len(rows)) - np.repeat(np.cumsum(new_lens) - new_lens, new_lens)
    device = batch.block_table_tensor.device
    where = torch.from_numpy(np.stack([rows, positions])).to(device, non_blocking=True)
    blocks = batch.block_table_tensor[where[0], where[1] // block_size].long()
    return batch.replace(
        seq_lens=lens[:num_reqs].to(torch.int32),
        max_seq_len=int(host_lens.max(initial=0)),
        seq_lens_cpu_upper_bound=torch.from_numpy(host_lens.astype(np.int32)),
        slot_mapping=blocks * block_size + where[1] % block_size,
        causal=False,
        positions=None,
        mm_req_doc_ranges=None,
        rswa_prefix_lens=None,
        tree_mask=None,
        encoder_seq_lens=None,
        encoder_seq_lens_cpu=None,
    )


class CrossAttentionImpl(WrapperImpl):
    """A decoder's impl over the encoder's pages."""

    inner_attn_type = AttentionType.DECODER
    inner_writes: ClassVar[bool]

    def check_layer(self) -> None:
        given = {"sliding_window": self.sliding_window, "alibi_slopes": self.alibi_slopes}
        for name in (name for name, value in given.items() if value is not None):
            reason = f"{name} is about distances, and encoder tokens stand at none from a query"
            raise UnsupportedConfiguration(f"cross attention: {reason}", (reason,))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of encoder outputs that come with this step, then attend.

        Args:
            key: (num encoder tokens, num_kv_heads, head_size) of the requests whose first step this is,
                in the batch's order; None where there is no such request.
            value: likewise.

        Raises:
            BatchError: fewer of them than the plan writes; nothing has been written.
        """
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        slots = attn_metadata.slot_mapping
        (impl,) = self.inner
        if self.kv_sharing_target_layer_name is None:
            num_given = 0 if key is None else key.shape[0]
            if num_given < len(slots):
                raise BatchError(
                    f"cross attention got {num_given} encoder tokens for a plan that writes "
                    f"{len(slots)}; pass K and V of the encoder's output in a request's first step"
                )
            if key is not None and len(slots) and not self.inner_writes:
                assert value is not None
                impl.do_kv_cache_update(layer, key, value, kv_cache, slots)
        lse = self.run_inner(impl, layer, query, key, value, kv_cache, attn_metadata, output)
        return output if lse is None else (output, lse)
