"""Layers of different groups over the same memory: each in its own shape, none wider than its page."""

import pytest
import torch

from attnkit.contract import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec
from attnkit.errors import CacheError
from attnkit.kvcache.groups import plan_kv_cache
from attnkit.kvcache.pool import PagedKVCache


def _specs() -> dict[str, FullAttentionSpec | SlidingWindowSpec]:
    dtype = torch.float32
    wide = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=dtype)
    narrow = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=dtype, sliding_window=8
    )
    return {"wide": wide, "narrow": narrow}


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_overlaid_layers_keep_their_own_shape_and_share_every_byte_of_a_page(layout):
    plan = plan_kv_cache(_specs())
    cache = PagedKVCache(plan.specs, 5, layout=layout, overlays=plan.storages)
    assert cache["wide"].shape == (5, 2, 16, 256)
    assert cache["narrow"].shape == (5, 1, 64, 128)
    cache["wide"].zero_()
    cache["narrow"][3] = 1.0
    assert (cache["wide"][3] == 1.0).all()
    assert (cache["wide"][[0, 1, 2, 4]] == 0.0).all()
    assert cache.num_bytes == 5 * plan.block_bytes


def test_a_layout_that_spreads_a_page_cannot_be_seen_in_two_shapes():
    plan = plan_kv_cache(_specs())
    with pytest.raises(CacheError, match="HND"):
        PagedKVCache(plan.specs, 5, layout=KVCacheLayout.LHBNC, overlays=plan.storages)


def test_layers_whose_pages_differ_in_bytes_cannot_overlay():
    with pytest.raises(CacheError, match="one size"):
        PagedKVCache(_specs(), 5, overlays=[("wide", "narrow")])
