"""Whether a batch contradicts itself, or hides what a layer looks at: by what the host knows alone.

In: a batch, and what a layer looks at. Out: nothing, or an error before anything is planned.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from attnkit.contract import AttentionType, CommonAttentionMetadata
from attnkit.errors import BatchError


class Looks(Protocol):
    """A layer, as far as its mask goes."""

    layer_name: str
    attn_type: AttentionType
    sliding_window: int | None
    attention_chunk_size: int | None
    use_non_causal: bool
    use_mm_prefix: bool
    use_rswa: bool
    use_tree_mask: bool


def check_batch(batch: CommonAttentionMetadata, block_size: int) -> None:
    """Whether tensors are of the batch's requests and tokens, and its offsets and numbers of one batch.

    Args:
        batch: of any kind of layer.
        block_size: of the layer.

    Raises:
        BatchError: they are not.
    """
    if not isinstance(batch, CommonAttentionMetadata):
        raise BatchError(
            f"build got {type(batch).__name__}; give a CommonAttentionMetadata, from make_batch say"
        )
    if batch.block_size not in (None, block_size):
        raise BatchError(
            f"the batch speaks of blocks of {batch.block_size} tokens, the layer has blocks of "
            f"{block_size}; make both with the same block_size"
        )
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy()
    num_tokens = int(starts[-1])
    for name, needed, dtype in (
        ("slot_mapping", num_tokens, torch.int64),
        ("seq_lens", batch.num_reqs, torch.int32),
        ("block_table_tensor", batch.num_reqs, torch.int32),
        ("query_start_loc", batch.num_reqs + 1, torch.int32),
    ):
        tensor: torch.Tensor = getattr(batch, name)
        if tensor.shape[0] < needed or tensor.dtype != dtype:
            raise BatchError(
                f"the batch of {batch.num_reqs} requests and {num_tokens} tokens has "
                f"{tensor.shape[0]} entries of {tensor.dtype} in {name}; give {needed} of {dtype}"
            )
    query_lens = starts[1:] - starts[:-1]
    if starts[0] != 0 or (query_lens < 0).any():
        raise BatchError(
            f"query_start_loc_cpu of the batch is {starts.tolist()}; give offsets from 0 that do not "
            "fall"
        )
    for name, given, least in (
        ("num_actual_tokens", batch.num_actual_tokens, num_tokens),
        ("max_query_len", batch.max_query_len, int(query_lens.max(initial=0))),
    ):
        if given < least:
            raise BatchError(
                f"{name} of the batch is {given}, and query_start_loc_cpu makes it {least} at least"
            )


def check_lengths(batch: CommonAttentionMetadata, block_size: int) -> None:
    """Whether requests are as long as is said, and their block tables long enough; on a CPU only, since
    a device would have to be waited for.

    Args:
        batch: whose keys are the requests' own tokens.
        block_size: of the layer.

    Raises:
        BatchError: they are not.
    """
    if batch.seq_lens.device.type != "cpu":
        return
    lens, width = batch.seq_lens[: batch.num_reqs].numpy(), batch.block_table_tensor.shape[1]
    wrong = (lens < 0) | (lens > min(batch.max_seq_len, width * block_size))
    # Requests without queries, padding say, may have any length: nobody attends for them.
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy()
    for row in np.flatnonzero(wrong & (starts[1:] > starts[:-1])):
        raise BatchError(
            f"request {row} of the batch has {lens[row]} tokens, beside a max_seq_len of "
            f"{batch.max_seq_len} and a block table of {width} blocks of {block_size}; give lengths "
            "from 0 that both hold"
        )


def check_written_once(batch: CommonAttentionMetadata, layer: Looks, block_size: int) -> None:
    """Whether no place is written twice, in this step or by tokens of a request whose block stands twice
    among those its queries look at. On a CPU only, as `check_lengths`.

    Blocks that requests share are nobody's mistake: one may read in this step what another writes. Stale
    ids, of blocks before a window, are not looked at.

    Args:
        batch: whose keys are the requests' own tokens.
        layer: what it looks at.
        block_size: of the layer.

    Raises:
        BatchError: one is.
    """
    tensors = (batch.seq_lens, batch.slot_mapping, batch.block_table_tensor)
    if any(x.device.type != "cpu" for x in tensors):
        return
    lens, slots, table = (x.numpy() for x in tensors)
    query_lens = np.diff(batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy())
    rows = np.repeat(np.arange(batch.num_reqs), query_lens)
    slots = slots[: len(rows)]
    places = np.sort(slots[slots >= 0])
    for slot in places[1:][places[1:] == places[:-1]]:
        raise BatchError(
            f"two tokens of the batch have slot {slot} in slot_mapping, and would overwrite each other; "
            "give each a slot of its own, or -1"
        )
    pairs = np.stack([rows, slots // block_size], axis=1)[slots >= 0]
    pairs = pairs[np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))[: len(pairs)]]
    lens = lens[: batch.num_reqs]
    prefix = np.zeros_like(lens)
    if batch.rswa_prefix_lens is not None and layer.use_rswa:
        prefix = batch.rswa_prefix_lens.numpy()
    first = _first_seen(batch, layer, lens - query_lens)
    (of, blocks), starts = pairs.T, np.arange(table.shape[1]) * block_size
    seen = (starts + block_size > first[of, None]) | (starts < prefix[of, None])
    seen &= starts < lens[of, None]
    twice = ((table[of] == blocks[:, None]) & seen).sum(axis=1) > 1
    for pair in np.flatnonzero(twice):
        raise BatchError(
            f"request {of[pair]} writes to block {blocks[pair]}, which stands twice in its block table "
            f"where layer {layer.layer_name} looks; give each part of a request a block of its own"
        )


def check_masks(batch: CommonAttentionMetadata, layer: Looks) -> None:
    """Whether the layer was built for the batch's masks: a backend that was not asked for one would
    leave it out in silence.

    Raises:
        BatchError: it was not.
    """
    is_decoder = layer.attn_type is AttentionType.DECODER  # Of the others none is causal anyway.
    if is_decoder and batch.causal is not True and not layer.use_non_causal:
        given = batch.causal if isinstance(batch.causal, bool) else "a tensor"
        raise BatchError(
            f"the batch has causal={given}, and layer {layer.layer_name} is for causal batches; "
            "build it with use_non_causal=True, or leave causal out"
        )
    if batch.mm_req_doc_ranges and not layer.use_mm_prefix:
        raise BatchError(
            f"the batch has mm_req_doc_ranges, and layer {layer.layer_name} was built without them; "
            "build it with use_mm_prefix=True, or leave them out"
        )
    if batch.tree_mask is not None and not layer.use_tree_mask:
        raise BatchError(
            f"the batch has a tree_mask, and layer {layer.layer_name} was built without one; build "
            "it with use_tree_mask=True, or leave it out"
        )
    has_prefixes = batch.rswa_prefix_lens is not None
    if layer.sliding_window is not None and has_prefixes != layer.use_rswa:
        has, was = ("rswa_prefix_lens", "out") if has_prefixes else ("no rswa_prefix_lens", "")
        raise BatchError(
            f"the batch has {has}, and layer {layer.layer_name} was built with{was} use_rswa; "
            "prefixes are for the batches of layers with use_rswa=True, and for all of those"
        )


def check_freed(batch: CommonAttentionMetadata, layer: Looks) -> None:
    """Whether a query sees a position whose page the batch says is freed.

    Raises:
        BatchError: one does; or lengths are not known on the host.
    """
    if batch.freed_cpu is None:
        return
    start, end = batch.freed_cpu.T
    query_lens = batch.query_start_loc_cpu.numpy()[1:] - batch.query_start_loc_cpu.numpy()[:-1]
    # Of the first query, which looks back furthest.
    position = batch.host_seq_lens("freed_cpu").numpy() - query_lens
    prefixes = batch.rswa_prefix_lens if layer.use_rswa else None
    is_known = prefixes is not None and prefixes.device.type == "cpu"
    prefix = prefixes.numpy() if is_known else 0  # type: ignore[union-attr]
    seen = (end > _first_seen(batch, layer, position)) | (start < prefix)
    for row in np.flatnonzero(seen & (start < end) & (query_lens > 0)):
        raise BatchError(
            f"request {row} has the null block for positions {start[row]} to {end[row] - 1}, and "
            f"layer {layer.layer_name} looks at some of them from position {position[row]}; give the "
            "blocks of all it sees"
        )


def _first_seen(batch: CommonAttentionMetadata, layer: Looks, position: np.ndarray) -> np.ndarray:
    """The first key that a query of each request sees, apart from the prefix of R-SWA."""
    if layer.sliding_window is not None:
        first = position - layer.sliding_window + 1
    elif layer.attention_chunk_size is not None:
        first = position // layer.attention_chunk_size * layer.attention_chunk_size
    else:
        first = np.zeros_like(position)
    for row, ranges in (batch.mm_req_doc_ranges or {}).items():
        inside = [start for start, end in ranges if end >= position[row]]
        first[row] = min([first[row], *inside])
    return first
