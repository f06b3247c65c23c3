"""The reference backend: eager torch on any device, written like the formula. It defines what is right.

In: the contract's batch, one layer's tensors and its paged cache. Out: attention, one request and
one query row at a time, in float32. A row gathers exactly the keys it sees, so what is invisible is
neither read into a product nor multiplied by zero. It is slow on purpose: nothing here is clever.

`docs/semantics.md` is the same law in words; the conformance kit's oracle is the same law in
float64, without pages and without this code.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attnkit.backends.dense import DenseBackend, DenseImpl
from attnkit.contract import (
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    AttentionVariant,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    QuantKey,
)
from attnkit.kvcache.read import read_tokens
from attnkit.output_quant import OUTPUT_KEYS, QuantizedOutput, attend_then_quantize

_CACHELESS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class ReferenceBackend(DenseBackend):
    """Every variant of dense attention, any head size, any page size, any device."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "reference"

    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return ReferenceImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return ReferenceMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # A row's arithmetic depends on its own keys alone, so there is no mode to switch.
        return True

    @classmethod
    def estimate_cost(cls, request: Any) -> float:
        # Chosen by `auto` only where nothing else serves.
        return 1000.0


class ReferenceMetadataBuilder(CommonMetadataBuilder):
    """The plan is the batch, its ranges, prefixes and trees checked."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CommonAttentionMetadata:
        common_attn_metadata.mm_token_spans()
        common_attn_metadata.checked_rswa_prefix_lens()
        common_attn_metadata.checked_tree_mask()
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class ReferenceImpl(DenseImpl[CommonAttentionMetadata]):
    """One layer, row by row. Reads lengths from the device on every call, so it cannot be captured."""

    backend_name = "reference"

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return quant_key in OUTPUT_KEYS

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CommonAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Write this step's K and V, then attend. Keys are read back from the cache, except by the
        encoder types, which attend to `key` and `value` themselves.

        Cross attention (`ENCODER_DECODER`) sees the first `encoder_seq_lens` tokens of the cache.
        """
        if output_scale is not None or output_block_scale is not None:
            return attend_then_quantize(
                self.forward,
                self.head_size_v,
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                QuantizedOutput(codes=output, scale=output_scale, block_scale=output_block_scale),
            )
        if attn_metadata is None:
            output.zero_()
            return output
        variant = self.variant.to(query.device)
        cacheless = variant.attn_type in _CACHELESS
        writes = not cacheless and key is not None and self.kv_sharing_target_layer_name is None
        if writes:
            self.cache_format.write(
                key, value, kv_cache, attn_metadata.slot_mapping, layer._k_scale, layer._v_scale
            )

        lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float32, device=query.device)
        starts = attn_metadata.query_start_loc.tolist()
        kv_lens = attn_metadata.seq_lens
        if variant.attn_type == AttentionType.ENCODER_DECODER:
            assert attn_metadata.encoder_seq_lens is not None, (
                "cross attention needs encoder lengths"
            )
            kv_lens = attn_metadata.encoder_seq_lens
        spans = prefixes = words = None
        if variant.attn_type == AttentionType.DECODER:
            spans, prefixes = attn_metadata.mm_token_spans(), attn_metadata.rswa_prefix_lens
            words = attn_metadata.tree_mask
        for request, kv_len in enumerate(kv_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            if cacheless:
                keys, values = key[rows], value[rows]
            else:
                keys, values = self._gather(
                    layer, kv_cache, attn_metadata.block_table_tensor[request], kv_len
                )
            causal = _is_causal(attn_metadata, variant, request)
            prefix = 0 if prefixes is None else int(prefixes[request])
            first = kv_len - (rows.stop - rows.start)
            for position, row in enumerate(range(rows.start, rows.stop), start=first):
                span = None if spans is None else spans[row].tolist()
                seen = _visible(position, keys.shape[0], variant, causal, span, prefix)
                word = 0 if words is None else int(words[row])
                if word:
                    seen = _in_tree(keys.shape[0], first, word)
                seen = seen.to(query.device)
                output[row], lse[row] = _attend_row(
                    query[row], keys[seen], values[seen], seen - position, variant
                )
        return (output, lse) if self.need_to_return_lse_for_decode else output

    def _gather(
        self,
        layer: AttentionLayer,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        kv_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One request's keys and values in order: float32 (kv_len, num_kv_heads, size)."""
        tokens = read_tokens(kv_cache.transpose(1, 2), block_table, kv_len)
        return self.cache_format.decode(
            tokens, self.head_size, self.head_size_v, layer._k_scale, layer._v_scale
        )


def _is_causal(batch: CommonAttentionMetadata, variant: AttentionVariant, request: int) -> bool:
    """Whether a request's queries are blind to what comes after them; only a decoder's can be."""
    if variant.attn_type != AttentionType.DECODER:
        return False
    if isinstance(batch.causal, torch.Tensor):
        return bool(batch.causal[request])
    return batch.causal


def _visible(
    position: int,
    kv_len: int,
    variant: AttentionVariant,
    causal: bool,
    span: list[int] | None,
    prefix: int,
) -> torch.Tensor:
    """int64 (n,): positions of the keys a query at `position` sees, in order.

    A query may stand before the first key (more queries than keys): if causal, it sees nothing.

    Args:
        span: keys [start, end) that it sees beside what the layer's mask says.
        prefix: keys below this are not left of any window.
    """
    first, last = 0, kv_len - 1
    if causal:
        last = min(last, position)
    if variant.sliding_window is not None:
        first = max(first, position - variant.sliding_window + 1)
        if not causal:
            last = min(last, position + variant.sliding_window - 1)
    if span is not None:
        first, last = min(first, span[0]), max(last, span[1] - 1)
    seen = torch.arange(max(0, last + 1))
    return seen[(seen < prefix) | (seen >= first)]


def _in_tree(kv_len: int, first: int, word: int) -> torch.Tensor:
    """int64 (n,): positions of the keys a token of a tree sees, in order: all of the context, which ends
    before `first`, and of the step's own tokens those whose bits are set."""
    seen = [j for j in range(kv_len) if j < first or word >> (j - first) & 1]
    return torch.tensor(seen, dtype=torch.int64)


def _attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ahead: torch.Tensor,
    variant: AttentionVariant,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one query over the keys it sees.

    Args:
        query: (num_heads, head_size).
        keys: (n, num_kv_heads, head_size); each serves num_heads / num_kv_heads neighbouring heads.
        values: (n, num_kv_heads, head_size_v).
        ahead: (n,), key position minus query position.

    Returns:
        (num_heads, head_size_v) and LSE (num_heads,), both float32. Without keys: 0, and the sink's
        logit or -inf.
    """
    group = query.shape[0] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)

    score = torch.einsum("hd,nhd->hn", query.float(), keys) * variant.scale
    if variant.logits_soft_cap is not None:
        score = variant.logits_soft_cap * torch.tanh(score / variant.logits_soft_cap)
    if variant.alibi_slopes is not None:
        distance = -torch.sqrt((-ahead).clamp(min=0).float()) if variant.use_alibi_sqrt else ahead
        score = score + variant.alibi_slopes[:, None] * distance

    sink = (
        variant.sinks if variant.sinks is not None else score.new_full(score.shape[:1], -math.inf)
    )
    logits = torch.cat([score, sink[:, None]], dim=1)
    weights = torch.softmax(logits, dim=1)[:, :-1]
    return torch.einsum("hn,nhd->hd", weights, values), torch.logsumexp(logits, dim=1)
