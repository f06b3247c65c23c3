"""HopperMLABackend: attention over latents on sm_90 in Gluon, as fast as its products or its memory.

In: a `HopperMLAMetadata`, one layer's tensors and its latent cache, numbers or float8 codes. Out:
attention. Decodes run in `latent_decode` and `latent_narrow`, prompts in `prefill` where their heads
have a size that it takes, else in the portable kernel. Launches are repeated from step to step
(`repeat`). Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnkit.backends.hopper.mla_plan import HopperMLAMetadata, HopperMLAMetadataBuilder
from attnkit.backends.hopper.mla_prefill import HopperMLAPrefill
from attnkit.backends.hopper.sm90 import Sm90Backend
from attnkit.backends.hopper.tuning import CACHE_DTYPES, LATENT_SIZES, latent_config
from attnkit.backends.stored import Stored
from attnkit.backends.triton.mla import TritonMLAImpl
from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    MLADimensions,
)
from attnkit.errors import CacheError
from attnkit.kvcache.formats import layer_scale
from attnkit.mla.prefill_backend import MLAPrefillBackend

if TYPE_CHECKING:
    from attnkit.backends.kernel_call import KernelCall
    from attnkit.backends.repeat import Repeats


class HopperMLABackend(Sm90Backend):
    """Latents of 512 columns with 64 for rope (DeepSeek-V2, -V3, Kimi) on Hopper GPUs, 16-bit;
    cached as they are or as float8 codes with one scale."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

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
        from attnkit.backends.repeat import kind_of

        plan = attn_metadata.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        latent, coded = self.layer.dimensions.kv_lora_rank, self._is_coded
        query, rope = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
        cache = self._elements(kv_c_and_k_pe_cache, query.dtype)
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
            k_scale=layer_scale("k_scale", layer._k_scale, 1) if coded else None,
        )
        work = attn_metadata.work(self.num_heads, coded)
        rows, has_lse = work.tile_rows, lse is not None
        config = latent_config(self.num_heads, cache.shape[1], rows, lse=has_lse, coded=coded)
        fold = latent_launch.FoldShape.of(work)
        kind = (kind_of(query, rope, output), plan.block_table.dtype, rows, has_lse)
        self._repeats.launch(
            ("decode", *kind),
            kv_c_and_k_pe_cache,
            latent_launch.decode_grid(work),
            latent_launch.decode_changes(operands, work),
            lambda: latent_launch.latent_decode_call(operands, work, config),
        )
        self._repeats.launch(
            ("fold", fold, *kind),
            kv_c_and_k_pe_cache,
            fold.grid(work),
            latent_launch.fold_changes(operands, work),
            lambda: latent_launch.fold_latents_call(operands, work, config),
        )
        return output, lse

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if kv_cache.numel() == 0:
            return
        from attnkit.backends.hopper.cache_launch import write_call, write_changes, write_grid
        from attnkit.backends.repeat import kind_of

        rows = (kv_c_normed[:, None], k_pe)
        latent, rope = (x if x.stride(-1) == 1 else x.contiguous() for x in rows)
        slots = slot_mapping.flatten()
        changes = write_changes(latent, rope, slots)
        if self._is_coded:
            scale = layer_scale("k_scale", k_scale, 1)
            changes |= {"k_scale_ptr": scale, "v_scale_ptr": scale}

        def call() -> KernelCall:
            stored = Stored.of(
                kv_cache[:, None],
                self.layer.cache_format,
                latent.shape[-1],
                rope.shape[-1],
                k_scale,
                k_scale,
                has_e4m3=False,  # Codes as bytes: the copy engine has no float8.
            )
            return write_call(latent, rope, stored, slots)

        self._repeats.launch(
            ("write", kind_of(latent, rope), slots.dtype),
            kv_cache,
            write_grid(latent, slots),
            changes,
            call,
        )

    def _elements(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The cache as the copy engine reads it, codes as bytes.

        Raises:
            CacheError: it cannot, or these are neither codes nor numbers of `dtype`.
        """
        from attnkit.backends.hopper.launch import check_strides

        is_stored_so = cache.element_size() == 1 if self._is_coded else cache.dtype == dtype
        if not is_stored_so:
            raise CacheError(
                f"kv_cache is {cache.dtype}, query is {dtype}; the hopper_mla backend reads "
                f"{'codes of a byte' if self._is_coded else dtype} for "
                f"kv_cache_dtype={self.layer.kv_cache_dtype!r}"
            )
        cache = cache.view(torch.uint8) if self._is_coded else cache
        check_strides("kv_cache", cache, CacheError)
        return cache

    @functools.cached_property
    def _is_coded(self) -> bool:
        return self.layer.cache_format.reads_layer_scales

    @functools.cached_property
    def _repeats(self) -> Repeats:
        from attnkit.backends.repeat import Repeats

        return Repeats()
