"""Share row tiles out among the programs of the prefill kernel, on the host.

In: query and key lengths of the requests to prefill. Out: which request, token and heads each row tile
is, grouped by program, long ones first. Pure numpy without a loop over tiles: a few hundred
microseconds for thousands. Lengths only weigh the work: what the kernel reads and masks comes from the
lengths on the device (`plan_kernels.fill_row_tiles_kernel`).

Tiles go by sections whose keys and values stay in the L2 cache together. Within a section the longest
come first, and each round of tiles goes to the programs in the order of their load, the longest tile to
the least loaded: the rule of a heap, taken a round at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnkit.backends.hopper.config import PrefillConfig
from attnkit.backends.hopper.tuning import L2_SECTION_BYTES, ROW_TILE_COST

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTiles:
    """Row tiles in the order of the programs.

    Attributes:
        starts: (num_programs + 1,): program p has tiles starts[p] to starts[p + 1].
        requests: (num_tiles,): row of the batch.
        tokens: (num_tiles,): first token, counted from the request's first.
        head_tiles: (num_tiles,): heads head_tile * pack to (head_tile + 1) * pack.
    """

    starts: Ints
    requests: Ints
    tokens: Ints
    head_tiles: Ints

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
    """
    tokens_of_tile = 64 * config.num_consumers // config.pack
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
    cost = -(-end // config.block_n) - start // config.block_n
    cost = np.maximum(cost, 1) + ROW_TILE_COST

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
    costs = cost[tile]
    section = section[request[tile], head_tile // heads_of_kv]
    # Longest first inside a section. Costs are far below 2 ** 30.
    order = np.argsort((section << 30) - costs.astype(np.int64), kind="stable")
    program = _share_out(costs[order], section[order], min(num_sms, len(order)))
    order = order[np.argsort(program, kind="stable")]
    starts = np.zeros(min(num_sms, len(order)) + 1, dtype=np.int32)
    np.cumsum(np.bincount(program, minlength=len(starts) - 1), out=starts[1:])
    return RowTiles(
        starts=starts,
        requests=requests[request[tile[order]]].astype(np.int32),
        tokens=token[tile[order]].astype(np.int32),
        head_tiles=head_tile[order].astype(np.int32),
    )


def _share_out(
    costs: npt.NDArray[np.float64], sections: npt.NDArray[np.int64], num_programs: int
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
