"""The reference backend for latents (MLA): eager torch on any device, written like the formula.

In: an `MLAMetadata`, one layer's tensors and its latent cache. Out: attention, one query row at a time,
in float32, over exactly the keys the row sees. Decodes attend to the latents themselves, prefills to
keys and values expanded per head; both are the same law, and the conformance kit holds each to the
float64 answer.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadataBuilder,
    MLADimensions,
)
from attnkit.kvcache.formats import LATENT_FORMATS, latent_format
from attnkit.kvcache.read import read_tokens
from attnkit.mla.builder import MLAMetadataBuilder
from attnkit.mla.impl import LatentImpl
from attnkit.mla.layer import format_refusal
from attnkit.mla.plan import MLAMetadata
from attnkit.mla.prefill_backend import RequestwisePrefill
from attnkit.mla.sparse import SparseLatentImpl, SparseMLAMetadataBuilder


class ReferenceMLABackend(AttentionBackend):
    """Latents of any sizes, any page size, any device."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(LATENT_FORMATS)
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "reference_mla"

    @staticmethod
    def get_impl_cls() -> type[ReferenceMLAImpl]:
        return ReferenceMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return MLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_mla_dimensions(
        cls, dimensions: MLADimensions, kv_cache_dtype: str | None
    ) -> str | None:
        return format_refusal(dimensions, kv_cache_dtype)

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        # Chosen by `auto` only where nothing else serves.
        return 1000.0


class ReferenceMLAPrefill(RequestwisePrefill):
    """A row at a time."""

    @staticmethod
    def get_name() -> str:
        return "reference"

    def attend_request(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        for row in range(query.shape[0]):
            seen = slice(0, row + 1 if causal else key.shape[0])
            output[row], lse[row] = _attend_row(query[row], key[seen], value[seen], self.scale)


class ReferenceMLAImpl(LatentImpl[MLAMetadata]):
    """One layer, row by row. Reads lengths from the device on every call, so it cannot be captured."""

    prefill_cls = ReferenceMLAPrefill

    @staticmethod
    def get_backend_cls() -> type[ReferenceMLABackend]:
        return ReferenceMLABackend

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
        latent_format(kv_cache_dtype).write(
            kv_c_normed[:, None], k_pe, kv_cache[:, None], slot_mapping.flatten(), k_scale, k_scale
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        plan = attn_metadata.decode
        assert plan is not None, "a batch without decodes has no rows to serve"
        num_heads, rank = self.num_heads, self.layer.dimensions.kv_lora_rank
        output = q.new_zeros(*q.shape[:2], rank)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
        starts = plan.query_start_loc.tolist()
        for request, kv_len in enumerate(plan.seq_lens.tolist()):
            if starts[request] == starts[request + 1]:
                continue  # A padding row: neither its length nor its pages mean anything.
            latents = self._gather(
                kv_c_and_k_pe_cache, plan.block_table[request], kv_len, layer._k_scale
            )
            for row in range(starts[request], starts[request + 1]):
                num_seen = max(0, kv_len - (starts[request + 1] - row) + 1)
                keys = latents[:num_seen, None].expand(-1, num_heads, -1)
                values = keys[..., :rank]
                output[row], lse[row] = _attend_row(q[row], keys, values, self.scale)
        return output, lse if self.need_to_return_lse_for_decode else None

    def _gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, kv_len: int, k_scale: torch.Tensor
    ) -> torch.Tensor:
        """One request's rows in order, float32 (kv_len, kv_lora_rank + qk_rope_head_dim)."""
        tokens = read_tokens(cache, block_table, kv_len)[:, None]
        d = self.layer.dimensions
        parts = self.layer.cache_format.decode(
            tokens, d.kv_lora_rank, d.qk_rope_head_dim, k_scale, k_scale
        )
        return torch.cat(parts, dim=-1)[:, 0]


def _attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one query over all of `keys`.

    Args:
        query: (num_heads, size).
        keys: (n, num_heads, size).
        values: (n, num_heads, size of values).

    Returns:
        (num_heads, size of values) and LSE (num_heads,), both float32. Without keys: 0 and -inf.
    """
    score = torch.einsum("hd,nhd->hn", query.float(), keys.float()) * scale
    weights = torch.softmax(score, dim=1)
    return torch.einsum("hn,nhd->hd", weights, values.float()), torch.logsumexp(score, dim=1)


class ReferenceMLASparseBackend(ReferenceMLABackend):
    """`reference_mla` over chosen keys."""

    @staticmethod
    def get_name() -> str:
        return "reference_mla_sparse"

    @staticmethod
    def get_impl_cls() -> type[ReferenceMLASparseImpl]:
        return ReferenceMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return SparseMLAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class ReferenceMLASparseImpl(SparseLatentImpl[MLAMetadata], ReferenceMLAImpl):
    """One layer whose queries attend to listed keys."""

    @staticmethod
    def get_backend_cls() -> type[ReferenceMLASparseBackend]:
        return ReferenceMLASparseBackend
