"""An indexer's kernels against those of torch, which define what is right: keys to the bit, scores,
lists with every kind of tie, and a call that is captured once and replayed for other lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from triton_problem import DEVICE

from attnkit import PagedKVCache, make_batch
from attnkit.backends.triton.configs import HOPPER
from attnkit.backends.triton.index_launch import (
    IndexPages,
    IndexPart,
    IndexStep,
    index_list_calls,
    index_score_call,
)
from attnkit.conformance.simulator import CaptureRefused, GraphSimulator
from attnkit.contract import CommonAttentionMetadata
from attnkit.errors import BatchError, UnknownBackend, UnsupportedConfiguration
from attnkit.indexer import LightningIndexer
from attnkit.mla.index_kernels import index_scores, top_positions
from attnkit.mla.plan import seen_by_queries
from attnkit.runner.graphs import CudaRecorder
from hard_numbers import hard_numbers

HEADS, SIZE, K, PAGE = 3, 24, 40, 5
LENS = ([1, 6, 0, 3, 2], [150, 90, 0, 41, 2])
"""A decode, a chunk, an empty row, one that sees K and K + 1 keys, a new one."""


def indexers(stored: str, **changes: Any) -> tuple[LightningIndexer, LightningIndexer]:
    """One that runs in Triton, and one of torch."""
    given = {"max_num_batched_tokens": 16, "kv_cache_dtype": stored, "block_size": PAGE}
    given = {**given, "device": DEVICE, **changes}
    return tuple(LightningIndexer(HEADS, SIZE, K, backend=b, **given) for b in ("triton", "torch"))  # type: ignore[return-value]


def batch_of(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    """On shuffled pages of a cache of 80."""
    g = torch.Generator().manual_seed(sum(seq_lens))
    ids = (1 + torch.randperm(79, generator=g)).tolist()
    tables = [[ids.pop() for _ in range(max(1, -(-n // PAGE)))] for n in seq_lens]
    made = make_batch(query_lens, seq_lens, tables, block_size=PAGE)
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor")
    return made.replace(**{name: getattr(made, name).to(DEVICE) for name in names})


def filled(indexer: LightningIndexer, batch: CommonAttentionMetadata) -> torch.Tensor:
    """A poisoned cache with small whole numbers, whose scores tie, where the batch's context is."""
    cache = PagedKVCache({"indexer": indexer.get_kv_cache_spec()}, 80, device=DEVICE, poison=True)[
        "indexer"
    ]
    for table, length in zip(batch.block_table_tensor, batch.seq_lens.tolist(), strict=True):
        where = torch.arange(length, device=DEVICE)
        slots = table[where // PAGE].long() * PAGE + where % PAGE
        g = torch.Generator().manual_seed(length)
        k = torch.randint(-1, 2, (length, SIZE), generator=g).float().to(DEVICE)
        k[:, 0] = 7  # The largest magnitude: 7 / 448 is a power of two, and so are all scales.
        k *= 2.0 ** (where % 3)[:, None]
        indexer.kernels.write(k, cache[:, 0], slots)
    return cache


def inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    shapes = ((num_tokens, HEADS, SIZE), (num_tokens, SIZE), (num_tokens, HEADS))
    q, k, w = (torch.randint(-1, 2, shape, generator=g).to(DEVICE, dtype) for shape in shapes)
    q[:, :, 1] = k[:, 1] = w[::2] = 1
    k[:, 0] = 7
    return [q, k, w]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Of NumPy, which interprets.
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("fp8", torch.bfloat16),
        ("fp8", torch.float32),
        ("bfloat16", torch.float16),
        ("float32", torch.bfloat16),
    ],
)
def test_lists_are_those_of_torch(stored: str, dtype: torch.dtype) -> None:
    """Whole numbers, so that scores are exact and many are equal; more rows than the batch has."""
    batch = batch_of(*LENS)
    triton, torch_ = indexers(stored)
    caches = [filled(indexer, batch) for indexer in (triton, torch_)]
    if stored != "fp8":
        for cache in caches:
            cache[batch.block_table_tensor[0, 1], 0, 0, 1] = math.inf
    given = inputs(14, dtype)
    got = triton.choose(*given, caches[0], batch)
    want = torch_.choose(*given, caches[1], batch)
    assert torch.equal(*(cache.view(torch.uint8) for cache in caches))
    assert torch.equal(got, want)
    assert bool((triton.topk_indices_buffer[12:] == -1).all())


def test_parts_of_a_step_and_of_a_query() -> None:
    """Room for the scores of five queries at once, of random numbers; each query is shared."""
    batch = batch_of(*LENS)
    indexer, _ = indexers("float32")
    cache = filled(indexer, batch)[:, 0]
    g = torch.Generator().manual_seed(2)
    q, k, w = (
        torch.randn(*n, generator=g).to(DEVICE)
        for n in ((12, HEADS, SIZE), (12, SIZE), (12, HEADS))
    )
    indexer.kernels.write(k, cache, batch.slot_mapping)
    lists = torch.full((12, K), 7, dtype=torch.int32, device=DEVICE)
    seq_lens = batch.seq_lens.clone()
    seq_lens[4] = 0  # As of drafts that are longer than their request.
    request, num_seen = seen_by_queries(batch.query_start_loc, seq_lens, 12)
    step = IndexStep(
        q=q,
        weights=w,
        query_start_loc=batch.query_start_loc,
        seq_lens=seq_lens,
        block_table=batch.block_table_tensor,
        lists=lists,
    )
    parts = step.parts(PAGE, 150, max_scores=5 * 150)
    assert [(part.first, part.num_rows) for part in parts] == [(0, 5), (5, 5), (10, 2)]
    assert parts[0].num_splits(4, HOPPER) == 10
    scores = parts[0].space.scores
    for part in parts:
        first = part.first
        scores.fill_(math.nan)
        index_score_call(step, part, IndexPages.of(cache, SIZE), HOPPER).launch()
        for call in index_list_calls(step, part, HOPPER).values():
            call.launch()
        for row in range(first, first + part.num_rows):
            n = max(0, int(num_seen[row]))
            where = torch.arange(n, device=DEVICE)
            table = batch.block_table_tensor[request[row]].long()
            keys = cache[table[where // PAGE], where % PAGE]
            want = index_scores(q[row : row + 1], keys, w[row : row + 1])
            got = scores[row - first : row - first + 1]
            num_scored = n if n > K else 0  # All are listed where they fit.
            torch.testing.assert_close(
                got[:, :num_scored], want[:, :num_scored], atol=1e-4, rtol=1e-5
            )
            assert bool(got[:, num_scored:].isnan().all())
            ranked = got[:, :n] if num_scored else want
            want_list = top_positions(ranked, num_seen[row : row + 1], K)
            assert torch.equal(lists[row : row + 1], want_list)


def leave_best(part: IndexPart, scores: torch.Tensor, lengths: torch.Tensor) -> None:
    """What the kernel that scores leaves beside scores: the highest rank, by each of its programs."""
    bits = torch.where(scores == 0, 0.0, scores.nan_to_num(-math.inf, math.inf, -math.inf))
    bits = bits.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    ranks = torch.where(bits >= 1 << 31, bits ^ 0xFFFFFFFF, bits | 1 << 31)
    unseen = torch.arange(scores.shape[1], device=DEVICE) >= lengths[:, None]
    best = ranks.masked_fill(unseen, 0).max(1).values
    num_splits = part.num_splits(4, HOPPER)
    by_program = part.space.best.view(-1)[: len(best) * num_splits].view(-1, num_splits)
    by_program.copy_(torch.where(best >= 1 << 31, best - (1 << 32), best)[:, None])


@pytest.mark.parametrize("k", [1, 2047, 2048, 4500])
def test_ties_of_every_kind(k: int) -> None:
    """NaN, infinities, zeros of both signs and subnormals, and numbers of a few powers of two, over
    slices of 2048 positions."""
    lengths = [4500, 4097, 2049, 2048, 4500, 4500, 3, 1, 0, -2, 4500, 4500, 4500, 4500]
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    scores = hard_numbers((14, 1, 4500), torch.float32, 3)[:, 0].to(DEVICE)
    scores[0, ::3] = scores[0, 0]
    scores[1] = scores[1].sign()
    scores[2] = -math.inf
    scores[10] = torch.linspace(3, 50, 4500, device=DEVICE)
    scores[11] = scores[10].flip(0).round()
    scores[12] = -scores[11]
    scores[13, 4] = 2.0**40
    lists = torch.full((14, k), 7, dtype=torch.int32, device=DEVICE)
    step = IndexStep(
        q=torch.zeros(14, 1, 16, device=DEVICE),
        weights=torch.zeros(14, 1, device=DEVICE),
        query_start_loc=torch.arange(15, dtype=torch.int32, device=DEVICE),
        seq_lens=lengths,
        block_table=torch.zeros(14, 4500, dtype=torch.int32, device=DEVICE),
        lists=lists,
    )
    (part,) = step.parts(1, 4500)
    part.space.scores.copy_(scores)
    leave_best(part, scores, lengths)
    for call in index_list_calls(step, part, HOPPER).values():
        call.launch()
    assert torch.equal(lists, top_positions(scores, lengths, k))


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # Of NumPy.
def test_queries_of_every_size() -> None:
    """Queries of bfloat16 that float16 has not the range of, infinities and NaN, over codes."""
    batch = batch_of(*LENS)
    triton, torch_ = indexers("fp8")
    caches = [filled(indexer, batch) for indexer in (triton, torch_)]
    q, k, w = inputs(12, torch.bfloat16)
    q[0] *= 2.0**100
    q[1] *= 2.0**-110
    q[2, 0] *= 2.0**-20
    q[3, 0, 5], q[4, 1, 5], q[5, 2, 5] = math.inf, -math.inf, math.nan
    q[6] = 0
    q[7, 0], q[7, 1] = 2.0**60, 2.0**-60
    got = triton.choose(q, k, w, caches[0], batch)
    assert torch.equal(got, torch_.choose(q, k, w, caches[1], batch))


def test_more_keys_than_can_be_counted_are_refused() -> None:
    triton, _ = indexers("fp8")
    batch = batch_of([1], [9]).replace(
        max_seq_len=1 << 22, block_table_tensor=torch.zeros(1, 1 << 20, dtype=torch.int32)
    )
    lists = torch.zeros(1, K, dtype=torch.int32)
    with pytest.raises(BatchError, match=r"4194304 keys.*less than 2097152; use backend='torch'"):
        triton.kernels.choose(
            *inputs(1, torch.float32)[::2], filled(triton, batch_of([1], [9]))[:, 0], batch, lists
        )


def test_a_captured_choice_serves_other_lengths() -> None:
    """Two decodes; replayed with longer contexts on other pages, and with one request fewer."""
    triton, torch_ = indexers("fp8")
    steps = [batch_of([1, 1], [2, 1]), batch_of([1, 1], [100, 60]), batch_of([1], [300])]
    caches = [[filled(indexer, step) for step in steps] for indexer in (triton, torch_)]
    static = steps[0].replace(
        max_seq_len=300,
        block_table_tensor=torch.zeros(2, 60, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.full((2,), -1, device=DEVICE),
        query_start_loc=steps[0].query_start_loc.clone(),
        seq_lens=steps[0].seq_lens.clone(),
    )
    cache, given = caches[0][0].clone(), inputs(2, torch.float32)
    recorder = CudaRecorder(DEVICE) if DEVICE.type == "cuda" else GraphSimulator()
    recording = recorder.record(lambda: triton.choose(*given, cache, static), {})
    for step, here, there in zip(steps, *caches, strict=True):
        num_rows = step.num_reqs
        cache.copy_(here)
        static.query_start_loc.fill_(num_rows)[:num_rows] = step.query_start_loc[:-1]
        static.seq_lens.zero_()[:num_rows] = step.seq_lens
        static.slot_mapping.fill_(-1)[:num_rows] = step.slot_mapping
        table = step.block_table_tensor
        static.block_table_tensor.zero_()[:num_rows, : table.shape[1]] = table
        recording.replay({})
        want = torch_.choose(*given, there, step)
        assert torch.equal(triton.topk_indices_buffer[:num_rows], want)
        assert bool((triton.topk_indices_buffer[num_rows:2] == -1).all())
    if DEVICE.type == "cpu":  # On a card a capture that fails spoils the generators of later tests.
        with pytest.raises(CaptureRefused):
            recorder.record(lambda: torch_.choose(*given, caches[1][0], steps[0]), {})


def test_a_named_backend_runs_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LightningIndexer(1, 4, 2, backend="auto").backend == "torch"
    with pytest.raises(UnknownBackend, match="auto or triton, torch"):
        LightningIndexer(1, 4, 2, backend="cpu")
    with pytest.raises(UnsupportedConfiguration, match="200 heads of 4 are not supported"):
        LightningIndexer(200, 4, 2, backend="triton", device=DEVICE)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnsupportedConfiguration, match="triton"):
        LightningIndexer(1, 4, 2, backend="triton", device="cpu")
