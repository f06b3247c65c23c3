"""From a scheduler's output to one step's tensors: the only upload.

In: which requests compute how many tokens, with their block tables. Out: token ids, positions, wanted
rows and one `CommonAttentionMetadata` per group of layers that share a block table, all views of one
buffer that goes up in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attnkit.contract import CommonAttentionMetadata
from attnkit.kvcache.blocks import NULL_BLOCK
from attnkit.runner.request import Request
from attnkit.runner.scheduler import SchedulerOutput
from attnkit.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the model and the layers need for one step, on the device.

    Attributes:
        input_ids: int64 (num_tokens,).
        positions: int64 (num_tokens,), of each token in its request.
        logits_indices: int64 (num_rows,), the last token of each request that samples.
        batches: one per group of layers, in the groups' order.
        sampled: the requests of the rows of `logits_indices`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    batches: list[CommonAttentionMetadata]
    sampled: list[Request]


def build_step(
    output: SchedulerOutput,
    block_sizes: list[int],
    blocks_per_block: int,
    device: torch.device,
) -> StepInputs:
    """Describe a step.

    Args:
        output: at least one request.
        block_sizes: per group, tokens in one of the scheduler's blocks.
        blocks_per_block: kernel blocks in one of those; the batches speak of kernel blocks.
        device: where the step runs.
    """
    items = output.scheduled
    assert items, "an empty step has no batch"
    queries = np.array([item.num_new_tokens for item in items])
    contexts = np.array([item.request.num_computed_tokens for item in items])
    seq_lens = contexts + queries
    token_ids: list[int] = []
    for item in items:
        start = item.request.num_computed_tokens
        token_ids += item.request.token_ids[start : start + item.num_new_tokens]
    query_start_loc = np.zeros(len(items) + 1, dtype=np.int64)
    np.cumsum(queries, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    rows = np.repeat(np.arange(len(items)), queries)
    positions = np.arange(num_tokens) + (contexts - query_start_loc[:-1])[rows]
    samples = np.array([item.samples for item in items])

    upload = Upload(device)
    part_ids = upload.add(np.array(token_ids), np.int64)
    part_positions = upload.add(positions, np.int64)
    part_logits = upload.add(query_start_loc[1:][samples] - 1, np.int64)
    part_starts = upload.add(query_start_loc, np.int32)
    part_lens = upload.add(seq_lens, np.int32)
    part_groups = []
    for group, block_size in enumerate(block_sizes):
        table = _table(output, group, seq_lens, block_size)
        blocks = table[rows, positions // block_size]
        assert (blocks != NULL_BLOCK).all(), "a token would be written into the null block"
        slots = blocks * block_size + positions % block_size
        if blocks_per_block > 1:
            table = _kernel_table(table, blocks_per_block)
        part_groups.append((upload.add(table, np.int32), upload.add(slots, np.int64), table.shape))
    host, moved = upload.send()
    is_prefilling = torch.tensor([item.request.is_prefilling for item in items])
    batches = [
        CommonAttentionMetadata(
            query_start_loc=moved[part_starts],
            query_start_loc_cpu=host[part_starts],
            seq_lens=moved[part_lens],
            num_reqs=len(items),
            num_actual_tokens=num_tokens,
            max_query_len=int(queries.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=moved[part_table].view(shape),
            slot_mapping=moved[part_slots],
            positions=moved[part_positions],
            is_prefilling=is_prefilling,
            seq_lens_cpu_upper_bound=host[part_lens],
        )
        for part_table, part_slots, shape in part_groups
    ]
    return StepInputs(
        input_ids=moved[part_ids],
        positions=moved[part_positions],
        logits_indices=moved[part_logits],
        batches=batches,
        sampled=[item.request for item in items if item.samples],
    )


def _table(
    output: SchedulerOutput, group: int, seq_lens: np.ndarray, block_size: int
) -> np.ndarray:
    """Block ids (num_requests, width) of one group, null past a request's length."""
    pages = -(-seq_lens // block_size)
    table = np.full((len(pages), int(pages.max())), NULL_BLOCK, dtype=np.int64)
    for row, item in enumerate(output.scheduled):
        assert item.request.blocks is not None, "a scheduled request has blocks"
        ids = item.request.blocks.tables[group]
        table[row, : pages[row]] = ids[: pages[row]]
    return table


def _kernel_table(table: np.ndarray, ratio: int) -> np.ndarray:
    """The same pages as blocks of a `ratio`-th of the size; null stays null."""
    split = table[:, :, None] * ratio + np.arange(ratio)
    split[table == NULL_BLOCK] = NULL_BLOCK
    return split.reshape(len(table), -1)
