"""How work is shared out: nothing twice, nothing left, and evenly."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from attnkit.backends.hopper.config import ScoreConfig
from attnkit.backends.hopper.mla_plan import (
    HopperMLAMetadataBuilder,
    Layers,
    SharedMLAMetadata,
)
from attnkit.backends.hopper.plan import HopperMetadataBuilder
from attnkit.backends.hopper.plan_launch import (
    Lengths,
    row_tiles_call,
    share_decodes_call,
)
from attnkit.backends.hopper.prefill_plan import RowTiles, RowWork, programs_beside
from attnkit.backends.hopper.tuning import (
    MAX_DECODE_QUERY_LEN,
    code_rows,
    decode_config,
    latent_config,
    min_decode_tiles,
    prefill_config,
)
from attnkit.batch import make_batch
from attnkit.contract import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    FullAttentionSpec,
    MLAAttentionSpec,
    SpeculativeConfig,
    VllmConfig,
)

QUERIES = [0, 700, 17, 128, 1, 129, 3000]
KEYS = [5, 700, 9000, 128, 300, 4000, 3001]


def _row_tiles(
    group: int, num_sms: int, window: int | None = None, causal: bool = True
) -> RowTiles:
    work = RowWork.cut(
        np.array([q if q > MAX_DECODE_QUERY_LEN else 0 for q in QUERIES]),
        np.array(KEYS),
        2,
        prefill_config(128, group, 16, ScoreConfig()),
        causal=causal,
        window=window,
    )
    return work.share(num_sms, may_split=False)


@pytest.mark.parametrize("group", [1, 3, 4, 12, 64])
@pytest.mark.parametrize("num_sms", [1, 7, 132])
def test_every_row_tile_is_given_out_once(group: int, num_sms: int) -> None:
    tiles = _row_tiles(group, num_sms)
    config = prefill_config(128, group, 16, ScoreConfig())
    step = 128 // config.pack
    want = {
        (r, token, head)
        for r, q in enumerate(QUERIES)
        if q > MAX_DECODE_QUERY_LEN
        for token in range(0, q, step)
        for head in range(2 * group // config.pack)
    }
    got = list(zip(tiles.requests, tiles.tokens, tiles.head_tiles, strict=True))
    assert len(got) == len(want)
    assert set(got) == want
    assert tiles.starts[0] == 0
    assert tiles.starts[-1] == tiles.num_tiles
    assert (np.diff(tiles.starts) > 0).all()
    assert tiles.num_programs == min(num_sms, tiles.num_tiles)


@pytest.mark.parametrize("window", [None, 500])
def test_programs_get_even_work(window: int | None) -> None:
    tiles = _row_tiles(4, 16, window)
    end = np.array(KEYS)[tiles.requests] - np.array(QUERIES)[tiles.requests] + tiles.tokens + 32
    start = np.maximum(end - 32 - window + 1, 0) // 128 if window else 0
    cost = -(-end // 128) - start + 1.5
    load = np.add.reduceat(cost, tiles.starts[:-1])
    assert load.max() - load.min() <= 2 * cost.max()


def test_records_of_row_tiles_follow_the_device_not_the_host() -> None:
    """Lengths on the host were bounds; the records hold what the device knows."""
    config = prefill_config(128, 4, 16, ScoreConfig())
    work = RowWork.cut(np.array([0, 100]), np.array([0, 260]), 2, config, causal=True, window=None)
    tiles = work.share(4, may_split=False)
    arrays = torch.from_numpy(
        np.concatenate([tiles.starts, tiles.requests, tiles.tokens, tiles.head_tiles])
    )
    records = torch.full((tiles.num_tiles, 16), -7, dtype=torch.int32)
    lengths = Lengths(
        query_start_loc=torch.tensor([0, 3, 103], dtype=torch.int32),
        seq_lens=torch.tensor([50, 230], dtype=torch.int32),
        causal=torch.tensor([True, False]),
        window=None,
    )
    row_tiles_call(arrays, tiles.num_tiles, len(tiles.starts), records, lengths, config).launch()
    for record, token, head in zip(records.tolist(), tiles.tokens, tiles.head_tiles, strict=True):
        request, first, head_tile, num_tokens, position, reach, num_keys, num_tiles = record[:8]
        assert (request, first, head_tile) == (1, 3 + token, head)
        assert num_tokens == min(32, 100 - token)
        assert position == 130 + token
        assert reach >= 1 << 29
        assert num_keys == 230
        assert num_tiles == 2


def test_splits_of_a_row_tile_have_each_of_its_tiles_once() -> None:
    """As many splits as keep all programs busy, from bounds; the tiles are what the device knows."""
    config = prefill_config(128, 4, 16, ScoreConfig(), split=True)
    queries, bounds, keys = [0, 20, 33], [0, 9000, 4000], [0, 8000, 33]
    cut = RowWork.cut(np.array(queries), np.array(bounds), 2, config, causal=True, window=None)
    tiles = cut.share(12, may_split=True)
    assert tiles.splits is not None
    assert tiles.num_programs == 12
    assert np.diff(tiles.starts).max() <= 4
    assert sorted(tiles.splits[2]) == list(range(tiles.num_tiles))
    arrays = [tiles.starts, tiles.requests, tiles.tokens, tiles.head_tiles, *tiles.splits]
    records = torch.full((tiles.num_tiles, 16), -7, dtype=torch.int32)
    work = torch.from_numpy(np.concatenate(arrays))
    row_tiles_call(
        work, tiles.num_tiles, len(tiles.starts), records, _lengths(queries, keys), config
    ).launch()
    found: dict[tuple[int, int, int], list[int]] = {}
    counts: dict[tuple[int, int, int], list[int]] = {}
    for request, first, head_tile, *rest in records.tolist():
        _, position, _, num_keys, num_tiles, before, place, split, num_splits = rest[:9]
        assert num_keys == keys[request]
        row_tile = (request, first, head_tile)
        end = -(-min(position + config.tokens, num_keys) // 128)
        if before < end:
            found.setdefault(row_tile, []).extend(range(before, before + num_tiles))
        else:
            assert (before, num_tiles) == (end, 1)
        counts.setdefault(row_tile, []).append(num_splits)
        assert (
            place - split
            == tiles.splits[2][
                [r == row_tile for r in zip(*records[:, :3].T.tolist(), strict=True)]
            ].min()
        )
    for (request, first, _), of in counts.items():
        assert of == [len(of)] * len(of)
        position = keys[request] - queries[request] + first - sum(queries[:request])
        end = -(-min(position + config.tokens, keys[request]) // 128)
        assert sorted(found[request, first, _]) == list(range(end))
    assert len(counts) == 2 * (1 + 2)


@pytest.mark.parametrize("num_queries", [17, 64, 128, 256, 300, 544, 600, 1100])
def test_few_row_tiles_keep_all_programs_busy(num_queries: int) -> None:
    config = prefill_config(128, 4, 16, ScoreConfig())
    work = RowWork.cut(
        np.array([num_queries]), np.array([32_768]), 8, config, causal=True, window=None
    )
    tiles = work.share(132, may_split=True)
    num_splits = np.ones(tiles.num_tiles) if tiles.splits is None else tiles.splits[1]
    load = np.add.reduceat(256 / num_splits, tiles.starts[:-1])
    assert load.max() < 1.15 * load.sum() / 132
    if num_queries == 128:
        # 32 row tiles in four splits each: two rounds of half as long ones took 152 us, not 134.
        assert np.diff(tiles.starts).max() == 1


def test_prompts_leave_programs_to_decodes_where_both_then_take_less() -> None:
    """2,048 queries at 8,192 have 512 row tiles: 103 programs have five each, 102 would have six."""
    config = prefill_config(128, 4, 16, ScoreConfig())
    work = RowWork.cut(np.array([2048]), np.array([10_240]), 8, config, causal=True, window=None)
    key_bytes = 2 * 2 * 128 * 8
    assert programs_beside(work, 63.0 * 4096 * key_bytes, 128, 132) == 103
    assert programs_beside(work, 10.0 * key_bytes, 128, 132) == 132


DECODES, CONTEXTS = [1, 0, 16, 300, 3, 1], [4000, 0, 900, 5000, 0, 70]


def _lengths(queries: list[int], keys: list[int], window: int | None = None) -> Lengths:
    return Lengths(
        query_start_loc=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        causal=True,
        window=window,
    )


def _walk(
    share: torch.Tensor, pieces: torch.Tensor, num_programs: int
) -> Iterator[tuple[int, list[int]]]:
    """Program and record of each piece, as the kernels read them."""
    size, total, _, group_programs, used_programs = share[:5].tolist()
    assert used_programs <= num_programs
    firsts = share[16:].view(num_programs, 16)
    for program in range(used_programs):
        at = program % group_programs * size
        end = min(at + size, total)
        record = firsts[program].tolist()
        is_first = True
        while at < end:
            count, split, num_splits, first_program, unit = record[8:13]
            assert 0 < count <= end - at
            assert program == first_program + split
            assert split == 0 or is_first
            yield program, record
            at += count
            if at < end:
                assert split == num_splits - 1
            record, is_first = pieces[program + unit + 1].tolist(), False


@pytest.mark.parametrize("num_programs", [1, 6, 264])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_pieces_of_decodes_are_each_tile_once_and_even(
    num_programs: int, window: int | None, tile_rows: int
) -> None:
    config = decode_config(64, 8, 16, ScoreConfig(), tile_rows)
    queries, keys, num_kv_heads, tokens = DECODES, CONTEXTS, 2, tile_rows // 8
    lengths = _lengths(queries, keys, window)
    share = torch.full((16 + 16 * num_programs,), -1, dtype=torch.int32)
    pieces = torch.full((num_programs + 100, 16), -1, dtype=torch.int32)
    share_decodes_call(
        share, pieces, lengths, num_kv_heads, num_programs, MAX_DECODE_QUERY_LEN, config
    ).launch()
    size, total = share[:2].tolist()
    seen: dict[tuple[int, int, int], list[int]] = {}
    for _, record in _walk(share, pieces, num_programs):
        r, token, head, num_tokens, position, reach, num_keys, first_tile, count = record[:9]
        assert num_keys == keys[r]
        assert reach == 0
        offset = token - int(lengths.query_start_loc[r])
        assert position == keys[r] - queries[r] + offset
        assert num_tokens == min(tokens, queries[r] - offset)
        tiles = seen.setdefault((r, offset, head), [])
        assert len(set(tiles)) == len(tiles)
        tiles += range(first_tile, first_tile + count)
    want = {}
    for r, (q, k) in enumerate(zip(queries, keys, strict=True)):
        if 0 < q <= MAX_DECODE_QUERY_LEN:
            start = max(0, k - q - window + 1) // 128 if window else 0
            tiles = list(range(start, max(-(-k // 128), start + 1)))
            for offset in range(0, q, tokens):
                for head in range(num_kv_heads):
                    want[r, offset, head] = tiles
    assert seen == want
    groups = math.gcd(num_kv_heads, num_programs)
    assert share[3:5].tolist() == [num_programs // groups, num_programs]
    assert size == max(-(-total * groups // num_programs), min_decode_tiles(config))


@pytest.mark.parametrize("num_keys", [1024, 4096, 16_384, 65_536])
def test_br126_one_long_request_fills_the_device(num_keys: int) -> None:
    """BR-126: a split count with a low limit left most of a device idle. Every program has work, unless
    pieces would be less than the least that pays for a program."""
    config, num_programs = decode_config(128, 8, 16, ScoreConfig(), 64), 264
    share = torch.full((16 + 16 * num_programs,), -1, dtype=torch.int32)
    pieces = torch.full((num_programs + 8, 16), -1, dtype=torch.int32)
    lengths = _lengths([1], [num_keys])
    share_decodes_call(
        share, pieces, lengths, 8, num_programs, MAX_DECODE_QUERY_LEN, config
    ).launch()
    size, total = share[:2].tolist()
    busy = {program for program, _ in _walk(share, pieces, num_programs)}
    assert len(busy) == 8 * -(-total // size)
    assert size == min_decode_tiles(config) or len(busy) > 0.9 * num_programs


def test_kv_heads_that_programs_can_be_grouped_for_are_read_side_by_side() -> None:
    """Programs of different groups are at the same keys of the same request at a time."""
    config = decode_config(128, 4, 16, ScoreConfig(), 16)
    share = torch.full((16 + 16 * 264,), -1, dtype=torch.int32)
    pieces = torch.full((264 + 100, 16), -1, dtype=torch.int32)
    lengths = _lengths(DECODES, CONTEXTS)
    share_decodes_call(share, pieces, lengths, 12, 264, MAX_DECODE_QUERY_LEN, config).launch()
    found: list[list[list[int]]] = [[] for _ in range(12)]
    for program, record in _walk(share, pieces, 264):
        assert program // 22 == record[2]
        found[record[2]].append([program % 22, *record[:2], *record[7:9]])
    assert all(pieces == found[0] for pieces in found)


@pytest.mark.parametrize("num_programs", [2, 6, 132])
def test_head_tiles_over_latents_read_the_same_keys_at_the_same_time(num_programs: int) -> None:
    config = latent_config(128, 64, 64, lse=False)
    share = torch.full((16 + 16 * num_programs,), -1, dtype=torch.int32)
    pieces = torch.full((num_programs + 100, 16), -1, dtype=torch.int32)
    units = torch.full((100, 8), -1, dtype=torch.int32)
    lengths = _lengths(DECODES, CONTEXTS)
    share_decodes_call(share, pieces, lengths, 2, num_programs, 16, config, units).launch()
    found: list[list[list[int]]] = [[], []]
    for program, record in _walk(share, pieces, num_programs):
        request, token, head_tile = record[:3]
        assert program // (num_programs // 2) == head_tile
        found[head_tile].append([request, token, *record[7:9]])
        split, num_splits, first_program, unit = record[9:13]
        assert units[unit, :5].tolist() == [token, head_tile, 1, num_splits, program - split]
        assert first_program == program - split
    assert found[0] == found[1]
    # A request of 300 queries is no decode; the others have one unit a token and head tile.
    assert int(share[2]) == 2 * (1 + 16 + 3 + 1)
    assert sum(count for *_, count in found[0]) == -(-4000 // 128) + 16 * -(-900 // 128) + 3 + 1


@pytest.mark.parametrize(
    ("num_reqs", "ctx", "size"),
    [
        (64, 8192, 64),  # 62.06 tiles, and 64 are a request
        (8, 8192, 8),  # an eighth of one
        (61, 8192, 60),  # 59.15: 64 would be more than 6 percent
    ],
)
def test_shares_over_latents_end_with_requests_where_that_is_cheap(
    num_reqs: int, ctx: int, size: int
) -> None:
    config = latent_config(128, 64, 64, lse=False)
    share = torch.full((16 + 16 * 132,), -1, dtype=torch.int32)
    pieces = torch.full((132 + 2 * num_reqs, 16), -1, dtype=torch.int32)
    lengths = _lengths([1] * num_reqs, [ctx] * num_reqs)
    share_decodes_call(share, pieces, lengths, 2, 132, 8, config).launch()
    assert int(share[0]) == size


@pytest.mark.parametrize(
    ("num_heads", "rows", "tiles"),
    [(1, 64, 1), (64, 64, 1), (65, 64, 5), (96, 64, 2), (128, 64, 2), (128, 32, 4), (65, 32, 5)],
)
def test_heads_over_latents_fill_their_tiles_alike(num_heads: int, rows: int, tiles: int) -> None:
    config = latent_config(num_heads, 64, rows, lse=False, coded=rows == 32)
    assert config.head_tiles == tiles
    assert config.group_size * tiles == num_heads
    assert config.group_size <= config.pack <= rows


@pytest.mark.parametrize(
    ("num_heads", "query_len", "num_reqs", "rows"),
    [
        (16, 1, 64, 16),
        (4, 4, 1, 16),
        (20, 1, 64, 32),
        (8, 4, 64, 32),
        (64, 1, 8, 32),  # 16 multiprocessors and a half for each tile of 64
        (64, 1, 9, 64),
        (128, 1, 4, 32),
        (128, 1, 5, 64),
        (32, 4, 4, 32),
        (32, 3, 5, 64),
    ],
)
def test_row_tiles_of_codes_are_halved_where_they_are_few(
    num_heads: int, query_len: int, num_reqs: int, rows: int
) -> None:
    assert code_rows(num_heads, query_len, num_reqs, 132) == rows


def test_a_graph_of_more_requests_finds_its_own_row_tiles_planned() -> None:
    """A replayed step may have fewer requests than the captured one, for which tiles had other rows."""
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    builder = HopperMLAMetadataBuilder(spec, ["layer"], VllmConfig(), torch.device("cpu"))
    builder._planner._num_programs = 132
    kind = Layers(64, coded=True)

    def batch(num_reqs: int, ctx: int) -> CommonAttentionMetadata:
        tables = [list(range(1 + 20 * r, 21 + 20 * r)) for r in range(num_reqs)]
        return make_batch([1] * num_reqs, [ctx] * num_reqs, tables, 16)

    captured = builder.build_for_cudagraph_capture(batch(9, 16))
    assert isinstance(captured, SharedMLAMetadata)
    work = captured.work(kind)
    assert work.tile_rows == 64
    few = builder.build(0, batch(2, 300))
    assert few.work(kind).tile_rows == 32
    # Two requests of five blocks of 64 keys.
    assert work.share[1:3].tolist() == [10, 2]


def _graphs(drafts: int | None) -> AttentionCGSupport:
    config = VllmConfig(
        speculative_config=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return HopperMetadataBuilder.get_cudagraph_support(config, spec)


def test_graphs_are_promised_for_decodes_of_what_the_decode_kernel_takes() -> None:
    assert _graphs(None) is AttentionCGSupport.UNIFORM_BATCH
    assert _graphs(15) is AttentionCGSupport.UNIFORM_BATCH
    assert _graphs(16) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_plans_of_decodes_stay_where_they_are() -> None:
    """A captured graph reads the addresses of the plan it was captured with."""
    from attnkit.backends.hopper.plan import Geometry

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    builder = HopperMetadataBuilder(spec, ["layer"], VllmConfig(), torch.device("cpu"))
    geometry = Geometry(
        num_kv_heads=2, group_size=4, head_size=64, page_size=16, window=None, coded=False
    )
    places = set()
    for query_lens in ([1], [1, 1, 3], [100, 1], [2]):
        lens = [q + 40 for q in query_lens]
        tables = [list(range(1 + 20 * r, 21 + 20 * r)) for r in range(len(lens))]
        metadata = builder.build(0, make_batch(query_lens, lens, tables, 16))
        plan = metadata.plan(geometry).decode
        assert plan is not None
        places.add((plan.share.data_ptr(), plan.pieces.data_ptr(), plan.states.acc.data_ptr()))
    assert len(places) == 1
