"""Hybrid: prefills by one backend, decodes by another, over one cache.

In: two backends whose caches are alike. Out: one that cuts each batch where its first long query stands:
the requests before it are decodes, it and what follows are prefills. An engine that puts decodes first
(`reorder_batch_threshold`) gets all of them decoded; in any other order the answer is as right.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from attnkit.backends.wrappers.impl import WrapperImpl, check_wrappable, dense_impl
from attnkit.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionSpec,
    AttentionType,
    CommonAttentionMetadata,
    DeviceCapability,
    KVCacheLayout,
    KVCacheSpec,
    MultipleOf,
)
from attnkit.errors import ConfigurationError


@functools.cache
def hybrid(
    prefill: type[AttentionBackend], decode: type[AttentionBackend]
) -> type[AttentionBackend]:
    """`prefill` for prompts and chunks of them, `decode` for requests with few new tokens.

    It does what both do. The same class every time.

    Raises:
        ConfigurationError: no cache layout or block size is common to both, or one of them cannot be
            wrapped.
    """
    both = (prefill, decode)
    for backend in both:
        check_wrappable(backend)

    class Builder(HybridBuilder):
        view = f"prefills by {prefill.get_name()} and decodes by {decode.get_name()}"
        prefill_cls = prefill.get_builder_cls()
        decode_cls = decode.get_builder_cls()

    class Impl(HybridImpl):
        backends = both
        inner_classes = tuple(dense_impl(b) for b in both)
        can_return_lse_for_decode = all(b.supports_lse() for b in both)

    class Hybrid(HybridBackend):
        backends = both
        builder_cls = Builder
        impl_cls = Impl
        supported_dtypes: ClassVar[list[torch.dtype]] = [
            d for d in prefill.supported_dtypes if decode.supports_dtype(d)
        ]
        supported_kv_cache_dtypes: ClassVar[list[str]] = [
            name
            for name in prefill.supported_kv_cache_dtypes
            if decode.supports_kv_cache_dtype(name)
        ]
        forward_includes_kv_cache_update = any(b.forward_includes_kv_cache_update for b in both)

    Hybrid.__name__ = Hybrid.__qualname__ = f"Hybrid{prefill.__name__}{decode.__name__}"
    if Hybrid.supported_kv_cache_layouts() == ():
        raise ConfigurationError(
            f"{prefill.get_name()} and {decode.get_name()} have no KV cache layout in common"
        )
    if not Hybrid.get_supported_kernel_block_sizes():
        raise ConfigurationError(
            f"{prefill.get_name()} and {decode.get_name()} have no block size in common"
        )
    return Hybrid


class HybridBackend(AttentionBackend):
    """What both of `backends` can do; made by `hybrid`."""

    backends: ClassVar[tuple[type[AttentionBackend], type[AttentionBackend]]]
    builder_cls: ClassVar[type[HybridBuilder]]
    impl_cls: ClassVar[type[HybridImpl]]
    accept_output_buffer = True

    @classmethod
    def get_name(cls) -> str:
        """Both names with a comma, prefill first, as it is asked for."""
        return ",".join(b.get_name() for b in cls.backends)

    @classmethod
    def get_impl_cls(cls) -> type[HybridImpl]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[HybridBuilder]:
        return cls.builder_cls

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return next((absent for b in cls.backends if (absent := b.unavailable_reason())), None)

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        return sum(b.estimate_cost(request) for b in cls.backends) / 2

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, kv_cache_spec: KVCacheSpec | None = None
    ) -> list[int | MultipleOf]:
        first, second = (b.get_supported_kernel_block_sizes(kv_cache_spec) for b in cls.backends)
        # An empty list stands for any size.
        anything: list[int | MultipleOf] = [MultipleOf(1)]
        common: list[int | MultipleOf] = []
        for a in first or anything:
            for b in second or anything:
                size = _common_block_size(a, b)
                if size is not None and size not in common:
                    common.append(size)
        return common

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        first, second = (b.supported_kv_cache_layouts() for b in cls.backends)
        if first is None or second is None:
            return first or second
        return tuple(layout for layout in first if layout in second)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        first, second = (b.customize_spec(spec) for b in cls.backends)
        if first != second:
            raise ConfigurationError(
                f"backends {cls.get_name()} pack a page differently ({first} and {second}), so they "
                "cannot share a cache; choose another cache format"
            )
        return first

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        first, second = (b.get_supported_head_sizes() for b in cls.backends)
        return [size for size in first if size in second] if first and second else first or second

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return all(b.supports_head_size(head_size) for b in cls.backends)

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        return all(b.supports_head_size_v(head_size, head_size_v) for b in cls.backends)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return all(b.supports_dtype(dtype) for b in cls.backends)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return all(b.supports_kv_cache_dtype(kv_cache_dtype) for b in cls.backends)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return all(b.supports_compute_capability(capability) for b in cls.backends)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        # Keys of cross attention are not the tokens of this step, which is what is cut.
        return attn_type != AttentionType.ENCODER_DECODER and all(
            b.supports_attn_type(attn_type) for b in cls.backends
        )

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        for b in cls.backends:
            reason = b.supports_combination(
                head_size,
                dtype,
                kv_cache_dtype,
                block_size,
                use_mla,
                has_sink,
                use_sparse,
                use_mm_prefix,
                device_capability,
            )
            if reason is not None:
                return f"{b.get_name()}: {reason}"
        return None


def _both(name: str) -> classmethod[Any, [], bool]:
    """A class method that is true where it is of both backends."""

    def ask(cls: type[HybridBackend]) -> bool:
        return all(getattr(b, name)() for b in cls.backends)

    ask.__name__ = name
    return classmethod(ask)


for _name in (
    "supports_sink",
    "supports_alibi",
    "supports_alibi_sqrt",
    "supports_logits_soft_cap",
    "supports_mm_prefix",
    "supports_per_head_quant_scales",
    "supports_sliding_window",
    "supports_rswa",
    "supports_tree_mask",
    "supports_non_causal",
    "supports_kv_connector",
    "supports_device_cpu_query_lens_mismatch",
):
    setattr(HybridBackend, _name, _both(_name))


def _common_block_size(a: int | MultipleOf, b: int | MultipleOf) -> int | MultipleOf | None:
    if isinstance(a, MultipleOf):
        if isinstance(b, MultipleOf):
            return MultipleOf(math.lcm(a.base, b.base))
        a, b = b, a
    fits = a % b.base == 0 if isinstance(b, MultipleOf) else a == b
    return a if fits else None


@dataclass(frozen=True, kw_only=True)
class HybridPart:
    """A part of a batch and its plan.

    Attributes:
        tokens: of the batch's that are the part's; those of the last part go on into the padding.
        plan: what its backend's builder made of it.
    """

    tokens: slice
    plan: Any


@dataclass(frozen=True, kw_only=True)
class HybridMetadata:
    """A planned batch. None: no such request in it.

    Attributes:
        num_actual_tokens: of the batch.
        slot_mapping: int64 (T,).
        block_size: tokens in a page, as the batch says it; None: it does not.
        views: what wrappers made of the batch, outermost first.
        num_decodes: rows that are decoded.
    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    block_size: int | None
    views: tuple[str, ...]
    num_decodes: int
    prefill: HybridPart | None
    decode: HybridPart | None


class HybridBuilder(AttentionMetadataBuilder[HybridMetadata]):
    """Cuts a batch in two and has each part planned by its backend."""

    view: ClassVar[str]
    prefill_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]
    decode_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        arguments = (kv_cache_spec, layer_names, vllm_config, device)
        self.prefill, self.decode = self.prefill_cls(*arguments), self.decode_cls(*arguments)
        both = (self.prefill, self.decode)
        self.supports_update_block_table = all(b.supports_update_block_table for b in both)
        self.supports_draft_decode_metadata_update = all(
            b.supports_draft_decode_metadata_update for b in both
        )

    @classmethod
    def get_views(cls, kv_cache_spec: KVCacheSpec) -> tuple[str, ...]:
        return cls.view, *super().get_views(kv_cache_spec)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        # A captured batch is all decodes; where a mixed one is cut, its lengths decide.
        decode = cls.decode_cls.get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(decode, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HybridMetadata:
        """Plan a batch. A common prefix is handed on: each part shares it too."""
        batch = common_attn_metadata
        query_lens = batch.query_start_loc_cpu[: batch.num_reqs + 1].diff()
        assert self.reorder_batch_threshold is not None
        long = (query_lens > self.reorder_batch_threshold).nonzero()
        num_decodes = int(long[0]) if len(long) else batch.num_reqs
        split = int(batch.query_start_loc_cpu[num_decodes])
        decode = prefill = None
        if num_decodes == batch.num_reqs:
            plan = self.decode.build(common_prefix_len, batch, fast_build)
            decode = HybridPart(tokens=slice(0, None), plan=plan)
        else:
            if num_decodes:
                plan = self.decode.build(common_prefix_len, batch.rows(0, num_decodes), fast_build)
                decode = HybridPart(tokens=slice(0, split), plan=plan)
            rest = batch.rows(num_decodes, batch.num_reqs) if num_decodes else batch
            plan = self.prefill.build(common_prefix_len, rest, fast_build)
            prefill = HybridPart(tokens=slice(split, None), plan=plan)
        return HybridMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            slot_mapping=batch.slot_mapping,
            block_size=batch.block_size,
            views=self.views_of(batch),
            num_decodes=num_decodes,
            prefill=prefill,
            decode=decode,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> HybridMetadata:
        batch = common_attn_metadata
        return HybridMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            slot_mapping=batch.slot_mapping,
            block_size=batch.block_size,
            views=self.views_of(batch),
            num_decodes=batch.num_reqs,
            prefill=None,
            decode=HybridPart(
                tokens=slice(0, None),
                plan=self.decode.build_for_cudagraph_capture(batch),
            ),
        )

    def update_block_table(
        self, metadata: HybridMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> HybridMetadata:
        cut = metadata.num_decodes
        parts = (
            (self.decode, metadata.decode, blk_table[:cut]),
            (self.prefill, metadata.prefill, blk_table[cut:]),
        )
        decode, prefill = (
            None
            if part is None
            else replace(
                part,
                plan=builder.update_block_table(part.plan, table, slot_mapping[part.tokens]),
            )
            for builder, part, table in parts
        )
        return replace(metadata, slot_mapping=slot_mapping, decode=decode, prefill=prefill)

    def update_draft_decode_metadata(self, metadata: HybridMetadata) -> None:
        for builder, part in ((self.decode, metadata.decode), (self.prefill, metadata.prefill)):
            if part is not None:
                builder.update_draft_decode_metadata(part.plan)


class HybridImpl(WrapperImpl):
    """Runs each part of a step with its own impl: (prefill, decode)."""

    backends: ClassVar[tuple[type[AttentionBackend], type[AttentionBackend]]]

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HybridMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.zero_()
        lse = None
        if self.need_to_return_lse_for_decode:
            shape = (attn_metadata.num_actual_tokens, self.num_heads)
            lse = query.new_full(shape, -math.inf, dtype=torch.float32)
        parts = (attn_metadata.prefill, attn_metadata.decode)
        for backend, impl, part in zip(self.backends, self.inner, parts, strict=True):
            if part is None:
                continue
            tokens = part.tokens
            k, v = (x if x is None else x[tokens] for x in (key, value))
            writes = self._writes_itself(backend) and kv_cache.numel() > 0 and k is not None
            if writes and self.kv_sharing_target_layer_name is None:
                slots = attn_metadata.slot_mapping[tokens]
                impl.do_kv_cache_update(layer, k, v, kv_cache, slots)
            part_lse = self.run_inner(
                impl, layer, query[tokens], k, v, kv_cache, part.plan, output[tokens]
            )
            if lse is not None and part_lse is not None:
                rows = lse[tokens]
                rows[: part_lse.shape[0]] = part_lse[: rows.shape[0]]
        return output if lse is None else (output, lse)

    def _writes_itself(self, backend: type[AttentionBackend]) -> bool:
        """This backend leaves the write to the layer, which leaves it to us because the other's
        does not."""
        one_includes = any(b.forward_includes_kv_cache_update for b in self.backends)
        return one_includes and not backend.forward_includes_kv_cache_update

    def prepare_for_batch(self, attn_metadata: HybridMetadata | None) -> None:
        parts = (
            (None, None) if attn_metadata is None else (attn_metadata.prefill, attn_metadata.decode)
        )
        for impl, part in zip(self.inner, parts, strict=True):
            impl.prepare_for_batch(None if part is None else part.plan)
