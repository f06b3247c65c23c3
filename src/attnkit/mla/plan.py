"""MLAMetadata: a batch cut into decodes, which attend to latents, and prefills, which expand them.

In: lengths of a batch's requests. Out: tensors for each half, and the context of the prefills cut into
chunks that fit a bounded workspace. A chunk is itself a small paged batch: its pages are expanded to
keys and values of all heads, its block table counts them from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePart:
    """The requests at the front of a batch that are served by `forward_mqa`.

    Attributes:
        query_start_loc: int32 (num_decodes + 1,), from 0.
        seq_lens: int32 (num_decodes,).
        block_table: int32 (num_decodes, W).
        max_query_len: no request has more queries.
        max_seq_len: no request has more tokens; sizes memory, never masks.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextChunk:
    """Pages of the context of neighbouring prefills, to be expanded and attended to at once.

    Attributes:
        rows: of the prefills' tokens that belong to these requests.
        query_start_loc: int32 (n + 1,), from 0: the tokens of each request in `rows`.
        kv_lens: int32 (n,): context tokens of each request in this chunk; 0 for some.
        block_table: int32 (n, w): places among `pages`.
        pages: int64 (num_pages,): block ids in the cache.
        max_query_len: no request has more queries.
        max_kv_len: no request has more tokens in this chunk.
        query_start_loc_cpu, kv_lens_cpu: int64, the same on the host.
        shared: what a prefill backend worked out for a chunk, for the step's other layers; it chooses
            the keys.
    """

    rows: slice
    query_start_loc: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor
    pages: torch.Tensor
    max_query_len: int
    max_kv_len: int
    query_start_loc_cpu: np.ndarray
    kv_lens_cpu: np.ndarray
    shared: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillPart:
    """The other requests, served by `forward_mha`: T tokens of n requests.

    Attributes:
        num_tokens: T.
        query_start_loc: int32 (n + 1,), from 0: the tokens that attend to themselves causally.
        max_query_len: no request has more of them.
        max_seq_len: no request that has queries has more tokens.
        own_rows: int64: which of the T rows those tokens are; None: all. Tokens before the first
            position of their sequence (drafts longer than it) are not: they see nothing.
        chunks: the context, in order.
        query_start_loc_cpu: int64 (n + 1,), the same on the host.
        shared: as in a chunk, of the tokens themselves.
    """

    num_tokens: int
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    own_rows: torch.Tensor | None
    chunks: tuple[ContextChunk, ...]
    query_start_loc_cpu: np.ndarray
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_one_part(self) -> bool:
        """Every token attends to its own step and nothing else: there is nothing to merge."""
        return self.own_rows is None and not self.chunks


# Neither frozen nor with slots: engines' wrappers subclass plans and assign their slot_mapping.
@dataclass(kw_only=True, eq=False)
class MLAMetadata:
    """A planned batch.

    Attributes:
        num_actual_tokens: of the batch, padding included.
        slot_mapping: int64, one per token.
        block_size: tokens in a page, as the batch says it; None: it does not.
        views: what wrappers made of the batch, outermost first.
        num_decodes: requests at the front that `forward_mqa` serves.
        num_decode_tokens: their tokens.
        num_prefills: requests behind them.
        num_prefill_tokens: their tokens.
        decode, prefill: the parts; None where there is none.
        is_captured: launched into a graph, which other lengths will be replayed with.
    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    block_size: int | None
    views: tuple[str, ...]
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode: DecodePart | None
    prefill: PrefillPart | None
    is_captured: bool = False


def seen_by_queries(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which request each query belongs to, and how many of its keys the query sees, itself included.

    Nothing waits for the device.

    Args:
        query_start_loc: int32 (R + 1,).
        seq_lens: int32 (R,).
        num_tokens: queries; those past the last request's belong to nobody and see nothing.

    Returns:
        int64 (num_tokens,), 0 for queries of nobody; and int32 (num_tokens,), below 1 where a query sees
        nothing.
    """
    ends = query_start_loc[1:].contiguous()
    rows = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
    request = torch.searchsorted(ends, rows, right=True)
    owned = request < ends.shape[0]
    request = torch.where(owned, request, 0)
    num_seen = seq_lens[request] - (ends[request] - rows) + 1
    return request, torch.where(owned, num_seen, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring pages of one request's context: request, first page, pages, tokens in them."""

    request: int
    first_page: int
    num_pages: int
    num_tokens: int


def plan_chunks(
    context_lens: np.ndarray, block_size: int, workspace_pages: int
) -> list[list[Span]]:
    """Cut contexts into chunks of at most `workspace_pages` pages.

    Requests go in in order, each from its beginning on, and are split at page borders where a chunk is
    full, so that only the first span of a chunk continues another. Requests without context are left
    out.

    Args:
        context_lens: (n,), tokens in the cache before this step; at or below 0: none.
        block_size: tokens in a page.
        workspace_pages: at least 1.
    """
    chunks: list[list[Span]] = []
    room = 0
    for request, context_len in enumerate(context_lens.tolist()):
        page, num_pages = 0, -(-max(0, context_len) // block_size)
        while page < num_pages:
            if room == 0:
                chunks.append([])
                room = workspace_pages
            taken = min(room, num_pages - page)
            tokens = min(context_len, (page + taken) * block_size) - page * block_size
            chunks[-1].append(Span(request, page, taken, tokens))
            page, room = page + taken, room - taken
    return chunks
