"""Pages of each cache format: their bytes, where a write lands, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from stored_numbers import PACKED, QUANTISED, SCALED_BY_LAYER, encode

from attnkit.contract import (
    CACHE_DTYPES,
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
)
from attnkit.errors import CacheError, ConfigurationError
from attnkit.kvcache.formats import CACHE_FORMATS, cache_format, customize_spec
from attnkit.kvcache.groups import plan_kv_cache
from attnkit.kvcache.pool import PagedKVCache

HEADS, HEAD_SIZE, HEAD_SIZE_V, BLOCK = 2, 32, 16, 4
FILLER = 0xA5


def spec_of(name: str, block_size: int = BLOCK, head_size_v: int = HEAD_SIZE_V) -> AttentionSpec:
    dtype, mode = CACHE_DTYPES[name]
    return customize_spec(
        FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            head_size_v=head_size_v,
            dtype=dtype or torch.bfloat16,
            kv_quant_mode=mode,
        )
    )


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that are slices of one projection, as models hand them over."""
    g = torch.Generator().manual_seed(seed)
    both = torch.randn(count, HEADS, HEAD_SIZE + HEAD_SIZE_V + 8, generator=g)
    return both[..., :HEAD_SIZE], both[..., -HEAD_SIZE_V:]


K_SCALES = torch.tensor([0.5, 1.5])
V_SCALE = torch.tensor(0.25)


def contents_of(name: str, key: torch.Tensor, value: torch.Tensor) -> np.ndarray:
    k = encode(name, key.numpy(), K_SCALES.numpy()[:, None])
    return np.concatenate([k, encode(name, value.numpy(), V_SCALE.numpy())], -1)


def fill(cache: torch.Tensor) -> torch.Tensor:
    """The cache as bytes, each FILLER."""
    data = cache.view(torch.uint8)
    data.fill_(FILLER)
    return data


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_a_write_changes_its_slots_and_nothing_else(name: str, layout: KVCacheLayout) -> None:
    spec = spec_of(name)
    cache = PagedKVCache({"a": spec, "b": spec}, 5, layout=layout)
    pages, other = fill(cache["a"]), fill(cache["b"])
    key, value = tokens(7)
    key[5:], value[5:] = torch.nan, torch.nan
    slots = torch.tensor([9, -1, 18, 6, 17])  # Rows past the slots are padding.
    cache_format(name).write(key, value, cache["a"], slots, K_SCALES, V_SCALE)

    wanted = np.full(pages.shape, FILLER, dtype=np.uint8)
    contents = contents_of(name, key[:5], value[:5])
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // BLOCK, :, slot % BLOCK] = contents[row]
    assert np.array_equal(pages.numpy(), wanted)
    assert (other == FILLER).all()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_only_padding_writes_nothing(name: str, index: torch.dtype) -> None:
    """BR-011, BR-013: -1 is no slot from the end, and the null block keeps its bytes."""
    cache = PagedKVCache({"a": spec_of(name)}, 3)
    pages = fill(cache["a"])
    key, value = (torch.full_like(x, torch.nan) for x in tokens(3))
    for slots in ([-1, -1, -1], []):
        slot_mapping = torch.tensor(slots, dtype=index)
        cache_format(name).write(key, value, cache["a"], slot_mapping, K_SCALES, V_SCALE)
        assert (pages == FILLER).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_a_page_far_from_the_next_one_is_written_in_place(name: str) -> None:
    """BR-053: a layer's view into memory shared by all, whose block stride is no page."""
    content = spec_of(name).content_bytes
    memory = torch.full((6 * 1111,), FILLER, dtype=torch.uint8)
    shape, strides = (6, HEADS, BLOCK, content), (1111, content, HEADS * content, 1)
    cache = memory.as_strided(shape, strides, storage_offset=100)
    key, value = tokens(2)
    cache_format(name).write(key, value, cache, torch.tensor([21, 6]), K_SCALES, V_SCALE)
    wanted = np.full(memory.shape, FILLER, dtype=np.uint8)
    contents = contents_of(name, key, value)
    for row, slot in enumerate((21, 6)):
        for head in range(HEADS):
            first = 100 + slot // BLOCK * 1111 + slot % BLOCK * HEADS * content + head * content
            wanted[first : first + content] = contents[row, head]
    assert np.array_equal(memory.numpy(), wanted)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_a_byte_view_of_a_cache_is_the_same_cache(name: str, dtype: torch.dtype) -> None:
    cache = PagedKVCache({"a": spec_of(name)}, 3)["a"]
    again = torch.zeros_like(cache)
    key, value = tokens(3)
    slots = torch.tensor([5, 4, 11])
    fmt = cache_format(name)
    fmt.write(key, value, cache, slots, K_SCALES, V_SCALE)
    fmt.write(key, value, again.view(dtype), slots, K_SCALES, V_SCALE)
    assert torch.equal(cache.view(torch.uint8), again.view(torch.uint8))
    views = (cache[1, :, 1], cache.view(dtype)[1, :, 1])
    reads = [fmt.decode(c, HEAD_SIZE, HEAD_SIZE_V, K_SCALES, V_SCALE) for c in views]
    assert torch.equal(reads[0][0], reads[1][0])
    assert torch.equal(reads[0][1], reads[1][1])


@pytest.mark.parametrize("name", QUANTISED)
def test_nothing_is_written_by_a_call_that_is_refused(name: str) -> None:
    cache = PagedKVCache({"a": spec_of(name)}, 3)["a"]
    pages = fill(cache)
    key, value = tokens(1)
    slots = torch.tensor([5])
    with pytest.raises(CacheError, match=f"{name} needs .*customize_spec"):
        cache_format(name).write(key, value, cache[..., :-4], slots, K_SCALES, V_SCALE)
    if name in SCALED_BY_LAYER:
        with pytest.raises(ConfigurationError, match="v_scale has shape"):
            cache_format(name).write(key, value, cache, slots, K_SCALES, torch.ones(3))
    assert (pages == FILLER).all()


BYTES = {
    "auto": 96,
    "float16": 96,
    "bfloat16": 96,
    "float32": 192,
    "fp8": 48,
    "fp8_e4m3": 48,
    "fp8_e5m2": 48,
    "int8_per_token_head": 56,
    "fp8_per_token_head": 56,
    "int4_per_token_head": 32,
    "nvfp4": 27,
}


@pytest.mark.parametrize("name", CACHE_FORMATS)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BLHNC])
def test_declared_bytes_are_the_bytes_of_the_tensors(name: str, layout: KVCacheLayout) -> None:
    spec = spec_of(name)
    assert spec.content_bytes == BYTES[name]
    assert spec.page_size_bytes == HEADS * BLOCK * BYTES[name]
    cache = PagedKVCache({"a": spec, "b": spec}, 7, layout=layout)
    assert cache.num_bytes == 2 * 7 * spec.page_size_bytes
    page = cache["a"][0]
    assert page.numel() * page.element_size() == spec.page_size_bytes
    fmt = cache_format(name)
    if name != "auto":
        assert fmt.layout(HEAD_SIZE, HEAD_SIZE_V).num_bytes == spec.content_bytes
        assert cache["a"].dtype is fmt.dtype


def test_eight_bits_hold_twice_the_tokens_of_sixteen() -> None:
    budget = 100 * spec_of("bfloat16").page_size_bytes
    blocks = {name: plan_kv_cache({"a": spec_of(name)}).num_blocks(budget) for name in BYTES}
    assert blocks["bfloat16"] == 100
    assert blocks["fp8"] == blocks["fp8_e5m2"] == 200
    assert blocks["int8_per_token_head"] == blocks["fp8_per_token_head"] == 100 * 96 // 56
    assert blocks["int4_per_token_head"] == 300
    assert blocks["nvfp4"] == 100 * 96 // 27


@pytest.mark.parametrize("name", CACHE_FORMATS)
@pytest.mark.parametrize("kind", ["full", "window", "cross"])
def test_customised_specs_are_fixed_points_and_do_not_see_the_block(name: str, kind: str) -> None:
    dtype, mode = CACHE_DTYPES[name]
    facts = {
        "num_kv_heads": 3,
        "head_size": 64,
        "head_size_v": 32,
        "dtype": dtype or torch.float16,
        "kv_quant_mode": mode,
    }
    spec: AttentionSpec = {
        "full": lambda: FullAttentionSpec(block_size=1, **facts),
        "window": lambda: SlidingWindowSpec(block_size=1, sliding_window=5, **facts),
        "cross": lambda: CrossAttentionSpec(block_size=1, max_encoder_tokens=9, **facts),
    }[kind]()
    packed = customize_spec(spec)
    assert type(packed) is type(spec)
    assert customize_spec(packed) == packed
    assert customize_spec(replace(spec, block_size=48)) == packed.copy_with_new_block_size(48)
    assert packed.copy_with_new_block_size(48).page_size_bytes == 48 * packed.page_size_bytes
    # Plain specs stay what they are, so that they still group with those of other backends.
    assert (packed == spec) == (name not in PACKED)


def test_packing_overrides_the_models_dtype() -> None:
    mode = CACHE_DTYPES["int8_per_token_head"][1]
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, kv_quant_mode=mode
    )
    packed = customize_spec(spec)
    assert (packed.dtype, packed.content_size) == (torch.int8, 136)


def test_a_spec_packed_by_another_backend_is_left_alone() -> None:
    spec = replace(spec_of("nvfp4"), state_content_bytes=64)
    assert customize_spec(spec) == spec


def test_a_spec_whose_heads_do_not_fit_is_named() -> None:
    with pytest.raises(ConfigurationError, match="nvfp4 needs head sizes that 16 divides, not 24"):
        spec_of("nvfp4", head_size_v=24)


def test_layers_of_different_formats_share_one_pool() -> None:
    """Pages of equal bytes by more tokens: 96 of bfloat16 are 48 of fp8 twice and 32 of int4 thrice."""
    specs = {name: spec_of(name) for name in ("bfloat16", "fp8", "int4_per_token_head")}
    plan = plan_kv_cache(specs)
    cache = PagedKVCache(plan.specs, 4, overlays=plan.storages)
    sizes = {name: cache[name].shape[2] for name in specs}
    assert sizes == {"bfloat16": BLOCK, "fp8": 2 * BLOCK, "int4_per_token_head": 3 * BLOCK}
    assert cache.num_bytes == 4 * HEADS * BLOCK * 96


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_poisoned_pages_read_back_as_nan(name: str) -> None:
    cache = PagedKVCache({"a": spec_of(name)}, 3, poison=True)
    fmt = cache_format(name)

    def read(block: int) -> tuple[torch.Tensor, torch.Tensor]:
        page = cache["a"][block].transpose(0, 1)
        return fmt.decode(page, HEAD_SIZE, HEAD_SIZE_V, K_SCALES, V_SCALE)

    assert all(x.isnan().all() for x in read(2))
    key, value = tokens(BLOCK)
    slots = torch.arange(2 * BLOCK, 3 * BLOCK)
    fmt.write(key, value, cache["a"], slots, K_SCALES, V_SCALE)
    assert not any(x.isnan().any() for x in read(2))
    assert all(x.isnan().all() for x in read(1))
    cache.poison_blocks([2])
    assert all(x.isnan().all() for x in read(2))
