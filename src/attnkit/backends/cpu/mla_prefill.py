"""CpuMLAPrefill: prefills of layers over latents with the dense CPU kernels.

In: as `MLAPrefillBackend`. Out: attention; and the small helpers that the decodes share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnkit.backends.cpu.attend import Request, attend
from attnkit.backends.cpu.launch import NativeBatch, NativeLayer
from attnkit.backends.cpu.native import native_kernels
from attnkit.contract import AttentionVariant, DeviceCapability, MLADimensions
from attnkit.mla.plan import ContextChunk, PrefillPart
from attnkit.mla.prefill_backend import RequestwisePrefill


class CpuMLAPrefill(RequestwisePrefill):
    """The native kernels, or torch where they could not be built."""

    def __init__(self, num_heads: int, scale: float, dimensions: MLADimensions) -> None:
        super().__init__(num_heads, scale, dimensions)
        d = dimensions
        self._kernels = native_kernels()
        self._variant = AttentionVariant.from_impl_args(num_heads=num_heads, scale=scale)
        self._layer = NativeLayer.pack(
            self._variant, num_heads, num_heads, d.qk_head_dim, d.v_head_dim
        )

    @staticmethod
    def get_name() -> str:
        return "cpu"

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
        if self._kernels is not None:
            batch = pack(plan.query_start_loc, plan.query_start_loc[1:], None, causal=True)
            query = dense_rows(query)
            self._kernels.attend_tokens(batch, self._layer, query, key, value, output, lse)
            return
        super().run_prefill_new_tokens(query, key, value, plan, output, lse)

    def run_prefill_context_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: ContextChunk,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if self._kernels is not None:
            batch = pack(chunk.query_start_loc, chunk.kv_lens, chunk.block_table, causal=False)
            self._kernels.attend_pages(
                batch,
                self._layer,
                dense_rows(query),
                key.transpose(1, 2),
                value.transpose(1, 2),
                None,
                output,
                lse,
            )
            return
        super().run_prefill_context_chunk(query, key, value, chunk, output, lse)

    def attend_request(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        own = request_of(0, len(query), len(key), _Tokens(key, value), causal=causal)
        attend(query, [own], self.num_heads, self._variant, output, lse)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Keys and values in order, (tokens, num_heads, size) each."""

    key: torch.Tensor
    value: torch.Tensor

    def __call__(
        self, start: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.key[start:end].to(dtype), self.value[start:end].to(dtype)
        return key.transpose(0, 1), value.transpose(0, 1)


def pack(
    query_start_loc: torch.Tensor,
    kv_lens: torch.Tensor,
    block_table: torch.Tensor | None,
    *,
    causal: bool,
) -> NativeBatch:
    """Requests that have tokens, for the kernels; without a block table `kv_lens` is not read."""
    starts = query_start_loc.contiguous()
    served = torch.nonzero(starts.diff())[:, 0].to(torch.int32)
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    flags = torch.full((starts.shape[0] - 1,), causal)
    return NativeBatch.pack(served, starts, kv_lens.contiguous(), flags, block_table)


def request_of(start: int, q_len: int, kv_len: int, read: Any, *, causal: bool) -> Request:
    return Request(
        start=start,
        q_len=q_len,
        kv_len=kv_len,
        causal=causal,
        window=None,
        spans=None,
        prefix=0,
        read=read,
    )


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with a dense last dimension."""
    return x if x.stride(2) == 1 else x.contiguous()
