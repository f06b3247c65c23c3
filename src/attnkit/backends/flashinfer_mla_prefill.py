"""FlashInferMLAPrefill: prefills of layers over latents by an installed FlashInfer.

In: as `MLAPrefillBackend`. Out: attention by its wrapper of ragged tensors. It plans with heads, scale
and dtype: the first layer of a kind plans a step, and a chunk of its context, for the others.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from attnkit.backends.flashinfer import MODULE, FlashInferBackend, Wrappers
from attnkit.backends.libraries import natural_from_base_2
from attnkit.contract import DeviceCapability, MLADimensions
from attnkit.mla.ragged import RaggedBatch, RaggedPrefill

_HEAD_SIZES = ((192, 128), (64, 64), (128, 128), (256, 256))


class FlashInferMLAPrefill(RaggedPrefill):
    """Heads of DeepSeek-V2, -V3 and Kimi, and some of one size, in 16 bits."""

    @staticmethod
    def get_name() -> str:
        return "flashinfer"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return FlashInferBackend.unavailable_reason()

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return FlashInferBackend.supports_compute_capability(capability)

    @classmethod
    def supports_dimensions(cls, dimensions: MLADimensions) -> str | None:
        sizes = (dimensions.qk_head_dim, dimensions.v_head_dim)
        if sizes not in _HEAD_SIZES:
            allowed = ", ".join(f"{qk} / {v}" for qk, v in _HEAD_SIZES)
            return f"heads of {sizes[0]} / {sizes[1]} are not supported (allowed: {allowed})"
        return None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: RaggedBatch,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        d = self.dimensions
        kind = (
            self.get_name(),
            self.num_heads,
            d.qk_head_dim,
            d.v_head_dim,
            self.scale,
            query.dtype,
        )
        wrapper = batch.planned.get(kind)
        if wrapper is None:
            wrapper = batch.planned[kind] = _wrappers(query.device).ragged()
            wrapper.plan(
                batch.query_start_loc_cpu,
                batch.key_start_loc_cpu,
                self.num_heads,
                self.num_heads,
                d.qk_head_dim,
                head_dim_vo=d.v_head_dim,
                causal=causal,
                sm_scale=self.scale,
                q_data_type=query.dtype,
                kv_data_type=key.dtype,
            )
        num_keys = int(batch.key_start_loc_cpu[-1])
        out, base_2 = wrapper.run(query, key[:num_keys], value[:num_keys], return_lse=True)
        return out, natural_from_base_2(base_2)


@functools.cache
def _wrappers(device: torch.device) -> Wrappers:
    """Of a device: its layers run one after the other, so they share a workspace."""
    module: Any = importlib.import_module(MODULE)
    return Wrappers.on(module, device)
