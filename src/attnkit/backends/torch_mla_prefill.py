"""TorchMLAPrefill: prefills of layers over latents through torch's own flash attention for CPUs.

In: as `MLAPrefillBackend`. Out: attention, one request after the other. torch wants values as large as
keys, so they are padded with zeros and cut again.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch.nn.functional import pad

from attnkit.contract import DeviceCapability
from attnkit.kvcache.read import read_tokens
from attnkit.mla.plan import ContextChunk, PrefillPart
from attnkit.mla.prefill_backend import MLAPrefillBackend


class TorchMLAPrefill(MLAPrefillBackend):
    """Without a compiler or a library; on a CPU, whose operator returns the LSE."""

    @staticmethod
    def get_name() -> str:
        return "torch"

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.platform == "cpu"

    def run_prefill_new_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefillPart,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        for start, end in itertools.pairwise(plan.query_start_loc.tolist()):
            rows = slice(start, end)
            self._attend(query[rows], key[rows], value[rows], True, output[rows], lse[rows])

    def run_prefill_context_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: ContextChunk,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        starts = chunk.query_start_loc.tolist()
        for request, kv_len in enumerate(chunk.kv_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            table = chunk.block_table[request]
            keys, values = (read_tokens(x, table, kv_len) for x in (key, value))
            self._attend(query[rows], keys, values, False, output[rows], lse[rows])

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if query.shape[0] == 0:
            return
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
