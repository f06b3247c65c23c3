"""LatentLayer: the static facts of a layer over latents, as its impl keeps them.

In: an impl's constructor arguments. Out: one frozen value, checked against what the backend says of
sizes and formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnkit.arguments import check_count, check_kind, check_number, check_text
from attnkit.contract import AttentionBackend, MLADimensions
from attnkit.errors import UnsupportedConfiguration
from attnkit.kvcache.formats import LATENT_FORMATS, CacheFormat, latent_format
from attnkit.mla.projection import KvBProjection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentLayer:
    """What `AttentionVariant` is to a dense layer.

    Attributes:
        num_heads: query heads.
        scale: factor on q.k.
        dimensions: of latents and heads.
        kv_cache_dtype: name of the cache's format.
        cache_format: that format.
        projection: `kv_b_proj`.
    """

    num_heads: int
    scale: float
    dimensions: MLADimensions
    kv_cache_dtype: str
    cache_format: CacheFormat
    projection: KvBProjection

    @classmethod
    def from_impl_args(
        cls,
        backend: type[AttentionBackend],
        *,
        num_heads: int,
        scale: float,
        kv_cache_dtype: str,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
    ) -> LatentLayer:
        """Check and keep an impl's constructor arguments.

        Raises:
            ConfigurationError: a number is none, or no format for latents has this name.
            UnsupportedConfiguration: the backend says no to the sizes; with its reason.
        """
        check_count("num_heads", num_heads)
        check_number("scale", scale)
        check_text("kv_cache_dtype", kv_cache_dtype)
        check_kind("kv_b_proj", kv_b_proj, torch.nn.Module, "the projection as a torch module")
        dimensions = MLADimensions(
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
        )
        cache_format = latent_format(kv_cache_dtype)
        reason = backend.supports_mla_dimensions(dimensions, kv_cache_dtype)
        if reason is not None:
            raise UnsupportedConfiguration(f"{backend.get_name()}: {reason}", (reason,))
        return cls(
            num_heads=num_heads,
            scale=scale,
            dimensions=dimensions,
            kv_cache_dtype=kv_cache_dtype,
            cache_format=cache_format,
            projection=KvBProjection.of(kv_b_proj, num_heads, dimensions),
        )

    @property
    def is_tiled(self) -> bool:
        """The cache has a scale per tile beside its codes."""
        return self.cache_format.has_own_scales


def format_refusal(dimensions: MLADimensions, kv_cache_dtype: str | None) -> str | None:
    """Why rows of these sizes cannot be stored, for `supports_mla_dimensions`; None if they can, or if
    the format is unknown, which is a reason of its own."""
    if kv_cache_dtype not in LATENT_FORMATS:
        return None
    stored = latent_format(kv_cache_dtype)
    return stored.refusal(dimensions.kv_lora_rank, dimensions.qk_rope_head_dim)
