"""make_batch: from plain lists to the tensors of one batch.

In: query lengths, sequence lengths and block tables, as an engine's scheduler knows them. Out: one
`CommonAttentionMetadata`, checked, with slot mapping, through one packed host buffer and one copy
to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attnkit.contract import CommonAttentionMetadata
from attnkit.errors import BatchError


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    device: torch.device | str = "cpu",
    causal: bool | torch.Tensor = True,
    is_prefilling: Sequence[bool] | None = None,
) -> CommonAttentionMetadata:
    """Describe a batch of requests.

    Args:
        query_lens: new tokens of each request; 0 makes a padding row.
        seq_lens: all tokens of each request, the new ones included.
        block_tables: block ids of each request in order; at least ceil(seq_len / block_size) each.
            Id 0 is the null block and may stand where pages were freed, not where tokens go.
        block_size: tokens in a block, as the kernels see it.
        device: where the batch's tensors live.
        causal: False lets queries see all keys; a bool tensor (num_reqs,) says it per request.
        is_prefilling: the request has prompt tokens left. None: it has when it has no context.

    Raises:
        BatchError: lengths contradict each other, or a block table is too short or has a bad id.
    """
    num_reqs = len(query_lens)
    if len(seq_lens) != num_reqs or len(block_tables) != num_reqs:
        raise BatchError(
            f"{num_reqs} query lengths, {len(seq_lens)} sequence lengths and {len(block_tables)} "
            "block tables were given; give one of each per request"
        )
    if block_size < 1:
        raise BatchError(f"block_size {block_size} is not allowed; give at least 1")
    queries = np.asarray(query_lens, dtype=np.int64).reshape(num_reqs)
    seqs = np.asarray(seq_lens, dtype=np.int64).reshape(num_reqs)
    for r in np.flatnonzero((queries < 0) | (queries > seqs)):
        raise BatchError(
            f"request {r} has {queries[r]} new tokens but {seqs[r]} in all; "
            "seq_lens counts the new tokens too, and neither may be negative"
        )
    pages = -(-seqs // block_size)
    table = np.zeros((num_reqs, max(1, int(pages.max(initial=0)))), dtype=np.int64)
    for r, ids in enumerate(block_tables):
        num_pages = int(pages[r])
        if len(ids) < num_pages:
            raise BatchError(
                f"request {r} has {seqs[r]} tokens, which need {num_pages} blocks of {block_size}, "
                f"but its block table has {len(ids)}"
            )
        table[r, :num_pages] = ids[:num_pages]
    if table.min(initial=0) < 0:
        r = int(np.flatnonzero((table < 0).any(1))[0])
        raise BatchError(f"request {r} has block id {table[r].min()}; ids count from 0")

    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int64)
    np.cumsum(queries, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    rows = np.repeat(np.arange(num_reqs), queries)
    positions = np.arange(num_tokens) - query_start_loc[rows] + (seqs - queries)[rows]
    blocks = table[rows, positions // block_size]
    if (blocks == 0).any():
        t = int(np.flatnonzero(blocks == 0)[0])
        raise BatchError(
            f"request {rows[t]} would write position {positions[t]} into block 0, the null block; "
            "give it a block of its own"
        )
    slots = blocks * block_size + positions % block_size

    host, device_parts = _upload(
        torch.device(device), query_start_loc, seqs, table.ravel(), slots, positions
    )
    start_d, seqs_d, table_d, slots_d, positions_d = device_parts
    start_cpu, seqs_cpu = host[:2]
    prefilling = (
        torch.from_numpy((queries == seqs) & (queries > 0))
        if is_prefilling is None
        else torch.tensor(list(is_prefilling), dtype=torch.bool)
    )
    return CommonAttentionMetadata(
        query_start_loc=start_d,
        query_start_loc_cpu=start_cpu,
        seq_lens=seqs_d,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=int(queries.max(initial=0)),
        max_seq_len=int(seqs.max(initial=0)),
        block_table_tensor=table_d.view(num_reqs, table.shape[1]),
        slot_mapping=slots_d.view(torch.int64),
        causal=causal,
        positions=positions_d.view(torch.int64),
        is_prefilling=prefilling,
        seq_lens_cpu_upper_bound=seqs_cpu,
    )


_ALIGNMENT = 32
"""Int32 elements between the starts of two parts: 128 bytes, so that every part is aligned for
vector loads and a kernel is not compiled twice for two alignments."""


def _upload(
    device: torch.device, *parts: np.ndarray
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pack int64 arrays into one int32 buffer and copy it up once.

    The last two keep 64 bits (as pairs of int32), the others are narrowed.

    Returns:
        The parts on the host, and on `device`.
    """
    wide = len(parts) - 2
    sizes = [part.size * (2 if i >= wide else 1) for i, part in enumerate(parts)]
    offsets = np.cumsum([0] + [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])
    buffer = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = buffer.numpy()
    for i, part in enumerate(parts):
        view = packed[offsets[i] : offsets[i] + sizes[i]]
        view[:] = part.view(np.int32) if i >= wide else part
    moved = buffer.to(device, non_blocking=True)

    def split(source: torch.Tensor) -> list[torch.Tensor]:
        return [source[offsets[i] : offsets[i] + sizes[i]] for i in range(len(parts))]

    return split(buffer), split(moved)
