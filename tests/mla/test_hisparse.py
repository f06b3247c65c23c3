"""Latents in host memory with a hot set of rows: equal to the bit, and counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attnkit import MLAAttention, PagedKVCache, make_batch
from attnkit.contract import MLADimensions
from attnkit.errors import CacheError, ConfigurationError
from attnkit.mla.hisparse import HiSparseCache, Traffic
from attnkit.mla.sparse import ChosenRows

SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)


def chosen(*slots: int) -> ChosenRows:
    """One query that names these rows of blocks of 4."""
    rows = torch.tensor([slots])
    return ChosenRows(
        num_chosen=torch.tensor([len(slots)], dtype=torch.int32), blocks=rows // 4, offsets=rows % 4
    )


def test_rows_move_once_and_the_longest_unwanted_go() -> None:
    cache = torch.arange(24.0).view(3, 4, 2)
    hot = HiSparseCache(4)
    moved = []
    for slots in ((5, 6), (6, 7, 5), (1, 5), (2,), (6,)):
        pages, table = hot.pages_of(cache, chosen(*slots))
        assert torch.equal(pages[table[0].long()][:, 0], cache.flatten(0, 1)[list(slots)])
        moved.append(hot.traffic.moved)
    # 2 takes the place of 6 or 7, wanted in step 2 last: of equals the first place, which is 6.
    assert moved == [2, 3, 4, 5, 6]
    assert hot.traffic == Traffic(hits=3, moved=6, moved_bytes=6 * 8)
    cache[1, 1] = 100
    hot.forget(torch.tensor([5, -1]))
    pages, table = hot.pages_of(cache, chosen(5, 5))
    assert pages[table[0].long()].eq(100).all()
    assert hot.traffic.moved == 7
    with pytest.raises(CacheError, match="5 different rows and 4 may be hot"):
        hot.pages_of(cache, chosen(0, 1, 2, 3, 4))
    assert hot.traffic.moved == 7
    for num_rows in (0, 2.5, "4"):
        with pytest.raises(ConfigurationError, match=f"num_rows .*{num_rows}"):
            HiSparseCache(num_rows)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="device 'tpu' is not known"):
        HiSparseCache(4, device="tpu")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_decoding_from_the_host_is_to_the_bit_decoding_from_the_device(kv_cache_dtype: str) -> None:
    lists = torch.zeros(2, 3, dtype=torch.int32)
    made: list[Any] = []
    for _ in range(2):
        layer = MLAAttention(
            4,
            SIZES,
            nn.Linear(32, 4 * 40, bias=False),
            kv_cache_dtype=kv_cache_dtype,
            indexer=SimpleNamespace(topk_indices_buffer=lists),
        )
        cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 5)[layer.layer_name]
        made.append((layer, cache))
    made[0][0].projection.weight = made[1][0].projection.weight
    hot = HiSparseCache(8)
    made[1][0].impl.hisparse_cache = hot
    g = torch.Generator().manual_seed(0)
    for step in range(20):
        lens = [step + 1, step + 3]
        lists.copy_(torch.randint(-1, step + 2, lists.shape, generator=g))
        given = [torch.randn(2, *n, generator=g) for n in ((4, 24), (32,), (8,))]
        batch = make_batch([1, 1], lens, [[1, 3], [4, 2]], 16)
        want, got = (layer(*given, cache, layer.build(batch)) for layer, cache in made)
        assert torch.equal(got, want)
    assert torch.equal(*(cache[1:].view(torch.uint8) for _, cache in made))
    row_bytes = made[0][1].shape[-1] * made[0][1].itemsize
    assert hot.traffic.moved_bytes == hot.traffic.moved * row_bytes
    assert hot.traffic.hits > 0
    assert hot.traffic.moved < 20 * 6
