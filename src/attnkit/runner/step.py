"""From a scheduler's output to one step's tensors: the only upload.

In: which requests compute how many tokens, with their block tables. Out: token ids, positions, wanted
rows and one `CommonAttentionMetadata` per group of layers that share a block table, all views of one
buffer that goes up in one copy. `StepRows` is the part of it that other engines' steps need too.
`StaticInputs` is where they go for a graph: padded, and at the same addresses in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attnkit.batch import make_batch
from attnkit.contract import CommonAttentionMetadata
from attnkit.kvcache.blocks import NULL_BLOCK
from attnkit.runner.request import Request
from attnkit.runner.scheduled import ScheduledRequest, SchedulerOutput
from attnkit.upload import Upload, room_for


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """Encoder tokens of the requests whose first step this is, one request after another.

    Attributes:
        input_ids: int64 (num_tokens,); None: the encoder reads sound.
        features: (num_requests, num_mel_bins, num_frames); None: it reads text.
        batch: theirs, without pages; it has their positions.
    """

    input_ids: torch.Tensor | None
    features: torch.Tensor | None
    batch: CommonAttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageRows:
    """Vectors of images in the place of some tokens' embeddings.

    Attributes:
        rows: int64 (num_rows,), which of the step's tokens.
        vectors: (num_rows, hidden_size).
    """

    rows: torch.Tensor
    vectors: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the model and the layers need for one step, on the device.

    Attributes:
        input_ids: int64 (num_tokens,).
        positions: int64 (num_tokens,), of each token in its request.
        logits_indices: int64 (num_rows,), the last token of each request that samples.
        batches: one per group of layers, in the groups' order.
        sampled: the requests of the rows of `logits_indices`.
        encoder: None: no request begins, or the model has no encoder.
        image_rows: None: no token of the step stands for an image.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    batches: list[CommonAttentionMetadata]
    sampled: list[Request]
    encoder: EncoderInputs | None = None
    image_rows: ImageRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StaticInputs:
    """Memory for the inputs of decode steps that are padded to a number of rows, one token each.

    Attributes:
        num_rows: requests of every such step, padding included.
        buffer: int32, where uploads go.
        block_tables: per group, int32 (num_rows, W) for the longest request, null past a row's length.
    """

    num_rows: int
    buffer: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(cls, num_rows: int, widths: Sequence[int], device: torch.device) -> StaticInputs:
        """
        Args:
            num_rows: most there will be.
            widths: per group, kernel blocks of the longest request.
        """
        # Token ids, wanted rows, positions and slots are int64; starts, lengths and tables int32.
        num_words = [2 * num_rows] * (3 + len(widths)) + [num_rows + 1, num_rows]
        num_words += [num_rows * width for width in widths]
        return cls(
            num_rows=num_rows,
            buffer=torch.zeros(sum(map(room_for, num_words)), dtype=torch.int32, device=device),
            block_tables=tuple(
                torch.full((num_rows, width), NULL_BLOCK, dtype=torch.int32, device=device)
                for width in widths
            ),
        )

    def of(self, num_rows: int) -> StaticInputs:
        """The same memory for steps of fewer rows."""
        return replace(
            self, num_rows=num_rows, block_tables=tuple(t[:num_rows] for t in self.block_tables)
        )

    def put_table(self, group: int, table: torch.Tensor) -> torch.Tensor:
        """Copy a block table (num_rows, at most W) to its place, which is returned."""
        place, width = self.block_tables[group], table.shape[1]
        place[:, :width].copy_(table)
        place[:, width:].fill_(NULL_BLOCK)
        return place


class StepRows:
    """The rows of a step in an upload, and the batches made of them when it has been sent.

    Attributes:
        query_start_loc: int64 (num_rows + 1,).
        positions: int64 (num_tokens,), of each token in its request; below 0 stands padding, which is
            written nowhere and sees nothing. Padding behind the last row has 0.
    """

    def __init__(
        self,
        upload: Upload,
        queries: np.ndarray,
        seq_lens: np.ndarray,
        tables: Sequence[Sequence[Sequence[int]]],
        block_sizes: Sequence[int],
        blocks_per_block: int,
        *,
        num_padding_tokens: int = 0,
        writes: bool = True,
        encoder_lens: np.ndarray | None = None,
        follow_encoder: Sequence[bool] | None = None,
    ) -> None:
        """
        Args:
            queries: int (num_rows,), tokens computed of each row.
            seq_lens: int (num_rows,), all tokens of each row.
            tables: per group and row, block ids.
            block_sizes: per group, tokens in one of these blocks.
            blocks_per_block: kernel blocks in one of these; the batches speak of kernel blocks.
            num_padding_tokens: behind the last row's.
            writes: False: no token's keys and values are written.
            encoder_lens: int (num_rows,), encoder tokens of each row; None: there is no encoder.
            follow_encoder: per group, whether its blocks are of those; None: of none.
        """
        num_rows = len(queries)
        self._queries, self._seq_lens = queries, seq_lens
        self.query_start_loc = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(queries, out=self.query_start_loc[1:])
        rows = np.repeat(np.arange(num_rows), queries)
        first = seq_lens - queries - self.query_start_loc[:-1]
        own = np.arange(len(rows)) + first[rows]
        self.positions = _with_zeros(own, len(own) + num_padding_tokens)
        self._starts = upload.add(self.query_start_loc, np.int32)
        self._lens = upload.add(seq_lens, np.int32)
        self._positions = upload.add(self.positions, np.int64)
        self._encoder_lens = encoder_lens
        self._encoder_part = None if encoder_lens is None else upload.add(encoder_lens, np.int32)
        follow = [False] * len(tables) if follow_encoder is None else follow_encoder
        made, self._slots = [], []
        for ids, block_size, is_cross in zip(tables, block_sizes, follow, strict=True):
            lens = encoder_lens if is_cross and encoder_lens is not None else seq_lens
            table = _table(ids, lens, block_size)
            slots = np.full(len(self.positions), -1)
            if writes and not is_cross:  # Where encoder tokens go cross attention works out itself.
                # Before a row's beginning, which is padding, there is no page.
                blocks = table[rows, np.maximum(own, 0) // block_size]
                assert ((blocks != NULL_BLOCK) | (own < 0)).all(), (
                    "a token would go to the null block"
                )
                slots[: len(own)] = np.where(own < 0, -1, blocks * block_size + own % block_size)
            self._slots.append(upload.add(slots, np.int64))
            made.append(_kernel_table(table, blocks_per_block))
        # Behind all else: their width differs from step to step, and with it what comes after.
        self._tables = [(upload.add(table, np.int32), table.shape) for table in made]

    def positions_of(self, moved: list[torch.Tensor]) -> torch.Tensor:
        """`positions` on the device."""
        return moved[self._positions]

    def batches(
        self,
        host: list[torch.Tensor],
        moved: list[torch.Tensor],
        is_prefilling: torch.Tensor,
        static: StaticInputs | None = None,
        ranges: dict[int, list[tuple[int, int]]] | None = None,
    ) -> list[CommonAttentionMetadata]:
        """One batch per group, from what `Upload.send` returned.

        Args:
            is_prefilling: bool (num_rows,) on the host.
            static: takes the block tables.
            ranges: `mm_req_doc_ranges`.
        """
        tables = [moved[part].view(shape) for part, shape in self._tables]
        lens, part = self._encoder_lens, self._encoder_part
        if static is not None:
            tables = [static.put_table(group, table) for group, table in enumerate(tables)]
        return [
            CommonAttentionMetadata(
                query_start_loc=moved[self._starts],
                query_start_loc_cpu=host[self._starts],
                seq_lens=moved[self._lens],
                num_reqs=len(self._queries),
                num_actual_tokens=len(self.positions),
                max_query_len=int(self._queries.max()),
                max_seq_len=int(self._seq_lens.max()),
                block_table_tensor=table,
                slot_mapping=moved[slots],
                positions=moved[self._positions],
                is_prefilling=is_prefilling,
                seq_lens_cpu_upper_bound=host[self._lens],
                encoder_seq_lens=None if part is None else moved[part],
                encoder_seq_lens_cpu=None if lens is None else lens.astype(np.int32),
                mm_req_doc_ranges=ranges,
            )
            for table, slots in zip(tables, self._slots, strict=True)
        ]


def build_step(
    output: SchedulerOutput,
    block_sizes: list[int],
    blocks_per_block: int,
    device: torch.device,
    static: StaticInputs | None = None,
    follow_encoder: Sequence[bool] | None = None,
) -> StepInputs:
    """Describe a step.

    Args:
        output: at least one request.
        block_sizes: per group, tokens in one of the scheduler's blocks.
        blocks_per_block: kernel blocks in one of those; the batches speak of kernel blocks.
        device: where the step runs.
        static: where its inputs go, padded; the requests compute one token each then. `logits_indices`
            has a row per request of `sampled` and, after them, one per row of padding or of a request
            that does not sample.
        follow_encoder: per group, whether its blocks are of the encoder's output; None: the model has no
            encoder.
    """
    items = output.scheduled
    assert items, "an empty step has no batch"
    num_rows = len(items) if static is None else static.num_rows
    num_padding = num_rows - len(items)
    queries = _with_zeros([item.num_new_tokens for item in items], num_rows)
    contexts = _with_zeros([item.num_computed_tokens for item in items], num_rows)
    token_ids: list[int] = []
    blocks = []
    for item in items:
        start = item.num_computed_tokens
        token_ids += item.request.token_ids[start : start + item.num_new_tokens]
        assert item.request.blocks is not None, "a scheduled request has blocks"
        blocks.append(item.request.blocks)
    wanted = (np.cumsum(queries) - 1)[[r for r, item in enumerate(items) if item.samples]]
    if static is not None:
        wanted = _with_zeros(wanted, num_rows)
    upload = Upload(device)
    # Of a step that is ahead the ids are not known: zeros stand in their places.
    num_tokens = int(queries.sum()) + num_padding
    part_ids = upload.add(_with_zeros(token_ids, num_tokens), np.int64)
    part_logits = upload.add(wanted, np.int64)
    padding: list[list[int]] = [[]] * num_padding
    rows = StepRows(
        upload,
        queries,
        contexts + queries,
        [[b.tables[group] for b in blocks] + padding for group in range(len(block_sizes))],
        block_sizes,
        blocks_per_block,
        num_padding_tokens=num_padding,
        encoder_lens=_encoder_lens(items) if follow_encoder is not None else None,
        follow_encoder=follow_encoder,
    )
    host, moved = upload.send(None if static is None else static.buffer)
    is_prefilling = torch.zeros(num_rows, dtype=torch.bool)
    is_prefilling[: len(items)] = torch.tensor([item.is_prefilling for item in items])
    return StepInputs(
        input_ids=moved[part_ids],
        positions=rows.positions_of(moved),
        logits_indices=moved[part_logits],
        batches=rows.batches(host, moved, is_prefilling, static, _ranges(items)),
        sampled=[item.request for item in items if item.samples],
        encoder=None if follow_encoder is None else _encoder_inputs(items, device),
        image_rows=_image_rows(items, device),
    )


def _ranges(items: Sequence[ScheduledRequest]) -> dict[int, list[tuple[int, int]]] | None:
    """Those whose tokens are computed in this step; later tokens see no range."""
    found = {}
    for row, item in enumerate(items):
        start = item.num_computed_tokens
        own = [(r.first, r.last) for r in item.request.ranges
               if start <= r.first < start + item.num_new_tokens]  # fmt: skip
        if own:
            found[row] = own
    return found or None


def _image_rows(items: Sequence[ScheduledRequest], device: torch.device) -> ImageRows | None:
    """Those of the step's tokens."""
    rows: list[int] = []
    vectors = []
    first_row = 0
    for item in items:
        if (images := item.images) is not None:
            shift = first_row - item.num_computed_tokens
            rows += [p + shift for p in images.positions]
            vectors.append(images.vectors)
        first_row += item.num_new_tokens
    if not rows:
        return None
    return ImageRows(rows=torch.tensor(rows, device=device), vectors=torch.cat(vectors))


def _encoder_lens(items: Sequence[ScheduledRequest]) -> np.ndarray:
    return np.array([item.request.encoder_len for item in items], dtype=np.int64)


def _encoder_inputs(
    items: Sequence[ScheduledRequest], device: torch.device
) -> EncoderInputs | None:
    """Those of requests that begin, or begin again; None: there are none."""
    begun = [item.request for item in items if item.num_computed_tokens == 0]
    if not begun:
        return None
    lens = [request.encoder_len for request in begun]
    blocks = [[i + 1] for i in range(len(lens))]  # One stands for each text: nothing is kept.
    features = [request.sound.features for request in begun if request.sound is not None]
    tokens = [token for request in begun for token in request.encoder_token_ids]
    return EncoderInputs(
        input_ids=None if features else torch.tensor(tokens, device=device),
        features=torch.stack(features) if features else None,
        batch=make_batch(lens, lens, blocks, max(lens), device=device, causal=False),
    )


def build_capture_step(
    static: StaticInputs, block_sizes: list[int], blocks_per_block: int, max_seq_len: int
) -> StepInputs:
    """A decode step to capture a graph with: each row is a first token that is written nowhere.

    Args:
        static: where the inputs go.
        block_sizes, blocks_per_block: as in `build_step`.
        max_seq_len: of the steps that the graph will be replayed for.
    """
    num_rows, device = static.num_rows, static.buffer.device
    upload = Upload(device)
    part_ids = upload.add(np.zeros(num_rows), np.int64)
    part_logits = upload.add(np.arange(num_rows), np.int64)
    rows = StepRows(
        upload,
        np.ones(num_rows, dtype=np.int64),
        np.ones(num_rows, dtype=np.int64),
        [[[NULL_BLOCK]] * num_rows for _ in block_sizes],
        block_sizes,
        blocks_per_block,
        writes=False,
    )
    host, moved = upload.send(static.buffer)
    batches = rows.batches(host, moved, torch.zeros(num_rows, dtype=torch.bool), static)
    return StepInputs(
        input_ids=moved[part_ids],
        positions=rows.positions_of(moved),
        logits_indices=moved[part_logits],
        batches=[batch.replace(max_seq_len=max_seq_len) for batch in batches],
        sampled=[],
    )


def _with_zeros(values: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    """int64 (length,): the values and, behind them, zeros."""
    array = np.zeros(length, dtype=np.int64)  # np.pad takes ten times as long.
    array[: len(values)] = values
    return array


def _table(ids: Sequence[Sequence[int]], seq_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Block ids (num_rows, width) of one group, null past a row's length."""
    pages = -(-seq_lens // block_size)
    table = np.full((len(pages), max(1, int(pages.max()))), NULL_BLOCK, dtype=np.int64)
    for row, blocks in enumerate(ids):
        table[row, : pages[row]] = blocks[: pages[row]]
    return table


def _kernel_table(table: np.ndarray, ratio: int) -> np.ndarray:
    """The same pages as blocks of a `ratio`-th of the size; null stays null."""
    if ratio == 1:
        return table
    split = table[:, :, None] * ratio + np.arange(ratio)
    split[table == NULL_BLOCK] = NULL_BLOCK
    return split.reshape(len(table), -1)
