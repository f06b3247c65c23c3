"""MLAMetadataBuilder: plan a batch for a backend over latents; ReplayedMLAMetadataBuilder: one whose
plans of decodes are replayed.

In: a `CommonAttentionMetadata`, decodes first where the engine heeds `reorder_batch_threshold`. Out: an
`MLAMetadata`. What depends on lengths is worked out on the host and goes up in one copy; the block ids
of contexts are picked on the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from attnkit.contract import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
    max_decode_query_len,
)
from attnkit.mla.plan import ContextChunk, DecodePart, MLAMetadata, PrefillPart, Span, plan_chunks
from attnkit.upload import Upload


class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata]):
    """Splits a batch by query length alone, so that a request is served alike in every batch whose
    decodes come first; a decode behind a prefill counts as one.

    Attributes:
        workspace_tokens: most context tokens that are expanded at once.
    """

    decode_query_len: ClassVar[int] = 1
    """Requests with at most this many queries, or as many as the engine verifies drafts, are decodes."""

    max_workspace_tokens: ClassVar[int] = 1 << 14
    """With 128 heads of 192 + 128 numbers in two bytes, 1.3 GB."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(self.decode_query_len, supports_spec_as_decode=True)
        # At least one page, else what any batch of this engine can use, within the bound.
        useful = max(
            vllm_config.model_config.max_model_len,
            vllm_config.scheduler_config.max_num_seqs * kv_cache_spec.block_size,
        )
        self.workspace_tokens = max(
            kv_cache_spec.block_size, min(useful, self.max_workspace_tokens)
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLAMetadata:
        """Plan a batch. Host lengths of prefills must be exact, as the contract says they are; where
        the batch has none they are fetched from the device."""
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu.numpy().astype(np.int64)
        query_lens = np.diff(starts)
        num_decodes = self.count_decodes(batch, query_lens)
        num_tokens, num_decode_tokens = int(starts[-1]), int(starts[num_decodes])
        decode = prefill = None
        if num_decode_tokens:
            decode = DecodePart(
                query_start_loc=batch.query_start_loc[: num_decodes + 1],
                seq_lens=batch.seq_lens[:num_decodes],
                block_table=batch.block_table_tensor[:num_decodes],
                # Single lengths may differ on the device, where drafts were moved.
                max_query_len=max(
                    max_decode_query_len(self.vllm_config), int(query_lens[:num_decodes].max())
                ),
                max_seq_len=batch.max_seq_len,
            )
        if num_tokens > num_decode_tokens:
            prefill = self._prefill(batch, starts, num_decodes)
        return MLAMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            slot_mapping=batch.slot_mapping,
            block_size=batch.block_size,
            views=self.views_of(batch),
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=batch.num_reqs - num_decodes,
            num_prefill_tokens=num_tokens - num_decode_tokens,
            decode=decode,
            prefill=prefill,
        )

    def count_decodes(self, batch: CommonAttentionMetadata, query_lens: np.ndarray) -> int:
        """Requests at the front that are decodes: those before the first with more queries than
        `reorder_batch_threshold`."""
        assert self.reorder_batch_threshold is not None
        longer = np.flatnonzero(query_lens > self.reorder_batch_threshold)
        return int(longer[0]) if longer.size else len(query_lens)

    def _prefill(
        self, batch: CommonAttentionMetadata, starts: np.ndarray, first: int
    ) -> PrefillPart:
        starts = starts[first:] - starts[first]
        query_lens = np.diff(starts)
        if batch.seq_lens_cpu_upper_bound is None:
            seq_lens = batch.seq_lens[first:].cpu().numpy().astype(np.int64)
        else:
            seq_lens = batch.seq_lens_cpu_upper_bound[first:].numpy().astype(np.int64)
        own_lens = np.minimum(query_lens, seq_lens)
        own_starts = np.concatenate([[0], np.cumsum(own_lens)])

        upload = Upload(torch.device(self.device))
        part_starts = upload.add(own_starts, np.int32)
        part_rows = None
        if (own_lens < query_lens).any():
            rows = [np.arange(e - n, e) for e, n in zip(starts[1:], own_lens, strict=True)]
            part_rows = upload.add(np.concatenate(rows), np.int64)
        block_size = self.kv_cache_spec.block_size
        # Nobody asks about the context of a request without queries.
        context_lens = np.where(query_lens > 0, seq_lens - query_lens, 0)
        chunks = plan_chunks(context_lens, block_size, max(1, self.workspace_tokens // block_size))
        sketches = [_sketch(spans, starts) for spans in chunks]
        parts = [[upload.add(x, np.int32) for x in sketch] for sketch in sketches]
        _, moved = upload.send()
        table = batch.block_table_tensor[first:]
        return PrefillPart(
            num_tokens=int(starts[-1]),
            query_start_loc=moved[part_starts],
            max_query_len=int(own_lens.max()),
            max_seq_len=int(seq_lens[query_lens > 0].max()),
            own_rows=None if part_rows is None else moved[part_rows],
            chunks=tuple(
                _chunk(sketches[i], spans, starts, [moved[part] for part in parts[i]], table)
                for i, spans in enumerate(chunks)
            ),
            query_start_loc_cpu=own_starts,
        )


class ReplayedMLAMetadataBuilder(MLAMetadataBuilder):
    """Plans are replayed for batches of decodes, whose lengths kernels read on the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLAMetadata:
        """Plan for any batch of decodes of at most these requests and queries, of any contexts."""
        plan = self.build(0, common_attn_metadata)
        assert plan.prefill is None, "only batches of decodes are captured"
        if plan.decode is not None:
            longest = max(plan.decode.max_seq_len, self.vllm_config.model_config.max_model_len)
            plan.decode = replace(plan.decode, max_seq_len=longest)
        plan.is_captured = True
        return plan


def _sketch(spans: list[Span], starts: np.ndarray) -> list[np.ndarray]:
    """A chunk's arrays: query starts, context lengths, block table, and where its pages stand in the
    batch's table (request, column)."""
    first, end = spans[0].request, spans[-1].request + 1
    kv_lens = np.zeros(end - first, dtype=np.int64)
    table = np.zeros((end - first, max(span.num_pages for span in spans)), dtype=np.int64)
    requests, columns = [], []
    num_pages = 0
    for span in spans:
        row = span.request - first
        kv_lens[row] = span.num_tokens
        table[row, : span.num_pages] = num_pages + np.arange(span.num_pages)
        num_pages += span.num_pages
        requests.append(np.full(span.num_pages, span.request))
        columns.append(span.first_page + np.arange(span.num_pages))
    return [
        starts[first : end + 1] - starts[first],
        kv_lens,
        table,
        np.concatenate(requests),
        np.concatenate(columns),
    ]


def _chunk(
    sketch: list[np.ndarray],
    spans: list[Span],
    starts: np.ndarray,
    arrays: list[torch.Tensor],
    table: torch.Tensor,
) -> ContextChunk:
    first, end = spans[0].request, spans[-1].request + 1
    query_start_loc, kv_lens, block_table, requests, columns = arrays
    return ContextChunk(
        rows=slice(int(starts[first]), int(starts[end])),
        query_start_loc=query_start_loc,
        kv_lens=kv_lens,
        block_table=block_table.view(end - first, -1),
        pages=table[requests.long(), columns.long()].long(),
        max_query_len=int(np.diff(starts[first : end + 1]).max()),
        max_kv_len=max(span.num_tokens for span in spans),
        query_start_loc_cpu=sketch[0],
        kv_lens_cpu=sketch[1],
    )
