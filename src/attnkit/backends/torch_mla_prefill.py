"""TorchMLAPrefill: prefills of layers over latents through torch's own flash attention for CPUs.

In: as `MLAPrefillBackend`. Out: attention, one request after the other. torch wants values as large as
keys, so they are padded with zeros and cut again.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from attnkit.contract import DeviceCapability
from attnkit.mla.prefill_backend import RequestwisePrefill


class TorchMLAPrefill(RequestwisePrefill):
    """Without a compiler or a library; on a CPU, whose operator returns the LSE."""

    @staticmethod
    def get_name() -> str:
        return "torch"

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.platform == "cpu"

    def attend_request(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if key.shape[0] == 0:
            output.zero_()
            lse.fill_(-math.inf)
            return
        size = max(query.shape[-1], value.shape[-1])
        heads = [pad(x, (0, size - x.shape[-1])).transpose(0, 1)[None] for x in (query, key, value)]
        out, own_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, causal, scale=self.scale
        )
        output.copy_(out[0].transpose(0, 1)[..., : value.shape[-1]])
        lse.copy_(own_lse[0].T)
