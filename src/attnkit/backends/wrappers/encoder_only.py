"""Encoder-only attention over any backend that does non-causal batches.

In: a backend of decoder layers, which reads keys from pages. Out: one whose queries see all tokens of
their request in this step: K and V are put into scratch pages, the same for all layers of a group, and
the wrapped backend attends to those without causality.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from attnkit.backends.wrappers.cross import as_decoder
from attnkit.backends.wrappers.impl import WrapperImpl, check_wrappable, dense_impl
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    KVCacheLayout,
    KVCacheSpec,
    subclass_attention_backend_with_overrides,
)
from attnkit.errors import ConfigurationError
from attnkit.kvcache.pool import PagedKVCache

_SCRATCH = "scratch"
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@functools.cache
def encoder_only(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """`backend` for layers of types encoder and encoder_only, and no others. The same class every time.

    Raises:
        ConfigurationError: it does not do non-causal batches, or cannot be wrapped.
    """
    check_wrappable(backend)
    if not backend.supports_non_causal():
        raise ConfigurationError(
            f"backend {backend.get_name()} does not do non-causal batches, which encoders are made of; "
            "wrap another"
        )

    class Builder(EncoderOnlyBuilder):
        inner_backend = backend

    class Impl(EncoderOnlyImpl):
        inner_classes = (dense_impl(backend),)
        inner_writes = backend.forward_includes_kv_cache_update
        can_return_lse_for_decode = backend.supports_lse()

    return subclass_attention_backend_with_overrides(
        "EncoderOnly",
        backend,
        {
            "get_builder_cls": staticmethod(lambda: Builder),
            "get_impl_cls": staticmethod(lambda: Impl),
            "supports_attn_type": classmethod(lambda cls, t: t in _ENCODERS),
            "supports_kv_cache_dtype": classmethod(lambda cls, name: name in (None, "auto")),
            "supports_mm_prefix": classmethod(lambda cls: False),
            "supports_rswa": classmethod(lambda cls: False),
            "supports_tree_mask": classmethod(lambda cls: False),
            "supports_non_causal": classmethod(lambda cls: False),
            # Scratch pages are given out by the host's lengths.
            "supports_device_cpu_query_lens_mismatch": classmethod(lambda cls: False),
        },
    )


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyMetadata:
    """A planned batch.

    Attributes:
        num_actual_tokens: of the batch.
        kv_cache: scratch pages, of one layer at a time.
        slot_mapping: int64 (T,), where a token's K and V go in them.
        views: that it is such a one, and of which backend.
        plan: of the wrapped backend, over those pages.
    """

    num_actual_tokens: int
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    views: tuple[str, ...]
    plan: Any


class EncoderOnlyBuilder(AttentionMetadataBuilder[EncoderOnlyMetadata]):
    """Gives each request scratch pages; they grow to the longest batch seen and stay."""

    inner_backend: ClassVar[type[AttentionBackend]]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._spec = self.inner_backend.customize_spec(as_decoder(kv_cache_spec))
        builder_cls = self.inner_backend.get_builder_cls()
        self.inner = builder_cls(self._spec, layer_names, vllm_config, device)
        self._num_blocks = 0
        self._kv_cache: torch.Tensor | None = None

    @classmethod
    def get_views(cls, kv_cache_spec: KVCacheSpec) -> tuple[str, ...]:
        return (f"encoders over {cls.inner_backend.get_name()}",)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> EncoderOnlyMetadata:
        """Plan a batch: every token of a request sees every other, whatever the batch says."""
        batch, size = common_attn_metadata, self._spec.block_size
        num_reqs = batch.num_reqs
        starts = batch.query_start_loc_cpu[: num_reqs + 1].numpy().astype(np.int64)
        query_lens = np.diff(starts)
        pages = -(-query_lens // size)
        first_page = 1 + np.cumsum(pages) - pages  # Block 0 is the null block.
        columns = np.arange(int(pages.max(initial=1)))
        table = np.where(columns < pages[:, None], first_page[:, None] + columns, 0)
        rows = np.repeat(np.arange(num_reqs), query_lens)
        positions = np.arange(len(rows)) - starts[:-1][rows]
        slots = np.full(batch.slot_mapping.shape[0], -1, dtype=np.int64)
        slots[: len(rows)] = first_page[rows] * size + positions
        device = batch.query_start_loc.device
        seq_lens = batch.query_start_loc[: num_reqs + 1].diff()
        slot_mapping = torch.from_numpy(slots).to(device, non_blocking=True)
        inner_batch = batch.replace(
            seq_lens=seq_lens,
            max_seq_len=batch.max_query_len,
            seq_lens_cpu_upper_bound=torch.from_numpy(query_lens.astype(np.int32)),
            block_table_tensor=torch.from_numpy(table.astype(np.int32)).to(
                device, non_blocking=True
            ),
            slot_mapping=slot_mapping,
            causal=False,
            mm_req_doc_ranges=None,
            rswa_prefix_lens=None,
            tree_mask=None,
        )
        return EncoderOnlyMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            kv_cache=self._scratch(1 + int(pages.sum())),
            slot_mapping=slot_mapping,
            views=self.views_of(batch),
            plan=self.inner.build(0, inner_batch, fast_build),
        )

    def _scratch(self, num_blocks: int) -> torch.Tensor:
        if self._kv_cache is None or num_blocks > self._num_blocks:
            self._num_blocks = max(2, num_blocks)
            layouts = self.inner_backend.supported_kv_cache_layouts()
            cache = PagedKVCache(
                {_SCRATCH: self._spec},
                self._num_blocks,
                device=self.device,
                layout=KVCacheLayout.LBHNC if layouts is None else layouts[0],
            )
            self._kv_cache = cache[_SCRATCH]
        return self._kv_cache


class EncoderOnlyImpl(WrapperImpl):
    """A decoder's impl over scratch pages."""

    inner_attn_type = AttentionType.DECODER
    inner_writes: ClassVar[bool]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: EncoderOnlyMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Put K and V into the scratch pages and attend; `kv_cache` is not looked at."""
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        plan = attn_metadata
        (impl,) = self.inner
        if not self.inner_writes:
            impl.do_kv_cache_update(layer, key, value, plan.kv_cache, plan.slot_mapping)
        lse = self.run_inner(impl, layer, query, key, value, plan.kv_cache, plan.plan, output)
        return output if lse is None else (output, lse)
