"""Share row tiles out among the programs of the prefill kernel, on the host.

In: query and key lengths of the requests to prefill. Out: which request, token and heads each row tile
is, grouped by program, long ones first. Pure numpy without a loop over tiles: a few hundred
microseconds for thousands. Lengths only weigh the work: what the kernel reads and masks comes from the
lengths on the device (`plan_kernels.fill_row_tiles_kernel`).

Where row tiles are too few to keep the programs busy alike, their keys are shared out as well: a tile
comes in splits, each a tile of its own here.

Tiles go by sections whose keys and values stay in the L2 cache together. Within a section the longest
come first, and each round of tiles goes to the programs in the order of their load, the longest tile to
the least loaded: the rule of a heap, taken a round at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnkit.backends.hopper.config import PrefillConfig
from attnkit.backends.hopper.tuning import L2_SECTION_BYTES, MERGE_COST, ROW_TILE_COST

Ints = npt.NDArray[np.int32]

MAX_ROUNDS = 4
"""Splits that a program has, at most. With more, programs are busy alike without."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTiles:
    """Row tiles, or splits of them, in the order of the programs.

    Attributes:
        starts: (num_programs + 1,): program p has tiles starts[p] to starts[p + 1].
        requests: (num_tiles,): row of the batch.
        tokens: (num_tiles,): first token, counted from the request's first.
        head_tiles: (num_tiles,): heads head_tile * pack to (head_tile + 1) * pack.
        splits: (3, num_tiles): which split of its row tile it is, of how many, and its place among all,
            where the splits of a row tile stand one behind the other. None: no row tile is split.
    """

    starts: Ints
    requests: Ints
    tokens: Ints
    head_tiles: Ints
    splits: Ints | None

    @property
    def num_programs(self) -> int:
        return self.starts.shape[0] - 1

    @property
    def num_tiles(self) -> int:
        return self.requests.shape[0]


def share_row_tiles(
    query_lens: npt.NDArray[np.int64],
    kv_lens: npt.NDArray[np.int64],
    num_kv_heads: int,
    num_sms: int,
    config: PrefillConfig,
    *,
    causal: bool,
    window: int | None,
    may_split: bool = False,
) -> RowTiles:
    """Cut every request with queries into row tiles and share them out.

    Args:
        query_lens: (num_reqs,); 0 for requests that are not to be prefilled.
        kv_lens: (num_reqs,), or bounds on them.
        num_kv_heads: of the layer.
        num_sms: programs, at most.
        config: of the kernel.
        causal: whether rows see fewer keys than their request has.
        window: keys that a query sees; None: no window.
        may_split: whether row tiles may come in splits.
    """
    tokens_of_tile = config.tokens
    requests = np.flatnonzero(query_lens)
    queries, keys = query_lens[requests], kv_lens[requests]
    tiles_of = -(-queries // tokens_of_tile)

    # One entry per (request, row tile).
    request = np.repeat(np.arange(len(requests)), tiles_of)
    first_of = np.cumsum(tiles_of) - tiles_of
    token = (np.arange(len(request)) - first_of[request]) * tokens_of_tile
    position = (keys - queries)[request] + token
    end = keys[request]
    if causal:
        end = np.minimum(position + tokens_of_tile, end)
    elif window is not None:
        end = np.minimum(position + tokens_of_tile + window - 1, end)
    start = np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0)
    num_kv_tiles = np.maximum(-(-end // config.block_n) - start // config.block_n, 1)

    # One entry per (request, KV head): sections of the L2 cache.
    seen = np.minimum(keys, np.inf if window is None else window + queries)
    size = seen * (2 * (config.head_size + config.value_size))
    before = np.cumsum(np.repeat(size, num_kv_heads)) - np.repeat(size, num_kv_heads)
    section = (before // L2_SECTION_BYTES).astype(np.int64).reshape(-1, num_kv_heads)

    # One entry per row tile and head tile.
    heads_of_kv = config.group_size // config.pack
    num_head_tiles = num_kv_heads * heads_of_kv
    tile = np.repeat(np.arange(len(request)), num_head_tiles)
    head_tile = np.tile(np.arange(num_head_tiles), len(request))
    section = section[request[tile], head_tile // heads_of_kv]
    num_kv_tiles = num_kv_tiles[tile]

    def share(costs: npt.NDArray[Any], sections: npt.NDArray[np.int64]) -> _Shares:
        # Longest first inside a section. Costs are far below 2 ** 30.
        order = np.argsort((sections << 30) - costs.astype(np.int64), kind="stable")
        program = _share_out(costs[order], sections[order], min(num_sms, len(order)))
        return _Shares(order, program, costs)

    shares = share(num_kv_tiles + ROW_TILE_COST, section)
    splits = None
    # Sooner by 5 % at least, or it is not worth the memory.
    bar = 0.95 * shares.longest
    if may_split and num_kv_tiles.sum() / num_sms + MERGE_COST < bar:
        num_splits, longest = _best_splits(num_kv_tiles, num_sms)
        if longest < bar:
            # One entry per split.
            entry = np.repeat(np.arange(len(tile)), num_splits)
            place = np.arange(len(entry))
            of = num_splits[entry]
            splits = np.stack([place - (np.cumsum(num_splits) - num_splits)[entry], of, place])
            tile, head_tile = tile[entry], head_tile[entry]
            shares = share(-(-num_kv_tiles[entry] // of) + ROW_TILE_COST, section[entry])

    order, starts = shares.by_program()
    return RowTiles(
        starts=starts,
        requests=requests[request[tile[order]]].astype(np.int32),
        tokens=token[tile[order]].astype(np.int32),
        head_tiles=head_tile[order].astype(np.int32),
        splits=None if splits is None else splits[:, order].astype(np.int32),
    )


@dataclass(frozen=True, eq=False)
class _Shares:
    """Which program each tile goes to: `program`, of the tiles as `order` has them."""

    order: npt.NDArray[np.int64]
    program: npt.NDArray[np.int16]
    costs: npt.NDArray[Any]

    @property
    def longest(self) -> float:
        """Cost of the program that has most to do."""
        return float(np.bincount(self.program, weights=self.costs[self.order]).max())

    def by_program(self) -> tuple[npt.NDArray[np.int64], Ints]:
        """The tiles program by program, and where each one's begin."""
        num_programs = int(self.program.max()) + 1
        starts = np.zeros(num_programs + 1, dtype=np.int32)
        np.cumsum(np.bincount(self.program), out=starts[1:])
        return self.order[np.argsort(self.program, kind="stable")], starts


def _best_splits(
    num_kv_tiles: npt.NDArray[np.int64], num_programs: int
) -> tuple[npt.NDArray[np.int64], float]:
    """In how many splits each row tile is worked on soonest, and the cost of the longest program then.

    For one to four splits a program: the shortest share that makes no more of them.
    """
    best = (np.ones_like(num_kv_tiles), np.inf)
    for rounds in range(1, MAX_ROUNDS + 1):
        low, high = 1, int(num_kv_tiles.max())
        while low < high:
            middle = (low + high) // 2
            if (-(-num_kv_tiles // middle)).sum() <= rounds * num_programs:
                high = middle
            else:
                low = middle + 1
        num_splits = -(-num_kv_tiles // low)
        cost = rounds * (low + ROW_TILE_COST) + MERGE_COST
        if num_splits.sum() <= rounds * num_programs and cost < best[1]:
            best = (num_splits, cost)
    return best


def _share_out(
    costs: npt.NDArray[Any], sections: npt.NDArray[np.int64], num_programs: int
) -> npt.NDArray[np.int16]:
    """Program of each tile. Tiles are in sections, longest first."""
    program = np.empty(len(costs), dtype=np.int16)
    load = np.zeros(num_programs)
    ends = np.append(np.flatnonzero(np.diff(sections)) + 1, len(costs))
    first = 0
    for end in ends:
        while first < end:
            last = min(first + num_programs, end)
            least = np.argsort(load, kind="stable")[: last - first]
            load[least] += costs[first:last]
            program[first:last] = least
            first = last
    return program
