"""make_batch: from plain lists to the tensors of one batch.

In: query lengths, sequence lengths and block tables, as an engine's scheduler knows them. Out: one
`CommonAttentionMetadata`, checked, with slot mapping, through one packed host buffer and one copy
to the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

import numpy as np
import torch

from attnkit.arguments import check_count, is_count
from attnkit.contract import (
    CommonAttentionMetadata,
    DeviceCapability,
    check_prefix_lens,
    check_ranges,
    tree_words,
)
from attnkit.errors import BatchError
from attnkit.upload import Upload

_INT32_MAX = np.iinfo(np.int32).max


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    device: torch.device | str = "cpu",
    causal: bool | torch.Tensor = True,
    is_prefilling: Sequence[bool] | None = None,
    mm_req_doc_ranges: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    rswa_prefix_lens: Sequence[int] | None = None,
    tree_parents: Mapping[int, Sequence[int]] | None = None,
) -> CommonAttentionMetadata:
    """Describe a batch of requests.

    Args:
        query_lens: new tokens of each request; 0 makes a padding row.
        seq_lens: all tokens of each request, the new ones included.
        block_tables: block ids of each request in order; at least ceil(seq_len / block_size) each.
            Id 0 is the null block and may stand where pages were freed: where no token goes and no
            query of the step looks, which the layer checks.
        block_size: tokens in a block, as the kernels see it.
        device: where the batch's tensors live.
        causal: False lets queries see all keys; a bool tensor (num_reqs,) says it per request.
        is_prefilling: per request, whether it has prompt tokens left; a padding row has none. None:
            it has when it has no context.
        mm_req_doc_ranges: request -> (first, last) positions, both inside: a query in a range sees all
            keys of it, later ones too, as images in a prompt do. Ranges do not overlap and lie inside
            the request's `seq_lens`: a range is computed in one step.
        rswa_prefix_lens: how many first tokens of each request all its later ones see, in layers with
            `use_rswa`; at most `seq_lens`.
        tree_parents: request -> per new token which earlier one of them it follows, -1: none, it follows
            the context. Such a token sees the context, its ancestors and itself, in layers with
            `use_tree_mask`. At most 64 tokens; other requests are no trees.

    Raises:
        BatchError: lengths contradict each other, a block table is too short or has a bad id, or
            two tokens would be written to one place; or a range is reversed, overlaps another or is not
            inside its request; or a prefix is longer than its request; or parents are no tree of a
            request's new tokens.
        ConfigurationError: there is no such device.
    """
    DeviceCapability.of(device)
    check_count("block_size", block_size, highest=_INT32_MAX, error=BatchError)
    if not isinstance(block_tables, Sized) or any(not isinstance(t, Sized) for t in block_tables):
        raise BatchError(
            f"block_tables is {block_tables!r}; give one list of block ids per request"
        )
    queries, seqs = _lengths(query_lens, seq_lens, len(block_tables))
    table = _table(block_tables, seqs, block_size)
    num_reqs = len(queries)
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int64)
    np.cumsum(queries, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    rows = np.repeat(np.arange(num_reqs), queries)
    positions = np.arange(num_tokens) - query_start_loc[rows] + (seqs - queries)[rows]
    slots = _slots(table, rows, positions, block_size)
    prefilling = queries == seqs
    if is_prefilling is not None:
        prefilling = np.asarray(is_prefilling)
        if prefilling.shape != (num_reqs,) or prefilling.dtype != bool:
            raise BatchError(
                f"is_prefilling is {prefilling.dtype} of shape {prefilling.shape}; give one bool for "
                f"each of the {num_reqs} requests"
            )
    given = repr(causal)
    if isinstance(causal, torch.Tensor):
        # Its numbers stay where they are: nothing waits for the device.
        given = f"a tensor of shape {tuple(causal.shape)} and {causal.dtype}"
        fits = causal.shape == (num_reqs,) and causal.dtype == torch.bool
    else:
        fits = isinstance(causal, bool)
    if not fits:
        raise BatchError(
            f"causal is {given}; give a bool, or one torch.bool for each of the {num_reqs} requests "
            "in a tensor"
        )

    ranges = None
    if mm_req_doc_ranges is not None:
        ranges = _ranges(mm_req_doc_ranges)
        check_ranges(ranges, seqs.tolist())
    prefixes = None
    if rswa_prefix_lens is not None:
        prefixes = _integers("rswa_prefix_lens", rswa_prefix_lens)
        check_prefix_lens(prefixes.tolist(), seqs.tolist())
    words = None
    if tree_parents is not None:
        words = _tree_mask(tree_parents, query_start_loc)

    upload = Upload(torch.device(device))
    starts = upload.add(query_start_loc, np.int32)
    lens = upload.add(seqs, np.int32)
    pages_of = upload.add(table, np.int32)
    slots_of = upload.add(slots, np.int64)
    positions_of = upload.add(positions, np.int64)
    prefixes_of = None if prefixes is None else upload.add(prefixes, np.int32)
    words_of = None if words is None else upload.add(words, np.int64)
    host, moved = upload.send()
    return CommonAttentionMetadata(
        query_start_loc=moved[starts],
        query_start_loc_cpu=host[starts],
        seq_lens=moved[lens],
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=int(queries.max(initial=0)),
        max_seq_len=int(seqs.max(initial=0)),
        block_table_tensor=moved[pages_of].view(table.shape),
        slot_mapping=moved[slots_of],
        causal=causal.to(device) if isinstance(causal, torch.Tensor) else causal,
        positions=moved[positions_of],
        is_prefilling=torch.from_numpy(prefilling & (queries > 0)),
        seq_lens_cpu_upper_bound=host[lens],
        mm_req_doc_ranges=ranges,
        block_size=block_size,
        freed_cpu=_freed(table, seqs, block_size),
        rswa_prefix_lens=None if prefixes_of is None else moved[prefixes_of],
        tree_mask=None if words_of is None else moved[words_of],
    )


def _ranges(given: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """`mm_req_doc_ranges` as plain integers."""
    form = "give {request: [(first, last), ...]}, positions with both ends inside"
    if not isinstance(given, Mapping) or not all(is_count(row) for row in given):
        raise BatchError(f"mm_req_doc_ranges is {given!r}; {form}")
    ranges: dict[int, list[tuple[int, int]]] = {}
    for row, spans in given.items():
        array = np.asarray(spans)
        if array.size and (array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu"):
            raise BatchError(f"mm_req_doc_ranges of row {row} is {spans!r}; {form}")
        ranges[int(row)] = [(int(start), int(end)) for start, end in array.reshape(-1, 2)]
    return ranges


def _tree_mask(
    tree_parents: Mapping[int, Sequence[int]], query_start_loc: np.ndarray
) -> np.ndarray:
    """int64 (num_tokens,): the words of the requests that are trees, 0 for the others."""
    if not isinstance(tree_parents, Mapping) or not all(is_count(r) for r in tree_parents):
        raise BatchError(
            f"tree_parents is {tree_parents!r}; give {{request: [parent of each new token]}}, -1 for "
            "one that follows the context"
        )
    words = np.zeros(int(query_start_loc[-1]), dtype=np.int64)
    num_reqs = len(query_start_loc) - 1
    for request, parents in tree_parents.items():
        if not 0 <= request < num_reqs:
            raise BatchError(
                f"tree_parents names request {request}; the batch has {num_reqs} of them, from 0"
            )
        parents = _integers(f"tree_parents of request {request}", parents).tolist()
        own = words[query_start_loc[request] : query_start_loc[request + 1]]
        if len(parents) != len(own):
            raise BatchError(
                f"tree_parents of request {request} has {len(parents)} entries for {len(own)} new "
                "tokens; give one of each"
            )
        own[:] = tree_words(parents)
    return words


def _lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], num_tables: int
) -> tuple[np.ndarray, np.ndarray]:
    """Both lengths of every request, int64 (num_reqs,)."""
    queries, seqs = _integers("query_lens", query_lens), _integers("seq_lens", seq_lens)
    if not len(queries) == len(seqs) == num_tables:
        raise BatchError(
            f"{len(queries)} query lengths, {len(seqs)} sequence lengths and {num_tables} "
            "block tables were given; give one of each per request"
        )
    for r in np.flatnonzero((queries < 0) | (queries > seqs) | (seqs > _INT32_MAX)):
        raise BatchError(
            f"request {r} has {queries[r]} new tokens but {seqs[r]} in all; seq_lens counts the new "
            f"tokens too, neither may be negative, and {_INT32_MAX} is the most"
        )
    return queries, seqs


def _table(block_tables: Sequence[Sequence[int]], seqs: np.ndarray, block_size: int) -> np.ndarray:
    """Block ids int64 (num_reqs, width), 0 past the end of a request."""
    pages = -(-seqs // block_size)
    for r, ids in enumerate(block_tables):
        if len(ids) < pages[r]:
            raise BatchError(
                f"request {r} has {seqs[r]} tokens, which need {pages[r]} blocks of {block_size}, "
                f"but its block table has {len(ids)}"
            )
    table = np.zeros((len(seqs), max(1, int(pages.max(initial=0)))), dtype=np.int64)
    for r, ids in enumerate(block_tables):
        table[r, : pages[r]] = _integers(f"the block table of request {r}", ids[: pages[r]])
    for r, column in np.argwhere((table < 0) | (table > _INT32_MAX)):
        raise BatchError(
            f"request {r} has block id {table[r, column]}; ids count from 0 and fit into int32"
        )
    return table


def _freed(table: np.ndarray, seqs: np.ndarray, block_size: int) -> np.ndarray | None:
    """`freed_cpu` of the batch."""
    starts = np.arange(table.shape[1]) * block_size
    null = (table == 0) & (starts < seqs[:, None])
    if not null.any():
        return None
    first, last = null.argmax(axis=1), table.shape[1] - 1 - null[:, ::-1].argmax(axis=1)
    freed = np.stack([first * block_size, np.minimum((last + 1) * block_size, seqs)], axis=1)
    return np.where(null.any(axis=1, keepdims=True), freed, 0)


def _slots(
    table: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Where each token is written, int64 (num_tokens,)."""
    blocks = table[rows, positions // block_size]
    for t in np.flatnonzero(blocks == 0):
        raise BatchError(
            f"request {rows[t]} would write position {positions[t]} into block 0, the null block; "
            "give it a block of its own"
        )
    slots = blocks * block_size + positions % block_size
    order = np.argsort(slots, kind="stable")
    for i in np.flatnonzero(slots[order[1:]] == slots[order[:-1]]):
        a, b = order[i], order[i + 1]
        raise BatchError(
            f"requests {rows[a]} and {rows[b]} would write positions {positions[a]} and {positions[b]} "
            f"into the same place of block {blocks[a]}; give each a block of its own"
        )
    return slots


def _integers(name: str, values: Sequence[int]) -> np.ndarray:
    """`values` as int64 (n,); numpy would round fractions down without a word."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise BatchError(f"{name} is {values!r}; give whole numbers, on the host") from error
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(f"{name} is {array.dtype} of shape {array.shape}; give whole numbers")
    return array.astype(np.int64)
