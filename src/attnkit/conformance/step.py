"""The step of a case: its packed q, k and v, and its batch, written out by hand.

In: a `Case`, its sequences and pages. Out: tensors, and a `CommonAttentionMetadata` that may say what
`make_batch` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnkit.conformance.case import Case
from attnkit.conformance.pages import Pages, poison_of
from attnkit.conformance.sequences import WholeSequence
from attnkit.contract import AttentionType, CommonAttentionMetadata

UNWRITTEN = 1234.0
"""In rows of key and value whose slot is -1."""


def step_tensors(
    case: Case, sequences: Sequence[WholeSequence], poison: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of the step, packed. Padding rows of q hold poison. Rows of k and v that are written
    nowhere hold a number that stands nowhere else: it shows if it is written over poison."""
    num_rows = case.num_tokens + case.padding_tokens
    query = torch.full(
        (num_rows, case.num_heads, case.query_size), poison_of(case.dtype, poison), dtype=case.dtype
    )
    key = torch.full((num_rows, case.num_kv_heads, case.head_size), UNWRITTEN, dtype=case.dtype)
    value = torch.full((num_rows, case.num_kv_heads, case.value_size), UNWRITTEN, dtype=case.dtype)
    row = 0
    for s in sequences:
        end, new = row + s.q.shape[0], min(s.q.shape[0], s.k.shape[0])
        query[row:end] = s.q
        if new and not is_cross(case):
            key[end - new : end], value[end - new : end] = s.k[-new:], s.v[-new:]
        row = end
    return query, key, value


def make_step(case: Case, pages: Pages, device: torch.device) -> CommonAttentionMetadata:
    """The batch, written out by hand: it may say what `make_batch` refuses (more queries than keys)."""
    num_reqs = case.num_reqs + case.padding_reqs
    padded = [0] * case.padding_reqs
    query_lens = np.array([*case.query_lens, *padded], dtype=np.int64)
    kv_lens = np.array([*case.seq_lens, *padded], dtype=np.int64)
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)

    tables = [*pages.tables, *[[] for _ in padded]]
    width = max((len(t) for t in tables), default=0) + 2
    table = np.zeros((num_reqs, width), dtype=np.int32)
    slots, positions = [], []
    for r, ids in enumerate(tables):
        table[r, : len(ids)] = ids
        if ids:
            table[r, len(ids) :] = np.resize(pages.slack[r], width - len(ids))
        first = int(kv_lens[r] - query_lens[r])
        for position in range(first, int(kv_lens[r])):
            writes = bool(ids) and position >= 0 and not is_cross(case)
            slots.append(_slot(ids, position, case.block_size) if writes else -1)
            positions.append(max(0, position))
        if case.freed_window and ids:
            # Whole pages before the first query's window or chunk.
            if (chunk := case.attention_chunk_size) is not None:
                gone = max(0, first) // chunk * chunk // case.block_size
            else:
                assert case.sliding_window is not None
                gone = max(0, first - case.sliding_window + 1) // case.block_size
            kept = -(-case.prefix_of(r) // case.block_size) if r < case.num_reqs else 0
            table[r, min(kept, len(ids)) : min(gone, len(ids))] = 0
    slots += [-1] * case.padding_tokens
    positions += [0] * case.padding_tokens

    def up(values: np.ndarray | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(device)

    causal: bool | torch.Tensor
    if isinstance(case.causal, tuple):
        causal = torch.tensor([*case.causal, *[True] * case.padding_reqs]).to(device)
    else:
        causal = case.causal
    ranges = {r: list(case.ranges_of(r)) for r in range(case.num_reqs)}
    prefixes = [case.prefix_of(r) for r in range(case.num_reqs)] + padded
    words = np.zeros(len(slots), dtype=np.int64)
    for r, start in enumerate(query_start_loc[: case.num_reqs]):
        for i, parent in enumerate(case.parents_of(r)):
            above = words[start + parent] if parent >= 0 else 0
            words[start + i] = above | np.left_shift(np.int64(1), i)
    cross = is_cross(case)
    # A decoder's own lengths are no guide to what cross attention sees.
    seq_lens = query_lens + 3 * (query_lens > 0) if cross else kv_lens
    slack = 37 if case.padding_reqs else 0
    return CommonAttentionMetadata(
        query_start_loc=up(query_start_loc, torch.int32),
        query_start_loc_cpu=torch.from_numpy(query_start_loc),
        seq_lens=up(seq_lens, torch.int32),
        num_reqs=num_reqs,
        num_actual_tokens=case.num_tokens,
        max_query_len=int(query_lens.max(initial=0)),
        # An upper bound is allowed, so give one where the batch is padded.
        max_seq_len=int(seq_lens.max(initial=0)) + slack,
        block_table_tensor=up(table, torch.int32),
        slot_mapping=up(slots, torch.int64),
        causal=causal,
        encoder_seq_lens=up(kv_lens, torch.int32) if cross else None,
        encoder_seq_lens_cpu=kv_lens.astype(np.int32) if cross else None,
        positions=up(positions, torch.int64),
        is_prefilling=torch.from_numpy((query_lens == seq_lens) & (query_lens > 0)),
        seq_lens_cpu_upper_bound=torch.as_tensor(seq_lens, dtype=torch.int32),
        mm_req_doc_ranges=ranges if case.mm_prefix else None,
        rswa_prefix_lens=up(prefixes, torch.int32) if case.rswa else None,
        tree_mask=up(words, torch.int64) if case.tree else None,
    )


def is_cross(case: Case) -> bool:
    """Its layer is one of cross attention, whose keys come from an encoder."""
    return case.attn_type is AttentionType.ENCODER_DECODER


def _slot(ids: Sequence[int], position: int, block_size: int) -> int:
    return ids[position // block_size] * block_size + position % block_size
