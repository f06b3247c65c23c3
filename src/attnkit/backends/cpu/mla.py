"""CpuMLABackend: attention over latents with the CPU kernels, which know nothing of latents.

In: an `MLAMetadata` and a layer's tensors, all on the CPU. Out: attention. To a decode the cache is
keys of one KV head (the whole row) whose values are their own first part, so the dense kernels read
each row once for both; to a prefill, own tokens and chunks of the context are dense attention as well.
Without the native library, and for rows with a scale per tile, the same is done in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from attnkit.backends.cpu.attend import attend
from attnkit.backends.cpu.mla_prefill import CpuMLAPrefill, dense_rows, pack, request_of
from attnkit.backends.cpu.native import native_kernels, native_status
from attnkit.backends.cpu.operands import NativeBatch, NativeCodes, NativeLayer
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionVariant,
    CommonAttentionMetadata,
    DeviceCapability,
    KVCacheLayout,
    MLADimensions,
)
from attnkit.errors import BatchError
from attnkit.kvcache.formats import LATENT_FORMATS
from attnkit.mla.builder import MLAMetadataBuilder
from attnkit.mla.impl import LatentImpl
from attnkit.mla.layer import LatentLayer, format_refusal
from attnkit.mla.plan import MLAMetadata
from attnkit.mla.prefill import read_latents
from attnkit.mla.sparse import SparseLatentImpl, SparseMLAMetadataBuilder


class CpuMLAMetadata(MLAMetadata):
    """A planned batch, its decodes packed for the kernels once for all layers."""

    @cached_property
    def native_decode(self) -> NativeBatch:
        """The decodes, over pages of the cache."""
        plan = self.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        return pack(plan.query_start_loc, plan.seq_lens, plan.block_table, causal=True)


class CpuMLAMetadataBuilder(MLAMetadataBuilder):
    """Up to 32 queries are decoded: expanding a context costs as much as attending to it with about
    170, and absorbed attention is the slower one by three only."""

    decode_query_len: ClassVar[int] = 32
    max_workspace_tokens: ClassVar[int] = 4096
    """With 128 heads of 192 + 128 numbers in four bytes, 670 MB."""

    @classmethod
    def get_plan_cls(cls) -> type[CpuMLAMetadata]:
        return CpuMLAMetadata

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CpuMLAMetadata:
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return CpuMLAMetadata(**vars(plan))


class CpuMLABackend(AttentionBackend):
    """Latents of any sizes, any page size, on the CPU."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(LATENT_FORMATS)
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "cpu_mla"

    @staticmethod
    def get_impl_cls() -> type[CpuMLAImpl]:
        return CpuMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CpuMLAMetadataBuilder]:
        return CpuMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(64, default_block_size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return None  # With one KV head, tokens of a page lie in order in all of them.

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.platform == "cpu"

    @classmethod
    def supports_mla_dimensions(
        cls, dimensions: MLADimensions, kv_cache_dtype: str | None
    ) -> str | None:
        return format_refusal(dimensions, kv_cache_dtype)

    @classmethod
    def describe_runtime(cls) -> str:
        return native_status()


class CpuMLAImpl(LatentImpl[CpuMLAMetadata]):
    """One layer over latents on the CPU."""

    prefill_cls = CpuMLAPrefill

    @staticmethod
    def get_backend_cls() -> type[CpuMLABackend]:
        return CpuMLABackend

    def prepare_layer(self) -> None:
        d, num_heads = self.layer.dimensions, self.num_heads
        self._variant = AttentionVariant.from_impl_args(num_heads=num_heads, scale=self.scale)
        self._kernels = native_kernels()
        self._absorbed = NativeLayer.pack(
            self._variant, num_heads, 1, d.latent_size, d.kv_lora_rank
        )

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write this step's rows.

        Raises:
            BatchError: a slot lies outside the cache, or the cache's rows are not dense; nothing has
                been written.
        """
        if kv_cache.numel() == 0 or slot_mapping.numel() == 0:
            return
        _check_rows(kv_cache)
        key, value, pages = kv_c_normed[:, None], k_pe, kv_cache[:, None]
        slots = slot_mapping.flatten().contiguous()
        # The native kernels read no scale per tile.
        if self._kernels is not None and not self.layer.is_tiled:
            codes = self._codes(k_scale, split=True)
            if codes is None:
                key, value = key.to(kv_cache.dtype), value.to(kv_cache.dtype)
            self._kernels.write_kv(dense_rows(key), dense_rows(value), pages, codes, slots)
            return
        self.layer.cache_format.write(key, value, pages, slots, k_scale, k_scale)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CpuMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = dense_rows(torch.cat(q, dim=-1) if isinstance(q, tuple) else q)
        cache, rank = kv_c_and_k_pe_cache, self.layer.dimensions.kv_lora_rank
        _check_rows(cache)
        plan = attn_metadata.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        output = query.new_empty(*query.shape[:2], rank)
        lse = torch.empty(query.shape[:2]) if self.need_to_return_lse_for_decode else None
        if self._kernels is None or self.layer.is_tiled:
            self._decode_in_torch(query, cache, attn_metadata, layer._k_scale, output, lse)
            return output, lse
        codes = self._codes(layer._k_scale, split=False)
        pages = (cache if codes is None else cache.view(torch.uint8))[:, None]
        self._kernels.attend_pages(
            attn_metadata.native_decode,
            self._absorbed,
            query,
            pages,
            pages[..., :rank],
            codes,
            output,
            lse,
        )
        return output, lse

    def _codes(self, k_scale: torch.Tensor, *, split: bool) -> NativeCodes | None:
        """The cache's format as the kernels know it, a row being one vector or, if `split`, latent and
        rotated part; None: its elements are the numbers."""
        d, stored = self.layer.dimensions, self.layer.cache_format
        if stored.codec is None:
            return None
        sizes = (d.kv_lora_rank, d.qk_rope_head_dim) if split else (d.latent_size, d.kv_lora_rank)
        return NativeCodes.pack(stored, *sizes, 1, k_scale, k_scale)

    def _decode_in_torch(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: MLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        plan = metadata.decode
        assert plan is not None
        starts, kv_lens = plan.query_start_loc.tolist(), plan.seq_lens.tolist()
        requests = [
            request_of(
                starts[i],
                starts[i + 1] - starts[i],
                kv_lens[i],
                _Latents(cache, plan.block_table[i], self.layer, k_scale),
                causal=True,
            )
            for i in range(len(kv_lens))
            if starts[i + 1] > starts[i]
        ]
        attend(query, requests, 1, self._variant, output, lse)


@dataclass(frozen=True, slots=True)
class _Latents:
    """Rows of one request as keys and, their first part, as values of one head."""

    cache: torch.Tensor
    block_table: torch.Tensor
    layer: LatentLayer
    k_scale: torch.Tensor

    def __call__(
        self, start: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = self.cache.shape[1]
        first = start // block_size
        parts = read_latents(
            self.cache,
            self.block_table[first : -(-end // block_size)],
            self.layer,
            self.k_scale,
            dtype,
        )
        rows = torch.cat(parts, dim=-1).flatten(0, 1)
        rows = rows[None, start - first * block_size : end - first * block_size]
        return rows, rows[..., : self.layer.dimensions.kv_lora_rank]


def _check_rows(cache: torch.Tensor) -> None:
    """Refuse a cache whose rows are not dense: the kernels take every stride but that one."""
    if cache.stride(2) != 1:
        raise BatchError(
            f"kv_cache has stride {cache.stride(2)} in its last dimension; give a cache whose rows are "
            "dense (stride 1)"
        )


class CpuMLASparseMetadataBuilder(SparseMLAMetadataBuilder, CpuMLAMetadataBuilder):
    """Plans for chosen keys."""


class CpuMLASparseBackend(CpuMLABackend):
    """`cpu_mla` over chosen keys."""

    @staticmethod
    def get_name() -> str:
        return "cpu_mla_sparse"

    @staticmethod
    def get_impl_cls() -> type[CpuMLASparseImpl]:
        return CpuMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[CpuMLASparseMetadataBuilder]:
        return CpuMLASparseMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class CpuMLASparseImpl(SparseLatentImpl[CpuMLAMetadata], CpuMLAImpl):
    """One layer whose queries attend to listed keys."""

    @staticmethod
    def get_backend_cls() -> type[CpuMLASparseBackend]:
        return CpuMLASparseBackend
