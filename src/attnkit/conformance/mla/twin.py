"""The MLA twin: one more right backend over latents, in steps small enough to put a mistake into any.

In: what every impl gets. Out: attention, whole requests at a time with a mask. It is written apart from
the reference and from `mla.prefill`, and passes the whole kit; `faults` overrides one step at a time.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from attnkit.kvcache.formats import latent_format
from attnkit.mla.builder import MLAMetadataBuilder
from attnkit.mla.plan import ContextChunk, MLAMetadata

Tensor = torch.Tensor


class TwinMLAImpl(MLAAttentionImpl[MLAMetadata]):
    """Right attention over latents in small steps."""

    can_return_lse_for_decode = True
    can_return_lse_for_prefill = True
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        self.num_heads, self.scale, self.rank = num_heads, scale, kv_lora_rank
        self.nope, self.rope, self.value_size = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.stored, self.kv_b_proj = latent_format(kv_cache_dtype), kv_b_proj
        self.indexer: Any = indexer

    # The cache.

    def slots(self, slot_mapping: Tensor) -> list[tuple[int, int]]:
        """(row, slot) of what is written."""
        return [(row, slot) for row, slot in enumerate(slot_mapping.tolist()) if slot >= 0]

    def row(self, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor) -> Tensor:
        return self.stored.encode(kv_c[None, None], k_pe[None], k_scale, k_scale)[0, 0]

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        for row, slot in self.slots(slot_mapping):
            cell = kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]]
            cell.copy_(self.row(kv_c_normed[row], k_pe[row], k_scale))

    def numbers(self, contents: Tensor, k_scale: Tensor) -> Tensor:
        """Rows of the cache (..., C) as float32 latents and rotated parts side by side."""
        parts = self.stored.decode(contents[..., None, :], self.rank, self.rope, k_scale, k_scale)
        return torch.cat(parts, dim=-1)[..., 0, :]

    def gather(self, cache: Tensor, table: Tensor, kv_len: int, k_scale: Tensor) -> Tensor:
        pages = cache[table[: -(-kv_len // cache.shape[1])].long()]
        return self.numbers(pages.flatten(0, 1)[:kv_len], k_scale)

    # Decodes.

    def table_row(self, plan: Any, request: int, first_row: int) -> Tensor:
        return plan.block_table[request]

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(q, Tensor)
        plan = attn_metadata.decode
        assert plan is not None
        out = q.new_zeros(*q.shape[:2], self.rank)
        lse = torch.full(q.shape[:2], -math.inf)
        starts, kv_lens = plan.query_start_loc.tolist(), plan.seq_lens.tolist()
        for request, kv_len in enumerate(kv_lens):
            rows = slice(starts[request], starts[request + 1])
            if rows.start == rows.stop:
                continue
            table = self.table_row(plan, request, rows.start)
            latents = self.gather(kv_c_and_k_pe_cache, table, kv_len, layer._k_scale)
            seen = self.seen(rows.stop - rows.start, kv_len)
            score = self.latent_score(q[rows].float(), latents) * self.softmax_scale()
            if self.indexer is not None:
                score = score + self.times_named(self.lists()[rows], seen).log()
            part, part_lse = self.softmax(
                score, seen, self.latent_values(latents)[:, None].expand(-1, self.num_heads, -1)
            )
            out[rows], lse[rows] = part.to(out.dtype), part_lse
        return out, lse if self.need_to_return_lse_for_decode else None

    def lists(self) -> Tensor:
        return self.indexer.topk_indices_buffer

    def times_named(self, lists: Tensor, seen: Tensor) -> Tensor:
        """How often each seen key stands in the list of each query: (q_len, kv_len)."""
        named = lists[:, :, None] == torch.arange(seen.shape[1])
        return (named & seen[:, None]).sum(1)

    def latent_score(self, q: Tensor, latents: Tensor) -> Tensor:
        return torch.einsum("qhd,kd->hqk", q, latents)

    def latent_values(self, latents: Tensor) -> Tensor:
        return latents[:, : self.rank]

    # Prefills.

    def own(self, kv_c: Tensor, k_pe: Tensor, cache: Tensor, k_scale: Tensor) -> Tensor:
        """This step's latents as they read back."""
        contents = self.stored.encode(kv_c[:, None], k_pe, k_scale, k_scale)[:, 0]
        return self.numbers(contents.to(cache.dtype), k_scale)

    def expand(self, latents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        heads = self.kv_b_proj(latents[..., : self.rank].to(dtype))
        heads = heads.unflatten(-1, (self.num_heads, -1)).float()
        rotated = latents[..., self.rank :].to(dtype).float().unsqueeze(-2)
        rotated = rotated.expand(*heads.shape[:-1], -1)
        return torch.cat([heads[..., : self.nope], rotated], dim=-1), heads[..., self.nope :]

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLAMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> Tensor | None:
        plan = attn_metadata.prefill
        assert plan is not None
        out = torch.zeros(q.shape[0], self.num_heads, self.value_size)
        lse = torch.full(q.shape[:2], -math.inf)
        rows = torch.arange(q.shape[0]) if plan.own_rows is None else plan.own_rows
        key, value = self.expand(
            self.own(kv_c_normed, k_pe, kv_c_and_k_pe_cache, k_scale)[rows], q.dtype
        )
        starts = plan.query_start_loc.tolist()
        for request in range(len(starts) - 1):
            part = slice(starts[request], starts[request + 1])
            out[rows[part]], lse[rows[part]] = self.attend(
                q[rows[part]], key[part], value[part], causal=True
            )
        for chunk in plan.chunks:
            self.add_chunk(q, kv_c_and_k_pe_cache, chunk, k_scale, out, lse)
        output.copy_(out.flatten(1))
        return lse if self.need_to_return_lse_for_decode else None

    def add_chunk(
        self,
        q: Tensor,
        cache: Tensor,
        chunk: ContextChunk,
        k_scale: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        starts = (chunk.rows.start + chunk.query_start_loc).tolist()
        for request, kv_len in enumerate(self.chunk_lens(chunk, cache.shape[1])):
            rows = slice(starts[request], starts[request + 1])
            latents = self.gather(
                cache, chunk.pages[chunk.block_table[request].long()], kv_len, k_scale
            )
            key, value = self.expand(latents, q.dtype)
            part, part_lse = self.attend(q[rows], key, value, causal=False)
            out[rows], lse[rows] = self.merge(out[rows], lse[rows], part, part_lse)

    def chunk_lens(self, chunk: ContextChunk, block_size: int) -> list[int]:
        return chunk.kv_lens.tolist()

    def merge(
        self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        both = torch.logaddexp(lse, part_lse)
        safe = torch.where(both == -math.inf, 0.0, both)
        share, part_share = torch.exp(lse - safe), torch.exp(part_lse - safe)
        return out * share[..., None] + part * part_share[..., None], both

    # Both.

    def softmax_scale(self) -> float:
        return self.scale

    def seen(self, q_len: int, kv_len: int) -> Tensor:
        positions = torch.arange(kv_len - q_len, kv_len)
        return torch.arange(kv_len)[None, :] <= positions[:, None]

    def attend(
        self, q: Tensor, key: Tensor, value: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        seen = torch.ones(q.shape[0], key.shape[0], dtype=torch.bool)
        if causal:
            seen = self.seen(q.shape[0], key.shape[0])
        score = torch.einsum("qhd,khd->hqk", q.float(), key) * self.softmax_scale()
        return self.softmax(score, seen, value)

    def softmax(self, score: Tensor, seen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        score = score.masked_fill(~seen, -math.inf)
        lse = torch.logsumexp(score, dim=-1)
        weights = torch.exp(score - torch.where(lse == -math.inf, 0.0, lse)[..., None])
        value = torch.where(seen.any(0)[:, None, None], value, 0.0)
        return torch.einsum("hqk,khv->qhv", weights, value), self.lse(lse.T)

    def lse(self, lse: Tensor) -> Tensor:
        return lse


class SparseTwinMLAImpl(TwinMLAImpl):
    """The same over listed keys."""

    is_sparse = True
    supports_dense_mha_prefill = False


class TwinMLABackend(AttentionBackend):
    """Claims what the twin does."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8"]
    forward_includes_kv_cache_update = False
    impl_cls: ClassVar[type[TwinMLAImpl]] = TwinMLAImpl
    builder_cls: ClassVar[type[AttentionMetadataBuilder[Any]]] = MLAMetadataBuilder

    @staticmethod
    def get_name() -> str:
        return "mla_twin"

    @classmethod
    def get_impl_cls(cls) -> type[TwinMLAImpl]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls.builder_cls

    @classmethod
    def is_mla(cls) -> bool:
        return True


class EveryRequestDecodes(MLAMetadataBuilder):
    """Lists are of queries, so nothing is expanded."""

    decode_query_len: ClassVar[int] = 1 << 30


class SparseTwinMLABackend(TwinMLABackend):
    """Claims what the sparse twin does."""

    impl_cls: ClassVar[type[TwinMLAImpl]] = SparseTwinMLAImpl
    builder_cls: ClassVar[type[AttentionMetadataBuilder[Any]]] = EveryRequestDecodes

    @staticmethod
    def get_name() -> str:
        return "mla_sparse_twin"

    @classmethod
    def is_sparse(cls) -> bool:
        return True
