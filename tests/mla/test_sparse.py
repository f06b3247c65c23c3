"""Layers over latents whose queries are told which keys to attend to: what is refused, and where rows
are found. The kit judges the backends."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attnkit import MLAAttention, PagedKVCache, make_batch
from attnkit.contract import MLADimensions
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.indexer import LightningIndexer
from attnkit.mla.hisparse import HiSparseCache
from attnkit.mla.plan import DecodePart
from attnkit.mla.sparse import ChosenRows
from attnkit.selection import AttentionRequest, decide

SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)


def indexer_of(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
    return SimpleNamespace(topk_indices_buffer=torch.zeros(shape, dtype=dtype))


def layer_of(**changes: Any) -> MLAAttention:
    return MLAAttention(4, SIZES, nn.Linear(32, 4 * 40, bias=False), **changes)


def test_layers_and_backends_of_two_kinds_do_not_mix() -> None:
    with pytest.raises(UnsupportedConfiguration, match="sparse, this backend attends to all keys"):
        layer_of(indexer=indexer_of(4, 8), backend="cpu_mla")
    with pytest.raises(
        UnsupportedConfiguration, match="not sparse, this backend attends to chosen"
    ):
        layer_of(backend="cpu_mla_sparse")
    with pytest.raises(UnsupportedConfiguration, match="the layer is MLA"):
        layer_of(indexer=indexer_of(4, 8), backend="cpu")
    assert layer_of(indexer=indexer_of(4, 8)).selection.name.endswith("_sparse")
    assert not layer_of().selection.name.endswith("_sparse")
    asked = AttentionRequest(head_size=40, dtype=torch.float32, use_mla=True, use_sparse=True)
    reasons = {d.name: d.reasons for d in decide(asked)}
    assert all(
        any("sparse" in r for r in reasons[name]) for name in reasons if "sparse" not in name
    )


def test_an_impl_without_an_indexer_is_refused() -> None:
    layer = layer_of(indexer=indexer_of(4, 8), backend="reference_mla_sparse")
    given: list[Any] = [
        4,
        40,
        1.0,
        1,
        None,
        None,
        "auto",
        None,
        "decoder",
        None,
        None,
        32,
        16,
        8,
        24,
        24,
    ]
    with pytest.raises(UnsupportedConfiguration, match="no indexer"):
        type(layer.impl)(*given, layer.projection)


@pytest.mark.parametrize(
    "wrong",
    [
        indexer_of(2, 8),
        indexer_of(3, 8, dtype=torch.int64),
        indexer_of(9),
        SimpleNamespace(topk_indices_buffer=None),
        SimpleNamespace(topk_indices_buffer=torch.zeros(3, 8, dtype=torch.int32, device="meta")),
    ],
)
def test_lists_that_do_not_fit_the_step(wrong: Any) -> None:
    """They are refused before latents are written."""
    layer = layer_of(indexer=wrong)
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 4)[layer.layer_name]
    plan = layer.build(make_batch([3], [5], [[1]], 16))
    with pytest.raises(BatchError, match="topk_indices_buffer"):
        layer(torch.ones(3, 4, 24), torch.ones(3, 32), torch.ones(3, 8), cache, plan)
    assert not cache.any()


def test_a_plan_of_a_layer_over_all_keys_is_refused() -> None:
    """Its prompts would have no lists; before latents are written."""
    layer, other = layer_of(indexer=indexer_of(20, 8)), layer_of()
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 4)[layer.layer_name]
    other._builder = other.make_builder()
    other._builder.reorder_batch_threshold = 1
    plan = other.build(make_batch([20], [20], [[1, 2]], 16))
    with pytest.raises(BatchError, match="attends to chosen keys, and got a plan with 20 tokens"):
        layer(torch.ones(20, 4, 24), torch.ones(20, 32), torch.ones(20, 8), cache, plan)
    assert not cache.any()


@pytest.mark.parametrize("backend", ["reference_mla_sparse", "cpu_mla_sparse", "triton_mla_sparse"])
def test_lists_may_lie_in_memory_in_any_order(backend: str) -> None:
    if backend.startswith("triton"):
        pytest.importorskip("triton")
    lists = torch.tensor([[0, -1, 4], [3, 1, 2], [2, 0, 1]], dtype=torch.int32)
    layer = layer_of(indexer=SimpleNamespace(topk_indices_buffer=lists), backend=backend)
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 4)[layer.layer_name]
    cache.normal_(generator=torch.Generator().manual_seed(1))
    plan = layer.build(make_batch([3], [5], [[1]], 16))
    given = [torch.randn(3, *n) for n in ((4, 24), (32,), (8,))]
    want = layer(*given, cache, plan)
    layer.indexer.topk_indices_buffer = lists.T.contiguous().T  # type: ignore[union-attr,misc]
    assert torch.equal(layer(*given, cache, plan), want)


@pytest.mark.parametrize("apart", [4 * 6, 4 * 6 + 12, 4 * 6 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_of_pages_that_lie_apart(apart: int, dtype: torch.dtype) -> None:
    """Blocks of 4 rows of 6: side by side, whole rows apart (views), and not (a copy)."""
    memory = torch.arange(9 * apart, dtype=torch.float32).remainder(61).to(dtype)
    cache = memory.as_strided((8, 4, 6), (apart, 6, 1), 3)
    plan = DecodePart(
        query_start_loc=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([7, 0, 6], dtype=torch.int32),
        block_table=torch.tensor([[5, 2], [0, 0], [7, 1]], dtype=torch.int32),
        max_query_len=2,
        max_seq_len=7,
    )
    lists = torch.tensor([[6, -1, 0], [5, 4, 9], [3, 3, 5], [0, 0, 0]], dtype=torch.int32)
    chosen = ChosenRows.of(lists, plan, 4)
    assert chosen.num_chosen.tolist() == [2, 1, 3, 0]
    pages, table = chosen.pages_of(cache)
    for row, want in enumerate(([(2, 2), (5, 0)], [(1, 0)], [(7, 3), (7, 3), (1, 1)])):
        got = pages[table[row, : len(want)].long()][:, 0].float()
        assert torch.equal(got, torch.stack([cache[b, o].float() for b, o in want]))


def test_a_list_of_all_keys_is_dense_attention() -> None:
    lists = torch.arange(40, dtype=torch.int32).expand(20, -1)
    sparse = layer_of(indexer=SimpleNamespace(topk_indices_buffer=lists), return_lse=True)
    dense = layer_of(return_lse=True)
    dense.projection = sparse.projection
    dense.impl.layer = sparse.impl.layer  # type: ignore[attr-defined]
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(20, *n, generator=g) for n in ((4, 24), (32,), (8,))]
    batch = make_batch([1, 19], [30, 19], [[1, 2], [3, 4]], 16)
    results = []
    for layer in (sparse, dense):
        cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 5)[layer.layer_name]
        cache.normal_(generator=torch.Generator().manual_seed(1))
        results.append(layer(*given, cache, layer.build(batch)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert not math.isnan(float(got.sum()))


K = 24


def whole_layer(backend: str, k: int = K, **changes: Any) -> MLAAttention:
    """Told all they see by an indexer that says so, where that is no more than `k`."""
    lists = torch.arange(k, dtype=torch.int32).expand(64, -1)
    indexer = SimpleNamespace(topk_indices_buffer=lists, lists_are_whole_up_to=k)
    torch.manual_seed(0)
    return layer_of(indexer=indexer, backend=backend, return_lse=True, **changes)


def cache_of(layer: MLAAttention) -> torch.Tensor:
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 9)[layer.layer_name]
    return cache.normal_(generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["reference_mla", "cpu_mla", "triton_mla"])
def test_prompts_that_fit_a_list_are_prefilled_as_over_all_keys(name: str) -> None:
    """To the bit: a decode whose context is longer than a list, a prompt, and a chunk of another."""
    if name.startswith("triton"):
        pytest.importorskip("triton")
    sparse = whole_layer(f"{name}_sparse")
    torch.manual_seed(0)
    dense = layer_of(backend=name, return_lse=True)
    lens, seq_lens = [1, K - 5, 16], [30, K - 5, K]
    batch = make_batch(lens, seq_lens, [[1, 2], [3, 4], [5, 6]], 16)
    g = torch.Generator().manual_seed(2)
    given = [torch.randn(sum(lens), *n, generator=g) for n in ((4, 24), (32,), (8,))]
    results = []
    for layer in (sparse, dense):
        builder = layer.make_builder()
        builder.reorder_batch_threshold = 8
        plan = builder.build(0, batch)
        assert (plan.num_decodes, plan.num_prefills) == (1, 2)
        results.append(layer(*given, cache_of(layer), plan))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got[1:], want[1:])
        assert not torch.equal(got[0], want[0])


@pytest.mark.parametrize(
    ("lens", "seq_lens", "num_decodes"),
    [
        ([1, 9, 12], [30, K, 12], 1),
        ([9, 12], [K, K + 1], 2),
        ([1, 9, 12], [3, K + 1, 12], 2),
        ([0, 9, 0], [0, K + 1, 0], 3),
        ([9, 0, 12], [K + 1, 0, 12], 2),
        ([0, 12, 0], [0, 12, 0], 1),
        ([0, 12, 0], [0, 12, 30], 1),
        ([8, 8], [8, K + 1], 2),
        ([9, 4], [9, 30], 2),
    ],
)
def test_which_requests_are_prefilled(
    lens: list[int], seq_lens: list[int], num_decodes: int
) -> None:
    """Those behind the last that is told some of its keys, from the first with more than 8 queries."""
    layer = whole_layer("reference_mla_sparse")
    batch = make_batch(lens, seq_lens, [[1 + 2 * i, 2 + 2 * i] for i in range(len(lens))], 16)

    def planned(layer: MLAAttention, batch: Any = batch) -> int:
        builder = layer.make_builder()
        builder.reorder_batch_threshold = 8
        plan = builder.build(0, batch)
        assert plan.prefill is None or plan.prefill.max_seq_len <= K
        return plan.num_decodes

    assert planned(layer) == num_decodes
    assert planned(layer_of(indexer=indexer_of(64, K))) == len(lens)
    assert planned(layer, batch.replace(seq_lens_cpu_upper_bound=None)) == len(lens)
    layer.impl.hisparse_cache = HiSparseCache(64)
    assert planned(layer) == len(lens)


def test_a_plan_of_longer_lists_is_refused() -> None:
    layer, longer = whole_layer("cpu_mla_sparse"), whole_layer("cpu_mla_sparse", 2 * K)
    batch = make_batch([40], [40], [[1, 2, 3]], 16)
    given = [torch.randn(40, *n) for n in ((4, 24), (32,), (8,))]
    cache = cache_of(layer)
    before = cache.clone()
    with pytest.raises(BatchError, match="attends to chosen keys, and got a plan with 40 tokens"):
        layer(*given, cache, longer.build(batch))
    assert torch.equal(cache, before)


def test_the_indexer_promises_what_fits_its_lists() -> None:
    assert layer_of(indexer=LightningIndexer(2, 16, K)).impl.longest_whole() == K  # type: ignore[attr-defined]
