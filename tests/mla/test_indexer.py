"""The lightning indexer: scores, ties, pages of float8 keys, what is refused, and a sparse layer that
follows its lists."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from attnkit import MLAAttention, PagedKVCache, make_batch
from attnkit.contract import MLADimensions
from attnkit.errors import BatchError, ConfigurationError
from attnkit.indexer import LightningIndexer
from attnkit.mla.index_kernels import index_scores, top_positions

HEADS, SIZE, K = 3, 16, 4


def step(
    indexer: LightningIndexer, q: Any, k: Any, w: Any, cache: Any, lens: Any, first: int = 0
) -> Any:
    query_lens, seq_lens = lens
    tables = [[first + 3 * r + i for i in (2, 1, 3)] for r in range(len(seq_lens))]
    return indexer.choose(q, k, w, cache, make_batch(query_lens, seq_lens, tables, 16))


def cache_of(indexer: LightningIndexer) -> torch.Tensor:
    cache = PagedKVCache({"indexer": indexer.get_kv_cache_spec()}, 12, poison=True)
    return cache["indexer"]


def test_scores_are_the_weighted_relu_of_all_heads() -> None:
    g = torch.Generator().manual_seed(0)
    q, keys, w = (torch.randn(*n, generator=g) for n in ((5, HEADS, SIZE), (9, SIZE), (5, HEADS)))
    want = torch.zeros(5, 9)
    for t in range(5):
        for j in range(9):
            want[t, j] = sum(w[t, h] * max(0.0, float(q[t, h] @ keys[j])) for h in range(HEADS))
    torch.testing.assert_close(index_scores(q, keys, w), want)


def test_ties_go_to_the_lower_position_and_nothing_unseen_is_taken() -> None:
    scores = torch.tensor(
        [
            [1.0, 2, 2, 2, 0, 9],
            [-1, -2, -math.inf, -3, -4, 9],
            [math.nan, 0, 0, -0.0, 5, math.nan],
            [7, 7, 7, 7, 7, 7],
            [1, 2, 3, 4, 5, 6],
        ]
    )
    seen = torch.tensor([5, 3, 6, 0, -2])
    assert top_positions(scores, seen, 3).tolist() == [
        [1, 2, 3],
        [0, 1, 2],
        [1, 2, 4],
        [-1, -1, -1],
        [-1, -1, -1],
    ]
    assert top_positions(scores[:1], seen[:1], 8).tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]]


@pytest.mark.parametrize("stored", ["fp8", "auto"])
def test_later_keys_score_higher_and_causality_holds(stored: str) -> None:
    """BR-098: key j scores j. A prompt of ten at once, in two steps, and beside another request."""
    indexer = LightningIndexer(1, 4, K, kv_cache_dtype=stored)
    k = torch.zeros(10, 4)
    k[:, 0] = torch.arange(10)
    q, w = torch.ones(10, 1, 4), torch.ones(10, 1)
    cache = cache_of(indexer)
    whole = step(indexer, q, k, w, cache, ([10], [10])).clone()
    assert whole[2].tolist() == [0, 1, 2, -1]
    assert whole[5].tolist() == [2, 3, 4, 5]
    assert whole[9].tolist() == [6, 7, 8, 9]
    cache = cache_of(indexer)
    pieces = [
        step(indexer, q[:6], k[:6], w, cache, ([6], [6])).clone(),
        step(indexer, q[6:], k[6:], w, cache, ([4], [10])).clone(),
    ]
    assert torch.equal(torch.cat(pieces), whole)
    two = (torch.cat([x[6:], x[:5]]) for x in (q, k, w))
    both = step(indexer, *two, cache, ([4, 5], [10, 5]))
    assert torch.equal(both, torch.cat([whole[6:], whole[:5]]))


def test_float8_keys_and_their_bytes() -> None:
    indexer = LightningIndexer(HEADS, 128, K, max_num_batched_tokens=8)
    spec = indexer.get_kv_cache_spec(64)
    assert spec.page_size_bytes == 64 * 132
    cache, k = cache_of(indexer), torch.randn(3, 128) * 100
    before = cache.clone()
    step(indexer, torch.ones(3, HEADS, 128), k, torch.ones(3, HEADS), cache, ([3], [3]))
    rows = cache[2, 0, :3]
    scales = rows[:, 128:].contiguous().view(torch.float32)
    torch.testing.assert_close(scales[:, 0], k.abs().amax(1) / 448)
    numbers = rows[:, :128].contiguous().view(torch.float8_e4m3fn).float() * scales
    assert bool(((numbers - k).abs() <= 2**-4 * k.abs() + scales * 2**-9).all())
    cache[2, 0, :3] = before[2, 0, :3]
    assert torch.equal(cache, before)


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (
        {"kv_cache_dtype": "int8"},
        {"topk_tokens": 0},
        {"topk_indices_buffer": torch.zeros(8192, 2)},
        {"head_size": 6},
    ):
        with pytest.raises(ConfigurationError):
            LightningIndexer(**{"num_heads": 1, "head_size": 8, "topk_tokens": 2, **wrong})
    indexer = LightningIndexer(HEADS, SIZE, K, max_num_batched_tokens=2)
    cache = cache_of(indexer)
    q, k, w = torch.ones(3, HEADS, SIZE), torch.ones(3, SIZE), torch.ones(3, HEADS)
    before = cache.clone()
    for given, match in (
        ((q[:2].int(), k, w, cache), r"q of indexer is torch\.int32 on cpu; give floating-point"),
        ((q[:2], k.to("meta"), w, cache), "k of indexer is torch.float32 on meta"),
        ((q[:2], k, w, cache.to("meta")), "kv_cache of indexer .* on meta; give one on cpu"),
        ((q, k, w, cache), "max_num_batched_tokens"),
        ((q[:2], k, w, cache), "q of indexer"),
        ((q, k[:, :-1], w, cache), "k of indexer"),
        ((q, k, w[:, :-1], cache), "weights of indexer"),
        ((q, k, w, cache[..., :-1]), "its blocks are"),
    ):
        with pytest.raises(BatchError, match=match):
            step(indexer, *given, ([3], [3]))
    with pytest.raises(BatchError, match="blocks of 32 tokens, indexer of 16"):
        indexer.choose(q, k, w, cache, make_batch([2], [2], [[1]], 32))
    assert torch.equal(cache, before)


def test_a_layer_attends_to_what_its_indexer_chose() -> None:
    """Twice as many keys as it may choose: the layer's answer is dense attention over the chosen."""
    d = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
    indexer = LightningIndexer(HEADS, SIZE, K, kv_cache_dtype="auto")
    layer = MLAAttention(2, d, nn.Linear(32, 2 * 40, bias=False), indexer=indexer)
    g = torch.Generator().manual_seed(3)
    specs = {layer.layer_name: layer.get_kv_cache_spec(), "indexer": indexer.get_kv_cache_spec()}
    caches = {name: PagedKVCache({name: spec}, 4)[name] for name, spec in specs.items()}
    batch = make_batch([9], [9], [[2]], 16)
    q, kv_c, k_pe = (torch.randn(9, *n, generator=g) for n in ((2, 24), (32,), (8,)))
    index = [torch.randn(9, *n, generator=g) for n in ((HEADS, SIZE), (SIZE,), (HEADS,))]
    lists = indexer.choose(*index, caches["indexer"], batch)
    out = layer(q, kv_c, k_pe, caches[layer.layer_name], layer.build(batch))
    key, value = layer.projection.expand(kv_c, k_pe)
    for t in range(9):
        chosen = [j for j in lists[t].tolist() if j >= 0]
        assert len(chosen) == min(t + 1, K)
        score = torch.einsum("hd,nhd->hn", q[t], key[chosen]) * 24**-0.5
        want = torch.einsum("hn,nhd->hd", torch.softmax(score, 1), value[chosen])
        torch.testing.assert_close(out[t], want, atol=1e-5, rtol=1e-5)


def test_what_fits_a_list_is_told_without_scores() -> None:
    """Contexts around the length of a list; NaN fits as well."""
    lens, seq_lens = (2, 3, 2, 1), (K, K + 1, 2, K - 1)
    indexer = LightningIndexer(HEADS, SIZE, K, kv_cache_dtype="float32")
    g = torch.Generator().manual_seed(3)
    q, k, w = (torch.randn(sum(lens), *n, generator=g) for n in ((HEADS, SIZE), (SIZE,), (HEADS,)))
    q[0] = torch.nan
    got = step(indexer, q, k, w, cache_of(indexer).normal_(generator=g), (lens, seq_lens))
    assert got.tolist()[:2] == [[0, 1, 2, -1], [0, 1, 2, 3]]
    assert got.tolist()[2:5] == [[0, 1, 2, -1], [0, 1, 2, 3], got.tolist()[4]]
    assert -1 not in got[4]
    assert got.tolist()[5:] == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]
