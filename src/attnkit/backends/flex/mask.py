"""Masks of FlexAttention, made piece by piece: nothing of queries times keys is held at once.

In: a function that says which query sees which key. Out: `FlexMask`: block masks, which say where whole
blocks of 128 by 128 are seen, in part or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 128
"""Queries and keys in a block of the mask; both are padded to whole ones."""
_PIECE = 1 << 20
"""Pairs of a query and a key that are looked at together, at most, or those of one row of blocks. On a
CPU attention is called for them alone too, since its eager form computes the score of every pair."""

Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a batch's index, a head's, a query's and a key's: the query sees the key."""


@dataclass(frozen=True, eq=False)
class FlexPart:
    """Queries that are attended to by one call.

    Attributes:
        rows: which.
        start: int64 (), the first; None: they are all there are.
        block_mask: torch's, of these rows.
    """

    rows: slice
    start: torch.Tensor | None
    block_mask: Any


@dataclass(frozen=True, eq=False)
class FlexMask:
    """Which queries of a step see which keys.

    Attributes:
        parts: of the queries, in order; on a GPU one.
        seen: bool (S,), the key is seen by some query.
    """

    parts: tuple[FlexPart, ...]
    seen: torch.Tensor


def mask_of(sees: Sees, queries: torch.Tensor, num_keys: int) -> FlexMask:
    """The mask of a step.

    Args:
        sees: of places in the rows of queries and keys.
        queries: (Q,), anything of each, on the device.
        num_keys: S. Both are multiples of `BLOCK`.
    """
    num_queries, device = queries.shape[0], queries.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(num_keys, device=device)
    seen = torch.zeros_like(keys, dtype=torch.bool)
    size = max(1, _PIECE // (num_keys * BLOCK)) * BLOCK
    pieces = []
    for places in torch.arange(num_queries, device=device).split(size):
        pairs = sees(zero, zero, places[:, None], keys)
        seen |= pairs.any(0)
        tiles = pairs.view(-1, BLOCK, num_keys // BLOCK, BLOCK)
        pieces.append(torch.stack([tiles.any(3).any(1), tiles.all(3).all(1)]))
    if device.type != "cpu" or len(pieces) == 1:
        block_mask = _block_mask(torch.cat(pieces, dim=1), sees, num_keys)
        return FlexMask((FlexPart(slice(0, num_queries), None, block_mask),), seen)
    parts = []
    for first, piece in zip(range(0, num_queries, size), pieces, strict=True):
        # A tensor: what is compiled for a number is compiled anew for another.
        start = zero + first
        block_mask = _block_mask(piece, shifted(sees, start), num_keys)
        parts.append(FlexPart(slice(first, first + size), start, block_mask))
    return FlexMask(tuple(parts), seen)


def shifted(function: Callable[..., Any], start: torch.Tensor | None) -> Callable[..., Any]:
    """`function(..., q, k)` as one that counts queries from `start`; None: from the first."""
    if start is None:
        return function

    def moved(*given: torch.Tensor) -> Any:
        *before, q, k = given
        return function(*before, q + start, k)

    return moved


def _block_mask(tiles: torch.Tensor, sees: Sees, num_keys: int) -> Any:
    """Torch's BlockMask of bool (2, Q / BLOCK, S / BLOCK): some pair of a block is seen, all are."""
    from torch.nn.attention.flex_attention import BlockMask

    some, full = tiles
    lists = []
    for blocks in (some & ~full, full):
        counts = blocks.sum(-1, dtype=torch.int32)
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        lists += [counts[None, None], order.to(torch.int32)[None, None]]
    shape = (some.shape[0] * BLOCK, num_keys)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=shape)
