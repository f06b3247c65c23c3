"""From a scheduler's output to one step's tensors: the only upload.

In: which requests compute how many tokens, with their block tables. Out: token ids, positions, wanted
rows and one `CommonAttentionMetadata` per group of layers that share a block table, all views of one
buffer that goes up in one copy. `StepRows` is the part of it that other engines' steps need too.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class StepRows:
    """The rows of a step in an upload, and the batches made of them when it has been sent.

    Attributes:
        query_start_loc: int64 (num_rows + 1,).
        positions: int64 (num_tokens,), of each token in its request; below 0 stands padding, which is
            written nowhere and sees nothing.
    """

    def __init__(
        self,
        upload: Upload,
        queries: np.ndarray,
        seq_lens: np.ndarray,
        tables: Sequence[Sequence[Sequence[int]]],
        block_sizes: Sequence[int],
        blocks_per_block: int,
    ) -> None:
        """
        Args:
            queries: int (num_rows,), tokens computed of each row.
            seq_lens: int (num_rows,), all tokens of each row.
            tables: per group and row, block ids.
            block_sizes: per group, tokens in one of these blocks.
            blocks_per_block: kernel blocks in one of these; the batches speak of kernel blocks.
        """
        num_rows = len(queries)
        self._queries, self._seq_lens = queries, seq_lens
        self.query_start_loc = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(queries, out=self.query_start_loc[1:])
        rows = np.repeat(np.arange(num_rows), queries)
        first = seq_lens - queries - self.query_start_loc[:-1]
        self.positions = np.arange(len(rows)) + first[rows]
        self._starts = upload.add(self.query_start_loc, np.int32)
        self._lens = upload.add(seq_lens, np.int32)
        self._positions = upload.add(self.positions, np.int64)
        self._groups = []
        for ids, block_size in zip(tables, block_sizes, strict=True):
            table = _table(ids, seq_lens, block_size)
            blocks = table[rows, self.positions // block_size]
            slots = blocks * block_size + self.positions % block_size
            slots[self.positions < 0] = -1
            assert ((blocks != NULL_BLOCK) | (slots < 0)).all(), (
                "a token would go to the null block"
            )
            if blocks_per_block > 1:
                table = _kernel_table(table, blocks_per_block)
            parts = upload.add(table, np.int32), upload.add(slots, np.int64)
            self._groups.append((*parts, table.shape))

    def positions_of(self, moved: list[torch.Tensor]) -> torch.Tensor:
        """`positions` on the device."""
        return moved[self._positions]

    def batches(
        self, host: list[torch.Tensor], moved: list[torch.Tensor], is_prefilling: torch.Tensor
    ) -> list[CommonAttentionMetadata]:
        """One batch per group, from what `Upload.send` returned.

        Args:
            is_prefilling: bool (num_rows,) on the host.
        """
        return [
            CommonAttentionMetadata(
                query_start_loc=moved[self._starts],
                query_start_loc_cpu=host[self._starts],
                seq_lens=moved[self._lens],
                num_reqs=len(self._queries),
                num_actual_tokens=len(self.positions),
                max_query_len=int(self._queries.max()),
                max_seq_len=int(self._seq_lens.max()),
                block_table_tensor=moved[table].view(shape),
                slot_mapping=moved[slots],
                positions=moved[self._positions],
                is_prefilling=is_prefilling,
                seq_lens_cpu_upper_bound=host[self._lens],
            )
            for table, slots, shape in self._groups
        ]


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
    token_ids: list[int] = []
    blocks = []
    for item in items:
        start = item.request.num_computed_tokens
        token_ids += item.request.token_ids[start : start + item.num_new_tokens]
        assert item.request.blocks is not None, "a scheduled request has blocks"
        blocks.append(item.request.blocks)
    upload = Upload(device)
    tables = [[b.tables[group] for b in blocks] for group in range(len(block_sizes))]
    rows = StepRows(upload, queries, contexts + queries, tables, block_sizes, blocks_per_block)
    samples = np.array([item.samples for item in items])
    part_ids = upload.add(np.array(token_ids), np.int64)
    part_logits = upload.add(rows.query_start_loc[1:][samples] - 1, np.int64)
    host, moved = upload.send()
    is_prefilling = torch.tensor([item.request.is_prefilling for item in items])
    return StepInputs(
        input_ids=moved[part_ids],
        positions=rows.positions_of(moved),
        logits_indices=moved[part_logits],
        batches=rows.batches(host, moved, is_prefilling),
        sampled=[item.request for item in items if item.samples],
    )


def _table(ids: Sequence[Sequence[int]], seq_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Block ids (num_rows, width) of one group, null past a row's length."""
    pages = -(-seq_lens // block_size)
    table = np.full((len(pages), max(1, int(pages.max()))), NULL_BLOCK, dtype=np.int64)
    for row, blocks in enumerate(ids):
        table[row, : pages[row]] = blocks[: pages[row]]
    return table


def _kernel_table(table: np.ndarray, ratio: int) -> np.ndarray:
    """The same pages as blocks of a `ratio`-th of the size; null stays null."""
    split = table[:, :, None] * ratio + np.arange(ratio)
    split[table == NULL_BLOCK] = NULL_BLOCK
    return split.reshape(len(table), -1)
