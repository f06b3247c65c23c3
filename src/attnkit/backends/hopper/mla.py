"""HopperMLABackend: attention over latents on sm_90 in Gluon, as fast as its products or its memory.

In: a `HopperMLAMetadata`, one layer's tensors and its latent cache, numbers or float8 codes. Out:
attention. Decodes run in `latent_decode`, `latent_narrow` and `latent_codes`, prompts in `prefill` where
their heads have a size that it takes, else in the portable kernel. Launches are repeated from step to
step (`repeat`). Importing this needs neither Triton nor a GPU.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnkit.backends.hopper.mla_plan import (
    HopperMLAMetadata,
    HopperMLAMetadataBuilder,
    Layers,
)
from attnkit.backends.hopper.mla_prefill import HopperMLAPrefill
from attnkit.backends.hopper.sm90 import Sm90Backend
from attnkit.backends.hopper.tuning import CACHE_DTYPES, LATENT_SIZES, latent_config
from attnkit.backends.repeat import kind_of
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
    from attnkit.backends.hopper.config import LatentConfig
    from attnkit.backends.kernel_call import KernelCall


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
        from attnkit.backends.hopper import latent_launch

        plan = attn_metadata.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        coded = self._is_coded
        query, rope, scale = self._scaled_parts(q)
        cache = self._elements(kv_c_and_k_pe_cache, query.dtype)
        output, lse = self._outputs(query, captured=attn_metadata.is_captured)
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
        work = attn_metadata.work(Layers(self.num_heads, coded))
        config = latent_config(
            self.num_heads, cache.shape[1], work.tile_rows, lse=lse is not None, coded=coded
        )
        self._launch(kv_c_and_k_pe_cache, operands, work, config)
        return output, lse

    def _scaled_parts(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Queries over the latent and over its rope columns, as the copy engine reads them, and a
        factor on scores above 0: the kernels apply it after the maximum."""
        from attnkit.backends.hopper.launch import can_copy

        latent = self.layer.dimensions.kv_lora_rank
        query, rope = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
        scale = self.scale
        if scale <= 0:
            query, rope, scale = query * scale, rope * scale, 1.0
        query, rope = (x if can_copy(x) else x.contiguous() for x in (query, rope))
        return query, rope, scale

    def _outputs(
        self, query: torch.Tensor, *, captured: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Memory for outputs and, where it is wanted, LSE."""
        # A replayed batch may have fewer rows: theirs are not written, and somebody may look.
        output = query.new_zeros(query.shape) if captured else query.new_empty(query.shape)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        return output, lse

    def _launch(self, pages: torch.Tensor, operands: Any, work: Any, config: LatentConfig) -> None:
        """Decode, and fold what programs share. `pages`: what `operands.cache` is a view of."""
        from attnkit.backends.hopper import fold_launch, latent_launch

        o = operands
        fold = fold_launch.FoldShape.of(work)
        rows = (o.query, o.query_rope, o.output, *(() if o.lse is None else (o.lse,)))
        kind = (kind_of(*rows), o.block_table.dtype, work.tile_rows)
        self._decode_repeats.launch(
            ("decode", *kind),
            pages,
            latent_launch.decode_grid(work),
            latent_launch.decode_changes(o, work),
            lambda: latent_launch.latent_decode_call(o, work, config),
        )
        self._decode_repeats.launch(
            ("fold", fold, *kind),
            pages,
            fold.grid(work),
            fold_launch.fold_changes(work, o.output, o.lse, o.k_scale),
            lambda: latent_launch.fold_latents_call(o, work, config),
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
        if kv_cache.numel() == 0:
            return
        if self.layer.is_tiled:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
            )
            return
        from attnkit.backends.hopper.cache_launch import write_call, write_changes, write_grid

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

        self._cache_repeats.launch(
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

        are_bytes = self._is_coded or self.layer.is_tiled
        if not (cache.element_size() == 1 if are_bytes else cache.dtype == dtype):
            raise CacheError(
                f"kv_cache is {cache.dtype}, query is {dtype}; the "
                f"{self.get_backend_cls().get_name()} backend reads "
                f"{'codes of a byte' if are_bytes else dtype} for "
                f"kv_cache_dtype={self.layer.kv_cache_dtype!r}"
            )
        cache = cache.view(torch.uint8) if are_bytes else cache
        check_strides("kv_cache", cache, CacheError)
        return cache

    @functools.cached_property
    def _is_coded(self) -> bool:
        return self.layer.cache_format.reads_layer_scales
