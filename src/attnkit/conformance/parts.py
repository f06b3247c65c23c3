"""Parts of a step: one request of a batch, a range of its keys, the same pages cut smaller.

In: the `Inputs` of a case. Out: other `Inputs` over the same tokens, whose answer follows from the
first one's. Laws compare the two.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attnkit.conformance.inputs import Inputs


def one_request(inputs: Inputs, request: int, rows: slice) -> Inputs:
    """One request of a batch by itself, on the same cache.

    Args:
        inputs: of the batch.
        request: which.
        rows: its rows of the query.
    """
    batch = inputs.batch
    length = rows.stop - rows.start
    seq_lens = batch.seq_lens[request : request + 1]
    start = torch.tensor([0, length], dtype=torch.int32)
    positions, ranges = batch.positions, batch.mm_req_doc_ranges
    prefixes, words = batch.rswa_prefix_lens, batch.tree_mask
    alone = batch.replace(
        query_start_loc=start.to(seq_lens.device),
        query_start_loc_cpu=start,
        seq_lens=seq_lens,
        num_reqs=1,
        num_actual_tokens=length,
        max_query_len=length,
        max_seq_len=int(seq_lens[0]),
        block_table_tensor=batch.block_table_tensor[request : request + 1],
        slot_mapping=batch.slot_mapping[rows],
        causal=batch.causal[request : request + 1]
        if isinstance(batch.causal, torch.Tensor)
        else batch.causal,
        positions=None if positions is None else positions[rows],
        is_prefilling=None
        if batch.is_prefilling is None
        else batch.is_prefilling[request : request + 1],
        seq_lens_cpu_upper_bound=seq_lens.cpu(),
        mm_req_doc_ranges=None if ranges is None else {0: ranges.get(request, [])},
        rswa_prefix_lens=None if prefixes is None else prefixes[request : request + 1],
        tree_mask=None if words is None else words[rows],
    )
    return replace(
        inputs,
        query=inputs.query[rows],
        key=inputs.key[rows],
        value=inputs.value[rows],
        batch=alone,
        sequences=inputs.sequences[request : request + 1],
    )


def key_pages(inputs: Inputs, first_page: int, end_page: int | None) -> Inputs:
    """A decode batch over a range of each request's pages, with nothing to write.

    Without a window and ALiBi a decode's answer depends on which keys it sees, not on where they
    stand, so the range is simply a shorter request.

    Args:
        inputs: of a batch of decodes.
        first_page: of the range.
        end_page: past its last; None: to the end.
    """
    size, batch = inputs.case.block_size, inputs.batch
    start = first_page * size
    ends = batch.seq_lens if end_page is None else batch.seq_lens.clamp(max=end_page * size)
    lens = (ends - start).clamp(min=0)
    # Pages of the range first, then whatever: cells past a length are not read.
    table = batch.block_table_tensor.roll(-first_page, dims=1).contiguous()
    return replace(
        inputs,
        batch=batch.replace(
            seq_lens=lens.to(torch.int32),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=torch.full_like(batch.slot_mapping, -1),
            seq_lens_cpu_upper_bound=lens.cpu().to(torch.int32),
            is_prefilling=torch.zeros(batch.num_reqs, dtype=torch.bool),
        ),
    )


def smaller_pages(inputs: Inputs, small: int) -> Inputs:
    """The same tokens in pages of `small` tokens: page b becomes b * ratio and following, so slots
    stay what they are."""
    case, batch = inputs.case, inputs.batch
    ratio = case.block_size // small
    num_blocks, heads, _, content = inputs.kv_cache.shape
    pages = inputs.kv_cache.unflatten(2, (ratio, small)).transpose(1, 2)
    pages = pages.reshape(num_blocks * ratio, heads, small, content)
    table = batch.block_table_tensor[:, :, None] * ratio
    table = table + torch.arange(ratio, device=table.device, dtype=table.dtype)
    return replace(
        inputs,
        kv_cache=pages,
        batch=batch.replace(block_table_tensor=table.flatten(1).contiguous()),
    )
