"""HopperMLABackend: attention over latents on sm_90 in Gluon, as fast as its products or its memory.

In: a `HopperMLAMetadata`, one layer's tensors and its latent cache. Out: attention. Decodes run in
`latent_decode`, prompts in `prefill` where their heads have a size that it takes, else in the portable
kernel; rows are written by a portable one. Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attnkit.backends.hopper.mla_plan import HopperMLAMetadata, HopperMLAMetadataBuilder
from attnkit.backends.hopper.mla_prefill import HopperMLAPrefill
from attnkit.backends.hopper.sm90 import Sm90Backend
from attnkit.backends.hopper.tuning import LATENT_SIZES, latent_config
from attnkit.backends.triton.mla import TritonMLAImpl
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    MLADimensions,
)
from attnkit.errors import CacheError
from attnkit.mla.prefill_backend import MLAPrefillBackend


class HopperMLABackend(Sm90Backend):
    """Latents of 512 columns with 64 for rope (DeepSeek-V2, -V3, Kimi) on Hopper GPUs, 16-bit."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "hopper_mla"

    @staticmethod
    def get_impl_cls() -> type[HopperMLAImpl]:
        return HopperMLAImpl

    @staticmethod
    def get_builder_cls() -> type[HopperMLAMetadataBuilder]:
        return HopperMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_mla_dimensions(
        cls, dimensions: MLADimensions, kv_cache_dtype: str | None
    ) -> str | None:
        d = dimensions
        if (d.kv_lora_rank, d.qk_rope_head_dim) not in LATENT_SIZES:
            allowed = ", ".join(f"{latent} with {rope}" for latent, rope in LATENT_SIZES)
            return f"{d} is not supported (allowed: kv_lora_rank {allowed} for rope)"
        return None

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        """Below the portable kernels: twice to four times their speed (benchmarks/mla-h200.json)."""
        return 0.5


class HopperMLAImpl(TritonMLAImpl):
    """One layer over latents. Only launches between call and return, in batches of decodes."""

    @staticmethod
    def get_backend_cls() -> type[AttentionBackend]:
        return HopperMLABackend

    def own_prefill(self) -> type[MLAPrefillBackend]:
        portable = super().own_prefill()
        sizes = self.layer.dimensions
        return portable if HopperMLAPrefill.supports_dimensions(sizes) else HopperMLAPrefill

    def forward_mqa(  # type: ignore[override]
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: HopperMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the latents themselves.

        Raises:
            CacheError: the copy engine cannot read the cache, or that has another dtype than `q`.
        """
        # Here, so that the class can be asked questions where Triton is not installed.
        from attnkit.backends.hopper import latent_launch, launch

        plan = attn_metadata.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        latent = self.layer.dimensions.kv_lora_rank
        query, rope = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
        cache = kv_c_and_k_pe_cache
        launch.check_strides("kv_cache", cache, CacheError)
        if cache.dtype != query.dtype:
            raise CacheError(
                f"kv_cache is {cache.dtype}, query is {query.dtype}; the hopper_mla backend reads "
                "latents of the query's dtype"
            )
        scale = self.scale
        if scale <= 0:  # The kernel applies it after the maximum.
            query, rope, scale = query * scale, rope * scale, 1.0
        query, rope = (x if launch.can_copy(x) else x.contiguous() for x in (query, rope))
        # A replayed batch may have fewer rows: theirs are not written, and somebody may look.
        captured = attn_metadata.is_captured
        output = query.new_zeros(query.shape) if captured else query.new_empty(query.shape)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        operands = latent_launch.LatentOperands(
            query=query,
            query_rope=rope,
            cache=cache,
            output=output,
            lse=lse,
            block_table=plan.block_table,
            scale=scale,
        )
        work = attn_metadata.work(self.num_heads)
        page_size = cache.shape[1]
        config = latent_config(self.num_heads, page_size, work.tile_rows, lse=lse is not None)
        latent_launch.latent_decode_call(operands, work, config).launch()
        latent_launch.fold_latents_call(operands, work, config).launch()
        return output, lse
