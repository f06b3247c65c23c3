"""PagedKVCache: splits, overlays and poison are exact, and nonsense is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit.contract import AttentionBackend, FullAttentionSpec, KVCacheLayout, KVCacheSpec
from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.pool import PagedKVCache
from attnkit.kvcache.write import write_kv

FACTS: dict[str, Any] = {
    "block_size": 12,
    "num_kv_heads": 2,
    "head_size": 6,
    "head_size_v": 4,
    "dtype": torch.float32,
}


def _spec(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**FACTS, **changes})


PAGE = _spec().page_size_bytes


def test_a_fresh_page_is_zero_and_no_layer_sees_anothers() -> None:
    cache = PagedKVCache({"a": _spec(), "b": _spec(num_kv_heads=1)}, 3)
    cache["a"].fill_(1.0)
    assert not cache["b"].any()
    assert cache["b"].shape == (3, 1, 12, 10)
    assert "a" in cache
    assert "c" not in cache
    with pytest.raises(CacheError, match="no layer 'c' in this cache; it has a, b"):
        _ = cache["c"]


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize("kernel_block_size", [1, 3, 4, 6, 12])
def test_a_split_page_is_the_same_memory_and_a_slot_the_same_place(
    layout: KVCacheLayout, kernel_block_size: int
) -> None:
    """Block b is kernel blocks b * r to b * r + r - 1, and slots need no translation."""
    cache = PagedKVCache({"a": _spec()}, 4, layout=layout, kernel_block_size=kernel_block_size)
    ratio = 12 // kernel_block_size
    assert cache.blocks_per_block == ratio
    assert cache.kernel_block_size == kernel_block_size
    assert cache["a"].shape == (4 * ratio, 2, kernel_block_size, 10)
    assert cache.num_bytes == 4 * PAGE
    slots = torch.tensor([41, 12, 30, 23])
    key, value = torch.randn(4, 2, 6), torch.randn(4, 2, 4)
    write_kv(key, value, cache["a"], slots)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 12)
        kernel_block = block * ratio + offset // kernel_block_size
        row = cache["a"][kernel_block, :, offset % kernel_block_size]
        assert torch.equal(row, torch.cat([key[token], value[token]], -1))
    cache.poison_blocks([3])
    poisoned = cache["a"].isnan().flatten(1).all(1)
    assert poisoned.tolist() == [b // ratio == 3 for b in range(4 * ratio)]


@pytest.mark.parametrize(
    ("specs", "kernel_block_size", "named"),
    [
        ({"a": _spec()}, 5, "12 tokens do not split into kernel blocks of 5"),
        ({"a": _spec()}, 0, "kernel blocks of 0"),
        ({"a": _spec()}, -4, "kernel blocks of -4"),
        ({"a": _spec()}, 24, "kernel blocks of 24"),
        ({"a": _spec(page_size_padded=2 * PAGE)}, 4, "padded page cannot be split"),
        ({"a": _spec(), "b": _spec(block_size=5)}, 6, "another layer have 5 tokens"),
    ],
)
def test_a_page_that_does_not_split_is_refused(
    specs: dict[str, FullAttentionSpec], kernel_block_size: int, named: str
) -> None:
    with pytest.raises(CacheError, match=named):
        PagedKVCache(specs, 3, kernel_block_size=kernel_block_size)


def test_a_padded_page_may_stay_whole() -> None:
    cache = PagedKVCache({"a": _spec(page_size_padded=2 * PAGE)}, 3, kernel_block_size=12)
    assert cache.num_bytes == 6 * PAGE


def test_layers_of_different_block_sizes_split_by_the_same_number() -> None:
    cache = PagedKVCache({"a": _spec(), "b": _spec(block_size=8)}, 3, kernel_block_size=6)
    assert cache["a"].shape == (6, 2, 6, 10)
    assert cache["b"].shape == (6, 2, 4, 10)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_poison_is_nan_in_every_float(dtype: torch.dtype) -> None:
    cache = PagedKVCache({"a": _spec(dtype=dtype)}, 3, poison=True)
    assert cache["a"].float().isnan().all()
    clean = PagedKVCache({"a": _spec(dtype=dtype)}, 3)
    clean.poison_blocks(iter([2]))
    assert clean["a"].float().isnan().flatten(1).all(1).tolist() == [False, False, True]
    assert not clean["a"][:2].float().any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_poison_of_codes_is_nan_where_floats_lie_among_them(dtype: torch.dtype) -> None:
    cache = PagedKVCache({"a": _spec(dtype=dtype)}, 3, poison=True)
    for stored in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert cache["a"].flatten().view(stored).float().isnan().all()


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_poison_reaches_these_blocks_of_every_layer_and_no_others(layout: KVCacheLayout) -> None:
    cache = PagedKVCache({"a": _spec(), "b": _spec()}, 5, layout=layout)
    cache.poison_blocks([4, 1])
    for tensor in cache.values():
        assert tensor.isnan().flatten(1).all(1).tolist() == [False, True, False, False, True]
        assert tensor.isnan().flatten(1).any(1).tolist() == [False, True, False, False, True]
    before = [t.clone() for t in cache.values()]
    cache.poison_blocks([])
    for tensor, was in zip(cache.values(), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), was.nan_to_num())


@pytest.mark.parametrize("block", [-1, 5, 2**40])
def test_poison_of_a_block_that_is_not_there_is_refused_before_anything_is_written(
    block: int,
) -> None:
    cache = PagedKVCache({"a": _spec()}, 5)
    with pytest.raises(CacheError, match=f"no block {block}; ids run from 0 to 4"):
        cache.poison_blocks([1, block])
    assert not cache["a"].isnan().any()


class Old(AttentionBackend):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (1, 0, 3, 2, 4)


def test_an_older_backend_gets_the_shape_it_asks_for_beside_current_ones() -> None:
    cache = PagedKVCache(
        {"new": _spec(), "old": _spec(head_size_v=6)},
        4,
        kernel_block_size=6,
        backends={"old": Old, "new": AttentionBackend},
    )
    assert cache["old"].shape == (2, 8, 6, 2, 6)
    assert cache["old"].permute(1, 0, 3, 2, 4).is_contiguous()
    assert cache["new"].shape == (8, 2, 6, 10)
    assert list(cache.specs) == ["new", "old"]


def test_poison_finds_the_blocks_of_an_older_shape() -> None:
    cache = PagedKVCache({"old": _spec()}, 4, kernel_block_size=6, backends={"old": Old})
    cache.poison_blocks([1])
    poisoned = cache["old"].isnan().movedim(1, 0).flatten(1)
    assert poisoned.all(1).tolist() == poisoned.any(1).tolist()
    assert poisoned.all(1).tolist() == [False, False, True, True, False, False, False, False]


def test_an_older_backend_overlays_nothing() -> None:
    cache = PagedKVCache(
        {"new": _spec(), "old": _spec()}, 4, overlays=[("new", "old")], backends={"old": Old}
    )
    cache["old"].fill_(1.0)
    assert not cache["new"].any()


def test_the_same_round_trip_through_an_older_shape_and_the_logical_one() -> None:
    """The older shape keeps K and V apart, so only a copy turns one into the other; it loses nothing."""
    spec = _spec(head_size_v=6)
    cache = PagedKVCache({"new": spec, "old": spec}, 4, backends={"old": Old})
    key, value = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    slots = torch.tensor([13, 47, 20])
    write_kv(key, value, cache["new"], slots)
    keys, values = cache["new"].transpose(1, 2).split(6, -1)
    cache["old"].copy_(torch.stack([keys, values]))
    assert torch.equal(cache["old"].flatten(1, 2)[0, slots], key)
    assert torch.equal(cache["old"].flatten(1, 2)[1, slots], value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_blocks": 1}, "1 blocks leave no page beside the null block"),
        ({"num_blocks": -3}, "-3 blocks"),
        ({"num_blocks": 3.0}, "num_blocks 3.0 is not allowed"),
        ({"kernel_block_size": 4.0}, "do not split into kernel blocks of 4.0"),
        ({"specs": {"a": None}}, "give {layer name: layer.get_kv_cache_spec"),
        ({"specs": {"a": 2}}, "give {layer name: layer.get_kv_cache_spec"),
        ({"specs": {"a": KVCacheSpec(block_size=4)}}, "give {layer name: layer.get_kv_cache_spec"),
        ({"overlays": 3.5}, "overlays is 3.5; give lists of layer names"),
        ({"overlays": ["a", "b"]}, "overlays is .*; give lists of layer names"),
        ({"backends": ["a"]}, "backends is .*; give {layer name: backend class}"),
        ({"backends": {"a": 1}}, "backends is .*; give {layer name: backend class}"),
        ({"poison": "no"}, "poison 'no' is not allowed"),
        ({"layout": "HND"}, r"layout 'HND' is no KVCacheLayout; .*parse\('HND'\)"),
        ({"kv_cache_dtype": "fp8"}, "'fp8' was given, and the spec of layer a says torch.float32"),
        ({"specs": {}}, "at least one layer's spec"),
        ({"overlays": [("a", "x")]}, "overlays name layer 'x'"),
        ({"overlays": [("a",), ("a", "b")]}, "overlays name layer 'a' 2 times"),
        ({"overlays": [("a", "a")]}, "overlays name layer 'a' 2 times"),
        ({"backends": {"x": Old}}, "backends names layer 'x'"),
        ({"num_blocks": 2**31}, "more than int32 block ids can name"),
        *(
            (
                {"num_blocks": 2**30, "layout": layout, "specs": {"a": _spec(head_size=2**20)}},
                r"GiB of pages in one piece are more than cpu gives \(.*; give fewer blocks",
            )
            for layout in (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
        ),
        (
            {"num_blocks": 2**29, "kernel_block_size": 1},
            f"give at most {(2**31 - 1) // 12}",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_memory_is_taken(
    arguments: dict[str, Any], named: str
) -> None:
    given = {"specs": {"a": _spec(), "b": _spec()}, "num_blocks": 3, **arguments}
    with pytest.raises(CacheError, match=named):
        PagedKVCache(given.pop("specs"), given.pop("num_blocks"), **given)


@pytest.mark.parametrize("device", ["gpu", "meta"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match=device):
        PagedKVCache({"a": _spec()}, 3, device=device)
