"""Tensors of a workload: one set of numbers in every layout, shuffled pages."""

from __future__ import annotations

import pytest
import torch

from attnkit.bench.inputs import Inputs
from attnkit.bench.workloads import LayerShape, decode, mixed
from attnkit.contract import KVCacheLayout

LAYER = LayerShape(num_heads=4, num_kv_heads=2, head_size=8, block_size=16)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "float32"])
def test_layouts_hold_the_same_numbers_in_another_order(kv_cache_dtype: str) -> None:
    layer = LayerShape(
        num_heads=4, num_kv_heads=2, head_size=8, block_size=16, kv_cache_dtype=kv_cache_dtype
    )
    inputs = Inputs(mixed(20, 30, 3, 25, layer), "cpu")
    first, second = inputs.pages(KVCacheLayout.LBNHC), inputs.pages(KVCacheLayout.LBHNC)
    assert first.dtype == second.dtype == inputs.workload.cache_torch_dtype
    assert first.stride() != second.stride()
    assert torch.equal(first.float(), second.float())
    assert inputs.pages(KVCacheLayout.LBNHC) is first


def test_pages_are_shuffled_and_the_null_block_is_nobodys() -> None:
    inputs = Inputs(decode(4, 100, LAYER), "cpu")
    ids = [i for table in inputs.block_tables for i in table]
    assert sorted(ids) == list(range(1, 29))
    assert ids != sorted(ids)


def test_another_seed_gives_other_numbers_and_other_pages() -> None:
    one, other = (Inputs(decode(4, 100, LAYER), "cpu", seed) for seed in (0, 1))
    assert one.block_tables != other.block_tables
    assert not torch.equal(one.query, other.query)


def test_new_tokens_are_what_the_pages_hold() -> None:
    inputs = Inputs(mixed(20, 30, 3, 25, LAYER), "cpu")
    key, value = inputs.new_tokens
    k, v = inputs.sequence(3)
    assert torch.equal(key[3:], k[-20:])
    assert torch.equal(value[3:], v[-20:])
    assert torch.equal(key[0], inputs.sequence(0)[0][-1])


def test_dense_is_all_sequences_in_order() -> None:
    inputs = Inputs(mixed(20, 30, 3, 25, LAYER), "cpu")
    k, _ = inputs.dense()
    assert torch.equal(k[25:50], inputs.sequence(1)[0])
    assert k.shape == (3 * 25 + 50, 2, 8)
