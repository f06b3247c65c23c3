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

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnkit.backends.hopper.config import PrefillConfig
from attnkit.backends.hopper.tuning import (
    DECODE_BYTES_PER_US,
    L2_SECTION_BYTES,
    MEMORY_BYTES_PER_US,
    MERGE_COST,
    PREFILL_TILE_US,
    ROW_TILE_COST,
)

Ints = npt.NDArray[np.int32]

MAX_ROUNDS = 4
"""Row tiles or splits that a program has where some are split. With more, all are busy alike."""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class RowWork:
    """The row tiles of a batch before they are shared out, in the order of requests, tokens and heads.

    Attributes:
        requests, tokens, head_tiles: as of `RowTiles`.
        num_kv_tiles: K/V tiles that each sees.
        sections: of the L2 cache.
    """

    requests: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    head_tiles: npt.NDArray[np.int64]
    num_kv_tiles: npt.NDArray[np.int64]
    sections: npt.NDArray[np.int64]

    @classmethod
    def cut(
        cls,
        query_lens: npt.NDArray[np.int64],
        kv_lens: npt.NDArray[np.int64],
        num_kv_heads: int,
        config: PrefillConfig,
        *,
        causal: bool,
        window: int | None,
    ) -> RowWork:
        """Cut every request with queries into row tiles.

        Args:
            query_lens: (num_reqs,); 0 for requests that are not to be prefilled.
            kv_lens: (num_reqs,), or bounds on them.
            num_kv_heads: of the layer.
            config: of the kernel.
            causal: whether rows see fewer keys than their request has.
            window: keys that a query sees; None: no window.
        """
        requests = np.flatnonzero(query_lens)
        queries, keys = query_lens[requests], kv_lens[requests]
        tiles_of = -(-queries // config.tokens)

        # One entry per (request, row tile).
        request = np.repeat(np.arange(len(requests)), tiles_of)
        first_of = np.cumsum(tiles_of) - tiles_of
        token = (np.arange(len(request)) - first_of[request]) * config.tokens
        position = (keys - queries)[request] + token
        end = keys[request]
        if causal:
            end = np.minimum(position + config.tokens, end)
        elif window is not None:
            end = np.minimum(position + config.tokens + window - 1, end)
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
        return cls(
            requests=requests[request[tile]],
            tokens=token[tile],
            head_tiles=head_tile,
            num_kv_tiles=num_kv_tiles[tile],
            sections=section[request[tile], head_tile // heads_of_kv],
        )

    @property
    def num_tiles(self) -> int:
        return self.requests.shape[0]

    @functools.cached_property
    def _costs(self) -> npt.NDArray[Any]:
        """Of the row tiles, in K/V tiles, falling."""
        return -np.sort(-(self.num_kv_tiles + ROW_TILE_COST))

    def time(self, num_programs: int) -> float:
        """What the program that has most to do takes, in K/V tiles, about."""
        costs = self._costs
        program = _share_out(costs, np.zeros(len(costs), dtype=np.int64), num_programs)
        longest = float(np.bincount(program, weights=costs).max())
        return min(longest, 1.05 * float(costs.sum()) / num_programs + MERGE_COST)

    def share(self, num_programs: int, *, may_split: bool) -> RowTiles:
        """Share them out among so many programs at most; `may_split`: some may come in splits."""
        shares = _Shares.of(self.num_kv_tiles + ROW_TILE_COST, self.sections, num_programs)
        may_split &= self.num_tiles < MAX_ROUNDS * num_programs
        # Sooner by 5 % at least, or it is not worth the memory.
        bar = 0.95 * shares.longest
        entry = np.arange(self.num_tiles)
        splits = None
        if may_split and self.num_kv_tiles.sum() / num_programs + MERGE_COST < bar:
            num_splits, longest = _best_splits(self.num_kv_tiles, num_programs)
            if longest < bar:
                # One entry per split.
                entry = np.repeat(entry, num_splits)
                place = np.arange(len(entry))
                of = num_splits[entry]
                splits = np.stack([place - (np.cumsum(num_splits) - num_splits)[entry], of, place])
                costs = -(-self.num_kv_tiles[entry] // of) + ROW_TILE_COST
                # So few go without sections: all are worked on at once, and sections would part whole
                # row tiles from the splits that fill up their programs.
                shares = _Shares.of(costs, np.zeros_like(entry), num_programs)
        order, starts = shares.by_program()
        entry = entry[order]
        return RowTiles(
            starts=starts,
            requests=self.requests[entry].astype(np.int32),
            tokens=self.tokens[entry].astype(np.int32),
            head_tiles=self.head_tiles[entry].astype(np.int32),
            splits=None if splits is None else splits[:, order].astype(np.int32),
        )


def programs_beside(work: RowWork, decode_bytes: float, head_size: int, num_sms: int) -> int:
    """Programs for prompts whose batch has decodes too; fewer than `num_sms` leave some for these.

    Prompts wait for products and decodes for memory, so that side by side they take less than one after
    the other. A program too few can cost prompts a whole row tile, so numbers that divide them come in
    question. What is left of the decodes when prompts are over has all multiprocessors.

    Args:
        work: row tiles of the prompts.
        decode_bytes: of the keys and values that decodes read.
        head_size: of both.
        num_sms: multiprocessors.
    """

    def time(num_programs: int) -> float:
        prompts = work.time(num_programs) * PREFILL_TILE_US[head_size]
        rate = min((num_sms - num_programs) * DECODE_BYTES_PER_US, MEMORY_BYTES_PER_US)
        left = max(0.0, decode_bytes - rate * prompts) / MEMORY_BYTES_PER_US
        return max(prompts + left, decode_bytes / MEMORY_BYTES_PER_US)

    least = -(-work.num_tiles // num_sms)
    even = {-(-work.num_tiles // rounds) for rounds in range(least, least + 5)}
    step = max(1, num_sms // 4)
    fewer = [n for n in (*even, *range(step, num_sms, step)) if n < num_sms]
    times = {n: time(n) for n in (num_sms, *fewer)}
    best = min(times, key=times.__getitem__)
    return best if times[best] < 0.97 * times[num_sms] else num_sms


@dataclass(frozen=True, eq=False)
class _Shares:
    """Which program each tile goes to: `program`, of the tiles as `order` has them."""

    order: npt.NDArray[np.int64]
    program: npt.NDArray[np.int16]
    longest: float

    @classmethod
    def of(
        cls, costs: npt.NDArray[Any], sections: npt.NDArray[np.int64], num_programs: int
    ) -> _Shares:
        # Longest first inside a section. Costs are far below 2 ** 30.
        order = np.argsort((sections << 30) - costs.astype(np.int64), kind="stable")
        program = _share_out(costs[order], sections[order], num_programs)
        return cls(order, program, float(np.bincount(program, weights=costs[order]).max()))

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

    The longest row tiles stay whole, as many as give each program none or some. The others come in
    splits, so that each program has one more; of so many splits the shortest.
    """
    order = np.argsort(-num_kv_tiles, kind="stable")
    best = (np.ones_like(num_kv_tiles), np.inf)
    for whole in range(len(order) // num_programs + 1):
        num_whole = whole * num_programs
        rest = num_kv_tiles[order[num_whole:]]
        if rest.size == 0:
            continue
        before = num_kv_tiles[order[:num_whole]].sum() / num_programs + whole * ROW_TILE_COST
        for rounds in range(1, max(2, MAX_ROUNDS + 1 - whole)):
            least = max(1, -(-int(rest.sum()) // (rounds * num_programs)))
            lengths = np.unique(np.linspace(least, rest.max(), 32).astype(np.int64))
            counts = -(-rest[None, :] // lengths[:, None])
            fits = np.flatnonzero(counts.sum(1) <= rounds * num_programs)
            if fits.size == 0:
                continue
            of = counts[fits[0]]
            longest = int((-(-rest // of)).max())
            cost = before + rounds * (longest + ROW_TILE_COST) + MERGE_COST
            if cost < best[1]:
                num_splits = np.ones_like(num_kv_tiles)
                num_splits[order[num_whole:]] = of
                best = (num_splits, float(cost))
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
