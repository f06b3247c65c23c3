"""Layouts: one logical shape, six orders in memory, and pages of equal bytes everywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit.contract import (
    AttentionBackend,
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    MultipleOf,
    SlidingWindowSpec,
)
from attnkit.errors import CacheError
from attnkit.kvcache.layout import allocate, allocate_old_generation
from attnkit.kvcache.pool import PagedKVCache

LAYERS = ("first", "second", "third")
BLOCKS, HEADS, TOKENS, SIZE, SIZE_V = 5, 3, 4, 6, 2
CPU = torch.device("cpu")


def _spec(dtype: torch.dtype = torch.float32, **changes: Any) -> FullAttentionSpec:
    facts = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": SIZE, "head_size_v": SIZE_V}
    return FullAttentionSpec(**{**facts, **changes}, dtype=dtype)


def _three(layout: KVCacheLayout) -> PagedKVCache:
    return PagedKVCache(dict.fromkeys(LAYERS, _spec()), BLOCKS, layout=layout)


# Elements between neighbours in (B, H, N, C) of one layer, and between layers; None: another memory.
STRIDES: dict[str, tuple[tuple[int, int, int, int], int | None]] = {
    "LBHNC": ((HEADS * TOKENS * 8, TOKENS * 8, 8, 1), None),
    "LBNHC": ((HEADS * TOKENS * 8, 8, HEADS * 8, 1), None),
    "LHBNC": ((TOKENS * 8, BLOCKS * TOKENS * 8, 8, 1), None),
    "BLHNC": ((3 * HEADS * TOKENS * 8, TOKENS * 8, 8, 1), HEADS * TOKENS * 8),
    "BLNHC": ((3 * HEADS * TOKENS * 8, 8, HEADS * 8, 1), HEADS * TOKENS * 8),
    "BHLNC": ((3 * HEADS * TOKENS * 8, 3 * TOKENS * 8, 8, 1), TOKENS * 8),
}


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_strides_follow_the_layout_and_the_shape_does_not(layout: KVCacheLayout) -> None:
    cache = _three(layout)
    strides, between = STRIDES[layout.name]
    tensors = [cache[name] for name in LAYERS]
    for tensor in tensors:
        assert tensor.shape == (BLOCKS, HEADS, TOKENS, SIZE + SIZE_V)
        assert tensor.stride() == strides
        assert not tensor.any()
    starts = [t.data_ptr() for t in tensors]
    if between is not None:
        assert [s - starts[0] for s in starts] == [0, between * 4, 2 * between * 4]


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_no_byte_belongs_to_two_layers_and_none_to_nobody(layout: KVCacheLayout) -> None:
    cache = _three(layout)
    for number, name in enumerate(LAYERS, start=1):
        cache[name].fill_(number)
    for number, name in enumerate(LAYERS, start=1):
        assert (cache[name] == number).all()
    assert cache.num_bytes == sum(t.numel() for t in cache.values()) * 4
    assert cache.num_bytes == BLOCKS * 3 * _spec().page_size_bytes


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str
)
def test_a_page_has_the_bytes_its_spec_says(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    specs: dict[str, AttentionSpec] = {name: _spec(dtype) for name in LAYERS}
    cache = PagedKVCache(specs, BLOCKS, layout=layout)
    for name, spec in specs.items():
        page = cache[name][2]
        assert page.numel() * page.element_size() == spec.page_size_bytes
        assert cache[name].dtype == dtype
    assert cache.num_bytes == BLOCKS * sum(s.page_size_bytes for s in specs.values())


def test_a_latent_page_has_no_values() -> None:
    spec = MLAAttentionSpec(block_size=4, head_size=12, dtype=torch.bfloat16)
    cache = PagedKVCache({"mla": spec}, 3)
    assert cache["mla"].shape == (3, 1, 4, 12)
    assert cache.num_bytes == 3 * spec.page_size_bytes


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_padding_lies_between_pages(layout: KVCacheLayout) -> None:
    dense = _spec().page_size_bytes
    padded = FullAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        head_size_v=SIZE_V,
        dtype=torch.float32,
        page_size_padded=dense + 32,
    )
    cache = PagedKVCache({"padded": padded, "dense": _spec()}, BLOCKS, layout=layout)
    assert cache["padded"].shape == cache["dense"].shape
    assert cache["padded"].stride()[0] * 4 == dense + 32
    assert cache["padded"].stride()[1:] == cache["dense"].stride()[1:]
    assert cache.num_bytes == BLOCKS * (2 * dense + 32)
    cache["padded"].fill_(1.0)
    memory = torch.empty(0, dtype=torch.float32).set_(cache["padded"].untyped_storage())
    assert int((memory == 0).sum()) == BLOCKS * 32 // 4


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_blocks_lie_as_far_apart_as_a_spec_wants(layout: KVCacheLayout) -> None:
    for base in (1, 2, 4):
        spec = _spec(block_stride_alignment=MultipleOf(base))
        PagedKVCache({"a": spec}, BLOCKS, layout=layout)
    spec = _spec(block_stride_alignment=MultipleOf(3))
    with pytest.raises(CacheError, match=r"384 bytes are no multiple of 288, the bytes of the 3"):
        PagedKVCache({"a": spec}, BLOCKS, layout=layout)
    padded = replace(spec, page_size_padded=576)
    if layout.is_layer_compact:
        cache = PagedKVCache({"a": padded}, BLOCKS, layout=layout)["a"]
        assert cache.stride(0) * cache.element_size() == 576


def test_padding_must_be_whole_elements() -> None:
    spec = _spec(page_size_padded=_spec().page_size_bytes + 2)
    with pytest.raises(CacheError, match="whole elements"):
        PagedKVCache({"a": spec}, 2)


@pytest.mark.parametrize("layout", [x for x in KVCacheLayout if not x.is_layer_compact])
@pytest.mark.parametrize(
    "other",
    [
        _spec(head_size=8),
        _spec(torch.float16),
        _spec(block_size=8),
        _spec(page_size_padded=1024),
        SlidingWindowSpec(
            block_size=TOKENS, num_kv_heads=1, head_size=SIZE, dtype=torch.float32, sliding_window=2
        ),
    ],
    ids=["head_size", "dtype", "block_size", "padded", "heads"],
)
def test_interleaved_layers_must_be_alike(layout: KVCacheLayout, other: AttentionSpec) -> None:
    with pytest.raises(
        CacheError, match=f"layout {layout.name} interleaves layers.*use HND or NHD"
    ):
        PagedKVCache({"a": _spec(), "b": other}, BLOCKS, layout=layout)


def test_interleaved_layers_need_no_equal_specs_where_pages_are_alike() -> None:
    window = SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        head_size_v=SIZE_V,
        dtype=torch.float32,
        sliding_window=3,
    )
    cache = PagedKVCache({"a": _spec(), "b": window}, BLOCKS, layout=KVCacheLayout.BLHNC)
    assert cache["a"].stride() == cache["b"].stride()


class Old(AttentionBackend):
    """Keys of all blocks, then values of all blocks."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        assert cache_dtype_str in ("auto", "fp8")
        return (2, num_blocks, block_size, num_kv_heads, head_size)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_older_shapes_lie_in_memory_in_their_stride_order(order: tuple[int, ...]) -> None:
    class Ordered(Old):
        @staticmethod
        def get_kv_cache_stride_order() -> tuple[int, ...]:
            return order

    made = allocate_old_generation(Ordered, _spec(), 7, "fp8", CPU)
    assert made is not None
    tensor, block_dim = made
    assert tensor.shape == (2, 7, TOKENS, HEADS, SIZE)
    assert block_dim == 1
    assert tensor.permute(order).is_contiguous()


def test_an_older_shape_without_an_order_is_in_its_own() -> None:
    made = allocate_old_generation(Old, _spec(), 2, "auto", CPU)
    assert made is not None
    assert made[0].is_contiguous()
    assert made[0].shape == (2, 2, TOKENS, HEADS, SIZE)
    assert made[1] == 1, "two blocks and K and V have the same size; only one of them grows"


def test_a_current_backend_has_none() -> None:
    assert allocate_old_generation(AttentionBackend, _spec(), 7, "auto", CPU) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 3, 3), (1, 2, 3, 4, 5)])
def test_a_stride_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    class Wrong(Old):
        @staticmethod
        def get_kv_cache_stride_order() -> tuple[int, ...]:
            return order

    with pytest.raises(CacheError, match=r"Wrong: stride order .* not a permutation of the 5"):
        allocate_old_generation(Wrong, _spec(), 7, "auto", CPU)


def test_an_older_shape_must_grow_with_the_blocks() -> None:
    class Fixed(Old):
        @staticmethod
        def get_kv_cache_shape(*args: object) -> tuple[int, ...]:
            return (2, 7)

    with pytest.raises(CacheError, match="exactly one dimension must grow"):
        allocate_old_generation(Fixed, _spec(), 7, "auto", CPU)


def test_memory_over_which_two_specs_lie_is_one() -> None:
    (views,) = allocate([[_spec(), _spec()]], BLOCKS, KVCacheLayout.LBHNC, CPU)
    assert views[0].data_ptr() == views[1].data_ptr()


def test_memory_on_a_cpu_asks_for_huge_pages() -> None:
    maps = Path("/proc/self/smaps")
    if not maps.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no huge pages that can be asked for")
    tensor = allocate([[_spec()]], 4096, KVCacheLayout.LBHNC, CPU)[0][0]
    address, inside = tensor.data_ptr(), False
    for line in maps.read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if last:
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and line.startswith("VmFlags"):
            assert "hg" in line.split()
            return
    raise AssertionError("the tensor lies in no mapping")
