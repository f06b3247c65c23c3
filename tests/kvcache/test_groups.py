"""Laws of grouping: every layer is in one group, pages are equal, and the arithmetic adds up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.blocks import BlockPool
from attnkit.kvcache.groups import plan_kv_cache
from attnkit.kvcache.pool import PagedKVCache
from attnkit.kvcache.retention import Retention
from attnkit.kvcache.tables import BlockManager

SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=16, **SHAPE)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=32, **SHAPE)
CHUNK = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **SHAPE)
PAGE = 2 * 16 * 16 * 4


def layers(*kinds: tuple[KVCacheSpec, int]) -> dict[str, KVCacheSpec]:
    """Named layers, as many of each kind as said, interleaved from the front."""
    rows = [(i, spec) for spec, num in kinds for i in range(num)]
    rows.sort(key=lambda row: row[0])
    return {f"layer.{i}": spec for i, (_, spec) in enumerate(rows)}


def test_equal_specs_are_one_group_and_every_layer_has_its_memory():
    specs = layers((FULL, 5))
    plan = plan_kv_cache(specs)
    assert [g.layer_names for g in plan.groups] == [tuple(specs)]
    assert plan.storages == tuple((name,) for name in specs)
    assert plan.block_bytes == 5 * PAGE
    assert plan.retentions == (Retention(block_size=16),)


def test_five_windows_to_one_full_share_storages_group_by_group():
    plan = plan_kv_cache(layers((FULL, 4), (WINDOW, 20)))
    assert [len(g.layer_names) for g in plan.groups] == [4] * 6
    assert sum(g.spec == FULL for g in plan.groups) == 1
    assert len(plan.storages) == 4
    for j, storage in enumerate(plan.storages):
        assert storage == tuple(g.layer_names[j] for g in plan.groups)
    assert plan.block_bytes == 4 * PAGE


def test_a_kind_that_does_not_divide_leaves_places_empty_in_its_last_group():
    plan = plan_kv_cache(layers((FULL, 4), (WINDOW, 22)))
    assert sorted(len(g.layer_names) for g in plan.groups) == [2, 4, 4, 4, 4, 4, 4]
    assert [len(s) for s in plan.storages] == [7, 7, 6, 6]


def test_nearly_equal_kinds_are_one_group_each():
    plan = plan_kv_cache(layers((FULL, 10), (WINDOW, 12)))
    assert [len(g.layer_names) for g in plan.groups] == [10, 12]
    assert len(plan_kv_cache(layers((FULL, 8), (WINDOW, 10))).groups) == 3


def test_companions_follow_a_layer_with_pages_of_their_own():
    """Two kinds that overlay each other, one with something of 3 bytes a token beside each layer."""
    key = MLAAttentionSpec(block_size=16, head_size=3, dtype=torch.uint8)
    narrow = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    specs = {"a": FULL, "b": narrow, "c": narrow}
    plan = plan_kv_cache(specs, {"b": ("b.key", key), "c": ("c.key", key)})
    assert [list(g.specs) for g in plan.groups] == [["a"], ["b", "b.key"], ["c", "c.key"]]
    assert plan.storages == (("a", "b", "c"), ("b.key",), ("c.key",))
    assert plan.specs["c.key"].block_size == plan.specs["c"].block_size == 32
    assert plan.block_bytes == PAGE + 2 * 32 * 3
    cache = PagedKVCache(plan.specs, 5, overlays=plan.storages)
    assert cache.num_bytes == 5 * plan.block_bytes
    assert cache["b.key"].shape == (5, 1, 32, 3)


def test_smaller_pages_get_more_tokens():
    narrow = SlidingWindowSpec(
        block_size=16, sliding_window=32, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    plan = plan_kv_cache({"a": FULL, "b": narrow})
    assert {g.spec.page_size_bytes for g in plan.groups} == {PAGE}
    assert plan.specs["b"].block_size == 32
    assert plan.specs["a"] is plan.groups[0].spec
    assert BlockManager(BlockPool(9), plan.retentions).hit_unit == 32


def test_specs_that_unifying_makes_equal_are_one_group():
    plan = plan_kv_cache({"a": FULL, "b": FULL.copy_with_new_block_size(8)})
    assert len(plan.groups) == 1


@pytest.mark.parametrize(
    "other",
    [
        FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=8, dtype=torch.float32),
        FullAttentionSpec(block_size=12, **SHAPE),
        FullAttentionSpec(block_size=4, page_size_padded=PAGE // 2, **SHAPE),
    ],
)
def test_pages_that_cannot_be_equal_are_refused_naming_both(other):
    with pytest.raises(ConfigurationError, match="cannot share a pool") as error:
        plan_kv_cache({"first": FULL, "second": other})
    for word in ("first", "second", str(PAGE), str(other.page_size_bytes), "full_attention"):
        assert word in str(error.value)


def test_padding_can_make_pages_equal():
    wide = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=8, dtype=torch.float32)
    padded = SlidingWindowSpec(
        block_size=16, sliding_window=9, page_size_padded=wide.page_size_bytes, **SHAPE
    )
    plan = plan_kv_cache({"a": wide, "b": padded})
    assert plan.block_bytes == wide.page_size_bytes == 3 * PAGE // 2


def test_layers_that_keep_nothing_are_in_no_group():
    encoder = EncoderOnlyAttentionSpec(block_size=16, **SHAPE)
    assert set(plan_kv_cache({"a": FULL, "e": encoder}).specs) == {"a"}
    empty = plan_kv_cache({"e": encoder})
    assert (empty.groups, empty.storages, empty.block_bytes) == ((), (), 0)


def test_retentions_say_how_long_pages_are_needed():
    rswa = RSWASpec(block_size=16, rswa_window=32, **SHAPE)
    assert plan_kv_cache({"a": rswa}).retentions == (
        Retention(block_size=16, sliding_window=32, keeps_prefix=True),
    )
    assert plan_kv_cache({"a": WINDOW}).retentions == (Retention(block_size=16, sliding_window=32),)
    assert plan_kv_cache({"a": CHUNK}).retentions == (
        Retention(block_size=16, attention_chunk_size=64),
    )
    latent = MLAAttentionSpec(block_size=16, head_size=24, dtype=torch.float32)
    assert plan_kv_cache({"a": latent}).retentions == (Retention(block_size=16),)


def test_kinds_without_block_tables_are_named():
    other = AttentionSpec(block_size=16, **SHAPE)
    with pytest.raises(ConfigurationError, match=r"unknown layers \(x\)"):
        plan_kv_cache({"x": other}).retentions  # noqa: B018


def test_states_of_two_mixers_are_two_groups():
    facts = {"block_size": 16, "shapes": ((4, 8),), "dtypes": (torch.float32,)}
    specs = {n: MambaSpec(mamba_type=n[0], **facts) for n in ("a0", "b0", "a1", "b1")}
    plan = plan_kv_cache(specs)
    assert [g.layer_names for g in plan.groups] == [("a0", "a1"), ("b0", "b1")]
    with pytest.raises(ConfigurationError, match=r"mamba layers \(a0, a1\)"):
        plan.retentions  # noqa: B018


def test_pages_of_an_encoders_output_are_there_from_the_first_step_on():
    cross = CrossAttentionSpec(block_size=16, max_encoder_tokens=30, **SHAPE)
    plan = plan_kv_cache({"self": FULL, "cross": cross})
    assert plan.retentions[1] == Retention(block_size=16, follows_encoder=True)
    pool = BlockPool(12, enable_prefix_caching=False)
    manager = BlockManager(pool, plan.retentions)
    blocks = manager.new_request(encoder_len=33)
    assert manager.max_blocks(100, 8, 33) == 7 + 3
    for num_tokens, held in ((1, 1), (17, 2)):
        manager.grow(blocks, num_tokens)
        assert [len(table) for table in blocks.tables] == [held, 3]
        manager.settle(blocks, range(num_tokens), num_tokens)
    manager.release(blocks)
    assert pool.num_used == 0
    with pytest.raises(ConfigurationError, match="enable_prefix_caching=False"):
        BlockManager(BlockPool(12, enable_prefix_caching=True), plan.retentions)


def test_blocks_from_a_budget_and_a_budget_too_small():
    plan = plan_kv_cache(layers((FULL, 2), (WINDOW, 2)))
    assert plan.num_blocks(10 * plan.block_bytes + 1) == 10
    for num_bytes, held in ((-1, -1), (0, 0), (2 * plan.block_bytes - 1, 1)):
        least = f"{num_bytes} bytes hold {held} blocks.*give at least {2 * plan.block_bytes}"
        with pytest.raises(CacheError, match=least):
            plan.num_blocks(num_bytes)
    cache = PagedKVCache(plan.specs, plan.num_blocks(10 * plan.block_bytes), overlays=plan.storages)
    assert cache.num_bytes == 10 * plan.block_bytes


def test_blocks_of_a_request_add_up_over_groups():
    plan = plan_kv_cache(layers((FULL, 2), (WINDOW, 4)))
    # Full: ceil(1000 / 16); window: ceil((32 - 1 + 48) / 16) + 1, in two groups.
    assert plan.max_blocks_per_request(1000, 48) == 63 + 2 * 6


@settings(max_examples=100, deadline=None)
@given(
    num_layers=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 80)),
)
def test_groups_partition_the_layers_and_bound_what_requests_hold(num_layers, lengths):
    specs = layers(*zip((FULL, WINDOW, CHUNK), num_layers, strict=False))
    plan = plan_kv_cache(specs)
    names = [name for group in plan.groups for name in group.layer_names]
    assert sorted(names) == sorted(specs)
    assert all(len({specs[n] for n in g.layer_names}) == 1 for g in plan.groups)
    # Two layers of a group never lie over each other; all lie somewhere.
    assert sorted(n for s in plan.storages for n in s) == sorted(specs)
    for group in plan.groups:
        assert all(len(set(s) & set(group.layer_names)) <= 1 for s in plan.storages)
    num_tokens, max_query_len = lengths
    manager = BlockManager(BlockPool(2), plan.retentions)
    assert manager.max_blocks(num_tokens, max_query_len) <= plan.max_blocks_per_request(
        num_tokens, max_query_len
    )


def test_the_plan_sizes_the_memory_exactly():
    plan = plan_kv_cache(layers((FULL, 2), (WINDOW, 4)))
    cache = PagedKVCache(plan.specs, plan.num_blocks(12_345_678), overlays=plan.storages)
    assert cache.num_bytes == plan.num_blocks(12_345_678) * plan.block_bytes
    first = plan.storages[0]
    assert len({cache[name].data_ptr() for name in first}) == 1
    assert len({cache[name].data_ptr() for name in plan.specs}) == len(plan.storages)


class Old(AttentionBackend):
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def test_layers_whose_backends_shape_their_caches_count_beside_the_others():
    specs = layers((FULL, 2), (WINDOW, 4))
    for alone in (["layer.1"], list(specs)):
        plan = plan_kv_cache(specs, alone=alone)
        assert all(len(s) == 1 for s in plan.storages if set(s) & set(alone))
        backends = dict.fromkeys(alone, Old)
        cache = PagedKVCache(plan.specs, 7, overlays=plan.storages, backends=backends)
        assert cache.num_bytes == 7 * plan.block_bytes
        assert {name for s in plan.storages for name in s} == set(specs)
