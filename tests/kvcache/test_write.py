"""write_kv: every token to its slot and nothing anywhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit.contract import FullAttentionSpec, KVCacheLayout
from attnkit.errors import BatchError
from attnkit.kvcache.pool import PagedKVCache
from attnkit.kvcache.write import write_kv

BLOCKS, HEADS, SIZE, SIZE_V = 5, 2, 6, 3


def _cache(
    block_size: int, layout: KVCacheLayout = KVCacheLayout.LBHNC, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=HEADS,
        head_size=SIZE,
        head_size_v=SIZE_V,
        dtype=dtype,
    )
    return PagedKVCache({"a": spec, "b": spec}, BLOCKS, layout=layout, poison=True)["b"]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    layout=st.sampled_from(list(KVCacheLayout)),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_tokens_go_to_their_slots_and_nothing_else_changes(
    data: st.DataObject, layout: KVCacheLayout, block_size: int
) -> None:
    size = BLOCKS * block_size
    written = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=12))
    skipped = data.draw(st.lists(st.just(-1), max_size=3))
    slots = data.draw(st.permutations(written + skipped))
    extra = data.draw(st.integers(0, 2))
    key = torch.randn(len(slots) + extra, HEADS, SIZE)
    value = torch.randn(len(slots) + extra, HEADS, SIZE_V)
    cache = _cache(block_size, layout)
    write_kv(key, value, cache, torch.tensor(slots, dtype=torch.int64))
    rows = cache.permute(0, 2, 1, 3).reshape(size, HEADS, SIZE + SIZE_V)
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(rows[slot], torch.cat([key[token], value[token]], -1))
    untouched = [slot for slot in range(size) if slot not in slots]
    assert rows[untouched].isnan().all()


def test_keys_and_values_may_be_slices_of_one_projection() -> None:
    qkv = torch.randn(4, HEADS, 2 * SIZE + SIZE_V)
    _, key, value = qkv.split([SIZE, SIZE, SIZE_V], -1)
    cache = _cache(3)
    write_kv(key, value, cache, torch.tensor([3, 4, 5, 6]))
    assert torch.equal(cache[1, :, :, :SIZE], key[:3].transpose(0, 1))
    assert torch.equal(cache[2, :, 0, SIZE:], value[3])


def test_numbers_are_rounded_once_to_the_caches_dtype() -> None:
    key, value = torch.randn(2, HEADS, SIZE) * 3, torch.randn(2, HEADS, SIZE_V) * 3
    cache = _cache(3, dtype=torch.bfloat16)
    write_kv(key, value, cache, torch.tensor([7, 3]))
    assert torch.equal(cache[2, :, 1, :SIZE], key[0].bfloat16())
    assert torch.equal(cache[1, :, 0, SIZE:], value[1].bfloat16())


@pytest.mark.parametrize("slot", [BLOCKS * 3, 2**40])
def test_a_slot_past_the_end_is_an_error(slot: int) -> None:
    cache = _cache(3)
    with pytest.raises(
        BatchError, match=f"slot {slot} is outside the cache of {BLOCKS} blocks of 3"
    ):
        write_kv(
            torch.randn(1, HEADS, SIZE), torch.randn(1, HEADS, SIZE_V), cache, torch.tensor([slot])
        )
    assert cache.isnan().all()


def test_too_few_values_write_no_key() -> None:
    cache = _cache(3)
    with pytest.raises(IndexError):
        write_kv(
            torch.randn(2, HEADS, SIZE), torch.randn(1, HEADS, SIZE_V), cache, torch.tensor([3, 4])
        )
    assert cache.isnan().all()
