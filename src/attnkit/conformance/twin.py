"""The twin: one more right backend, in steps small enough that a mistake can be put into any of them.

In: what every impl gets. Out: attention, whole requests at a time with a mask, the cache written by
`do_kv_cache_update`. It is written apart from the reference and passes the whole kit; `faults`
overrides one step at a time to show that the kit notices.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    AttentionVariant,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
)

Tensor = torch.Tensor


class TwinImpl(AttentionImpl[CommonAttentionMetadata]):
    """Right dense attention in small steps, so that a mistake can be put into any of them."""

    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        head_size_v: int | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.variant = AttentionVariant.from_impl_args(
            num_heads=num_heads,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            sinks=sinks,
            use_alibi_sqrt=use_alibi_sqrt,
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        block_size = kv_cache.shape[2]
        for row, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cell = kv_cache[slot // block_size, :, slot % block_size]
                cell[:, : self.head_size] = key[row].to(cell.dtype)
                cell[:, self.head_size :] = value[row].to(cell.dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.refuse_output_scales(output_scale, output_block_scale)
        if attn_metadata is None:
            return self.profile(output)
        lse = torch.full(query.shape[:2], -math.inf)
        for request in range(attn_metadata.num_reqs):
            rows = self.rows(attn_metadata, request)
            if self.variant.attn_type is AttentionType.DECODER:
                kv_len = self.kv_len(attn_metadata, request)
                table = self.block_table(attn_metadata, request)
                k, v = self.gather(kv_cache, table, kv_len)
            else:
                k, v = key[rows], value[rows]
            q = query[rows].float()
            ahead = self.ahead(q.shape[0], k.shape[0])
            seen = self.seen(ahead, self.causal(attn_metadata, request))
            seen = seen | self.in_prefix(ahead, self.prefix(attn_metadata, request))
            words = self.words(attn_metadata, rows)
            if words is not None:
                seen = self.of_tree(seen, ahead, words)
            for span in self.ranges(attn_metadata, request):
                seen = self.with_range(seen, ahead, *span)
            k, v = self.per_query_head(k), self.per_query_head(v)
            score = self.score(torch.einsum("qhd,khd->hqk", q, k), ahead, seen)
            out, row_lse = self.softmax(score, seen, self.values(v, seen))
            self.store(output, lse, rows, out, row_lse)
        self.finish(output, lse, attn_metadata)
        return (output, lse) if self.need_to_return_lse_for_decode else output

    def profile(self, output: Tensor) -> Tensor:
        return output.zero_()

    def rows(self, batch: CommonAttentionMetadata, request: int) -> slice:
        start, end = batch.query_start_loc[request : request + 2].tolist()
        return slice(start, end)

    def kv_len(self, batch: CommonAttentionMetadata, request: int) -> int:
        return int(batch.seq_lens[request])

    def block_table(self, batch: CommonAttentionMetadata, request: int) -> Tensor:
        return batch.block_table_tensor[request].long()

    def causal(self, batch: CommonAttentionMetadata, request: int) -> bool:
        if self.variant.attn_type is not AttentionType.DECODER:
            return False
        return bool(batch.causal[request] if isinstance(batch.causal, Tensor) else batch.causal)

    def gather(self, kv_cache: Tensor, table: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        block_size = kv_cache.shape[2]
        pages = kv_cache[table[: -(-kv_len // block_size)]]
        tokens = pages.permute(0, 2, 1, 3).flatten(0, 1)[:kv_len].float()
        return tokens[..., : self.head_size], tokens[..., self.head_size :]

    def ahead(self, q_len: int, kv_len: int) -> Tensor:
        """Key position minus query position."""
        return torch.arange(kv_len)[None, :] - torch.arange(kv_len - q_len, kv_len)[:, None]

    def window(self) -> int | None:
        return self.variant.sliding_window

    def seen(self, ahead: Tensor, causal: bool) -> Tensor:
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        window = self.window()
        if window is not None:
            seen = seen & (ahead > -window) & (ahead < window)
        return seen

    def prefix(self, batch: CommonAttentionMetadata, request: int) -> int:
        """Keys below this are not left of a window."""
        lens = batch.rswa_prefix_lens
        return 0 if lens is None else int(lens[request])

    def in_prefix(self, ahead: Tensor, prefix: int) -> Tensor:
        return (torch.arange(ahead.shape[1]) < prefix) & (ahead <= 0)

    def ranges(self, batch: CommonAttentionMetadata, request: int) -> list[tuple[int, int]]:
        """(first, last) positions that are seen in both directions."""
        if batch.mm_req_doc_ranges is None or self.variant.attn_type is not AttentionType.DECODER:
            return []
        return batch.mm_req_doc_ranges.get(request, [])

    def with_range(self, seen: Tensor, ahead: Tensor, first: int, last: int) -> Tensor:
        q_len, kv_len = ahead.shape
        keys, queries = torch.arange(kv_len), torch.arange(kv_len - q_len, kv_len)
        return seen | self.inside(queries, first, last)[:, None] & self.inside(keys, first, last)

    def inside(self, positions: Tensor, first: int, last: int) -> Tensor:
        return (first <= positions) & (positions <= last)

    def words(self, batch: CommonAttentionMetadata, rows: slice) -> Tensor | None:
        """int64 (q_len,), where the request is a tree."""
        if batch.tree_mask is None or not bool(batch.tree_mask[rows].any()):
            return None
        return batch.tree_mask[rows]

    def of_tree(self, seen: Tensor, ahead: Tensor, words: Tensor) -> Tensor:
        q_len, kv_len = ahead.shape
        new = self.new(torch.arange(kv_len), kv_len - q_len)
        return (new < 0) | (words[:, None] >> new.clamp(0, 63) & 1).bool()

    def new(self, keys: Tensor, context: int) -> Tensor:
        """Which of the step's own tokens a key is; negative: none."""
        return keys - context

    def per_query_head(self, x: Tensor) -> Tensor:
        return x.float().repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def score(self, score: Tensor, ahead: Tensor, seen: Tensor) -> Tensor:
        return self.cap(score * self.variant.scale) + self.bias(ahead)

    def cap(self, score: Tensor) -> Tensor:
        cap = self.variant.logits_soft_cap
        return score if cap is None else cap * torch.tanh(score / cap)

    def bias(self, ahead: Tensor) -> Tensor:
        slopes = self.variant.alibi_slopes
        if slopes is None:
            return torch.zeros(())
        distance = -(-ahead).clamp(min=0).sqrt() if self.variant.use_alibi_sqrt else ahead
        return slopes[:, None, None] * distance

    def values(self, v: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen.any(0)[:, None, None], v, 0.0)

    def sinks(self) -> Tensor:
        sinks = self.variant.sinks
        return torch.full((self.num_heads,), -math.inf) if sinks is None else sinks

    def softmax(self, score: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        score = score.masked_fill(~seen, -math.inf)
        sink = self.sinks()[:, None]
        top = torch.maximum(score.amax(-1), sink) if score.shape[-1] else sink
        top = torch.where(torch.isinf(top), 0.0, top)
        weights = torch.exp(score - top[..., None])
        total = weights.sum(-1) + torch.exp(sink - top)
        out = torch.einsum("hqk,khd->qhd", weights, v)
        out = out / torch.where(total == 0, 1.0, total).T[..., None]
        return out, self.lse(top, total, sink)

    def lse(self, top: Tensor, total: Tensor, sink: Tensor) -> Tensor:
        return (top + torch.log(total)).T

    def store(self, output: Tensor, lse: Tensor, rows: slice, out: Tensor, row_lse: Tensor) -> None:
        output[rows] = out.to(output.dtype)
        lse[rows] = row_lse

    def finish(self, output: Tensor, lse: Tensor, batch: CommonAttentionMetadata) -> None:
        return


class TwinBackend(AttentionBackend):
    """Claims what the twin does, which is all but cross attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float32", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False
    impl_cls: ClassVar[type[TwinImpl]] = TwinImpl
    builder_cls: ClassVar[type[AttentionMetadataBuilder[Any]]] = CommonMetadataBuilder

    @staticmethod
    def get_name() -> str:
        return "twin"

    @classmethod
    def get_impl_cls(cls) -> type[TwinImpl]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls.builder_cls

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type != AttentionType.ENCODER_DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_tree_mask(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_head_size_v(cls, head_size: int, head_size_v: int) -> bool:
        return True
