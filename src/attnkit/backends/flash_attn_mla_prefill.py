"""FlashAttnMLAPrefill: prefills of layers over latents by an installed FlashAttention.

In: as `MLAPrefillBackend`. Out: attention by the build that `flash_attn` uses. Version 3 takes values
smaller than keys in some sizes; elsewhere they are padded with zeros and cut again.
"""

from __future__ import annotations

import importlib

import torch
from torch.nn.functional import pad

from attnkit.backends.flash_attn import (
    HOPPER,
    FlashAttnBackend,
    attend_tokens,
    flash_attention_module,
)
from attnkit.contract import DeviceCapability, MLADimensions
from attnkit.mla.ragged import RaggedBatch, RaggedPrefill


class FlashAttnMLAPrefill(RaggedPrefill):
    """Heads up to 256 in 16 bits, as FlashAttention does them."""

    def __init__(self, num_heads: int, scale: float, dimensions: MLADimensions) -> None:
        super().__init__(num_heads, scale, dimensions)
        self._library = importlib.import_module(flash_attention_module() or HOPPER)
        qk, v = dimensions.qk_head_dim, dimensions.v_head_dim
        self._padding = 0 if _takes(FlashAttnBackend.version(), qk, v) else qk - v

    @staticmethod
    def get_name() -> str:
        return "flash_attn"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return FlashAttnBackend.unavailable_reason()

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return FlashAttnBackend.supports_compute_capability(capability)

    @classmethod
    def supports_dimensions(cls, dimensions: MLADimensions) -> str | None:
        qk, v = dimensions.qk_head_dim, dimensions.v_head_dim
        if qk % 8 or v % 8 or qk > 256 or v > qk:
            return (
                f"heads of {qk} / {v} are not supported (allowed: multiples of 8 up to 256, values no "
                "larger than keys)"
            )
        return None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend_tokens(
            self._library,
            query,
            key,
            pad(value, (0, self._padding)) if self._padding else value,
            query_start_loc=batch.query_start_loc,
            key_start_loc=batch.key_start_loc,
            max_query_len=batch.max_query_len,
            max_key_len=batch.max_key_len,
            scale=self.scale,
            causal=causal,
        )
        return out[..., : value.shape[-1]], lse.T


def _takes(version: int, head_size: int, head_size_v: int) -> bool:
    """Whether the kernels have values of that size: as `flash_api.cpp` of version 3 checks it."""
    if head_size == head_size_v:
        return True
    return version == 3 and (
        (128 < head_size <= 192 and 96 < head_size_v <= 128) or head_size <= 64
    )
