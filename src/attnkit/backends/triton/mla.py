"""TritonMLABackend: attention over latents through the Triton kernels.

In: an `MLAMetadata`, one layer's tensors and its latent cache. Out: attention. Decodes run in a kernel
of their own that loads a tile of latents once for scores and values and splits long contexts; prefills
run in the dense attention kernel, over expanded keys and values. On a GPU a launch is repeated from
step to step (`repeat`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnkit.backends.repeat import Repeats, kind_of
from attnkit.backends.stored import Stored
from attnkit.backends.triton.backend import TritonBackend
from attnkit.backends.triton.configs import mla_decode_config
from attnkit.backends.triton.mla_operands import LatentPages, LatentStep
from attnkit.backends.triton.mla_prefill import TritonMLAPrefill, rows_of
from attnkit.backends.triton.operands import Parts
from attnkit.backends.triton.plan import Workspace, longest_to_mean
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    CommonAttentionMetadata,
    DeviceCapability,
    KVCacheSpec,
    MLADimensions,
)
from attnkit.mla.builder import ReplayedMLAMetadataBuilder
from attnkit.mla.impl import LatentImpl
from attnkit.mla.layer import format_refusal
from attnkit.mla.plan import DecodePart, MLAMetadata
from attnkit.mla.sparse import SparseLatentImpl, SparseMLAMetadataBuilder, token_pages

if TYPE_CHECKING:
    from attnkit.backends.kernel_call import KernelCall
    from attnkit.backends.triton.launch import DecodeWork

_MAX_PARTS = 1 << 27
"""Float32 elements (512 MiB) that shared requests may take: batches whose parts need more have enough
requests to fill a device without sharing them."""


@dataclass(kw_only=True, eq=False)
class TritonMLAMetadata(MLAMetadata):
    """A planned batch.

    Attributes:
        longest_to_mean: how many times as long as the mean the longest context is; 1 if unknown.
        workspace: for states of requests that programs share.
    """

    longest_to_mean: float
    workspace: Workspace


class TritonMLAMetadataBuilder(ReplayedMLAMetadataBuilder):
    """Copies nothing and launches nothing for decodes."""

    decode_query_len: ClassVar[int] = 8

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._workspace = Workspace(torch.device(device))

    @classmethod
    def get_plan_cls(cls) -> type[TritonMLAMetadata]:
        return TritonMLAMetadata

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMLAMetadata:
        plan = super().build(common_prefix_len, common_attn_metadata, fast_build)
        bounds = common_attn_metadata.seq_lens_cpu_upper_bound
        return TritonMLAMetadata(
            **vars(plan),
            longest_to_mean=longest_to_mean(None if bounds is None else bounds[: plan.num_decodes]),
            workspace=self._workspace,
        )


class TritonMLABackend(AttentionBackend):
    """Latents up to 512 on any GPU that Triton compiles for (sm_80 and later), or in its interpreter."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla",
    ]  # fmt: skip
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "triton_mla"

    @staticmethod
    def get_impl_cls() -> type[TritonMLAImpl]:
        return TritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        return TritonMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return TritonBackend.unavailable_reason()

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return TritonBackend.supports_compute_capability(capability)

    @classmethod
    def supports_mla_dimensions(
        cls, dimensions: MLADimensions, kv_cache_dtype: str | None
    ) -> str | None:
        d = dimensions
        sizes = (d.kv_lora_rank, d.qk_rope_head_dim, d.qk_head_dim, d.v_head_dim)
        if any(size % 8 or size > 512 for size in sizes):
            return f"{d} is not supported (allowed: multiples of 8, up to 512 each)"
        return format_refusal(dimensions, kv_cache_dtype)

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        return TritonBackend.estimate_cost(request)


class TritonMLAImpl(LatentImpl[TritonMLAMetadata]):
    """One layer over latents. Only launches between call and return, in batches of decodes."""

    prefill_cls = TritonMLAPrefill

    def prepare_layer(self) -> None:
        super().prepare_layer()
        # Chosen rows are other pages than the cache's, and launches over others are forgotten.
        self._cache_repeats, self._decode_repeats = Repeats(), Repeats()

    @staticmethod
    def get_backend_cls() -> type[TritonMLABackend]:
        return TritonMLABackend

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write this step's rows; slot -1 writes nothing."""
        if kv_cache.numel() == 0:
            return
        from attnkit.backends.triton import cache_launch, launch, mla_launch

        latent, rotated = rows_of(kv_c_normed), rows_of(k_pe)
        slots = slot_mapping.flatten()
        if self.layer.is_tiled:
            rope = rotated[:, 0]
            self._cache_repeats.launch(
                ("tiled write", kind_of(latent, rope), slots.dtype),
                kv_cache,
                mla_launch.tiled_write_grid(latent, slots),
                mla_launch.tiled_write_changes(latent, rope, slots),
                lambda: mla_launch.tiled_write_call(
                    latent, rope, self._pages(kv_cache, k_scale), slots
                ),
            )
            return
        latent = latent[:, None]

        def call() -> KernelCall:
            stored = Stored.of(
                kv_cache[:, None],
                self.layer.cache_format,
                latent.shape[-1],
                rotated.shape[-1],
                k_scale,
                k_scale,
                has_e4m3=launch.gpu_of(kv_cache.device).has_e4m3,
            )
            return cache_launch.write_call(latent, rotated, stored, slots)

        self._cache_repeats.launch(
            ("write", kind_of(latent, rotated), slots.dtype),
            kv_cache,
            cache_launch.write_grid(1, slots),
            cache_launch.write_changes(latent, rotated, slots),
            call,
            self._scales(k_scale),
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TritonMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Here, so that the class can be asked questions where Triton is not installed.
        from attnkit.backends.triton import launch

        query = rows_of(torch.cat(q, dim=-1) if isinstance(q, tuple) else q)
        plan = attn_metadata.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        d, scale = self.layer.dimensions, self.scale
        if scale <= 0:  # The kernel applies it after the maximum.
            query, scale = query * scale, 1.0
        shape = (*query.shape[:2], d.kv_lora_rank)
        # A replayed batch may have fewer rows: theirs are not written, and somebody may look.
        captured = attn_metadata.is_captured
        output = query.new_zeros(shape) if captured else query.new_empty(shape)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        step = LatentStep(
            query=query,
            output=output,
            lse=lse,
            query_start_loc=plan.query_start_loc,
            kv_lens=plan.seq_lens,
            block_table=plan.block_table,
        )
        gpu = launch.gpu_of(query.device)
        config = mla_decode_config(
            d.kv_lora_rank,
            d.qk_rope_head_dim,
            query.element_size(),
            1 if self.layer.cache_format.codec is not None else kv_c_and_k_pe_cache.element_size(),
            self.num_heads,
            kv_c_and_k_pe_cache.shape[1],
            gpu,
        )
        num_tiles = -(-self.num_heads // config.block_m)
        # A program takes most of a multiprocessor, so as many as there are of these are enough; and a
        # request much longer than the others would run on alone at the end.
        fill = gpu.num_sms // max(1, step.num_reqs * num_tiles)
        even = 4 if captured else int(attn_metadata.longest_to_mean)
        most = min(config.max_segments, -(-plan.max_seq_len // config.segment))
        splits = max(1, min(max(fill, even), most))
        if Parts.numel(step, plan.max_query_len, splits) > _MAX_PARTS:
            splits = 1
        parts = None
        if splits > 1:
            parts = attn_metadata.workspace.parts(step, plan.max_query_len, splits)
        work = launch.DecodeWork(
            max_query_len=plan.max_query_len, config=config, num_splits=splits, parts=parts
        )
        self._decode(step, scale, work, kv_c_and_k_pe_cache, layer._k_scale)
        return output, lse

    def _decode(
        self,
        step: LatentStep,
        scale: float,
        work: DecodeWork,
        cache: torch.Tensor,
        k_scale: torch.Tensor,
    ) -> None:
        """Launch the decode, and the merge of its parts."""
        from attnkit.backends.triton import mla_launch

        kind, scales = step.kind, self._scales(k_scale)
        self._decode_repeats.launch(
            ("decode", work.parts is None, *kind),
            cache,
            mla_launch.mla_decode_grid(step, work),
            mla_launch.mla_decode_changes(step, work),
            lambda: mla_launch.mla_decode_call(step.over(self._pages(cache, k_scale)), scale, work),
            scales,
        )
        if work.parts is not None:
            self._decode_repeats.launch(
                ("merge", *kind),
                cache,
                mla_launch.mla_merge_grid(step, work),
                mla_launch.mla_merge_changes(step, work),
                lambda: mla_launch.mla_merge_call(
                    step.over(self._pages(cache, k_scale)), scale, work
                ),
                scales,
            )

    def _scales(self, k_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those that kernels read."""
        return (k_scale, k_scale) if self.layer.cache_format.reads_layer_scales else None

    def _pages(self, cache: torch.Tensor, k_scale: torch.Tensor) -> LatentPages:
        """The cache as the kernels read and write it."""
        from attnkit.backends.triton import launch

        return LatentPages.of(
            cache,
            self.layer.cache_format,
            self.layer.dimensions,
            k_scale,
            has_e4m3=launch.gpu_of(cache.device).has_e4m3,
        )


class TritonMLASparseMetadataBuilder(SparseMLAMetadataBuilder, TritonMLAMetadataBuilder):
    """Plans for chosen keys."""


class TritonMLASparseBackend(TritonMLABackend):
    """`triton_mla` over chosen keys."""

    @staticmethod
    def get_name() -> str:
        return "triton_mla_sparse"

    @staticmethod
    def get_impl_cls() -> type[TritonMLASparseImpl]:
        return TritonMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLASparseMetadataBuilder]:
        return TritonMLASparseMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class TritonMLASparseImpl(SparseLatentImpl[TritonMLAMetadata], TritonMLAImpl):
    """One layer whose queries attend to listed keys."""

    index_backend: ClassVar[str] = "triton"

    @staticmethod
    def get_backend_cls() -> type[TritonMLASparseBackend]:
        return TritonMLASparseBackend

    def find_rows(
        self, lists: torch.Tensor, plan: DecodePart, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = token_pages(cache) if self.hisparse_cache is None else None
        if found is None:
            return super().find_rows(lists, plan, cache)
        from attnkit.backends.triton import mla_launch

        pages, apart = found
        rows = lists.new_empty(lists.shape)
        num_chosen = lists.new_empty(lists.shape[0])
        lists = rows_of(lists)
        of_plan = (plan.query_start_loc.dtype, plan.seq_lens.dtype, plan.block_table.dtype)
        self._cache_repeats.launch(
            ("choose", mla_launch.choose_block(lists), *of_plan),
            cache,
            mla_launch.choose_rows_grid(lists),
            mla_launch.choose_rows_changes(lists, plan, rows, num_chosen),
            lambda: mla_launch.choose_rows_call(
                lists, plan, cache.shape[1], apart, rows, num_chosen
            ),
        )
        return pages, rows, num_chosen
