"""AttentionImpl and MLAAttentionImpl: ranks from the scope they are made under, and latent writes."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from attnkit.contract import (
    AttentionImpl,
    AttentionImplBase,
    KVQuantMode,
    MLAAttentionImpl,
    ParallelContext,
    get_parallel_context,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
    parallel_context,
)
from attnkit.errors import BatchError, ConfigurationError


class Impl(AttentionImpl[Any]):
    can_return_lse_for_decode = True

    def __init__(self, num_heads: int = 4, kv_cache_dtype: str = "auto") -> None:
        # No call of a base constructor, as in most impls.
        self.num_heads, self.kv_cache_dtype = num_heads, kv_cache_dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class WithoutLse(Impl):
    can_return_lse_for_decode = False


FOUR = ParallelContext(dcp_world_size=4, dcp_rank=2, pcp_world_size=2, pcp_rank=1)


def test_one_rank_without_a_scope() -> None:
    impl = Impl()
    assert (impl.dcp_world_size, impl.dcp_rank) == (1, 0)
    assert (impl.pcp_world_size, impl.pcp_rank) == (1, 0)
    assert (impl.total_cp_world_size, impl.total_cp_rank) == (1, 0)
    assert impl.need_to_return_lse_for_decode is False


def test_ranks_are_read_once_when_the_impl_is_made() -> None:
    outside = Impl()
    with parallel_context(FOUR):
        inside = Impl()
        with parallel_context(ParallelContext()):
            draft = Impl()
        after_the_draft = Impl()
    for impl in (inside, after_the_draft):
        assert (impl.dcp_world_size, impl.dcp_rank) == (4, 2)
        assert (impl.pcp_world_size, impl.pcp_rank) == (2, 1)
        assert (impl.total_cp_world_size, impl.total_cp_rank) == (4, 2)
    for impl in (outside, draft):
        assert (impl.dcp_world_size, impl.dcp_rank) == (1, 0)
    assert get_parallel_context() == ParallelContext()


def test_a_scope_ends_with_its_error() -> None:
    with pytest.raises(KeyError), parallel_context(FOUR):
        raise KeyError
    assert get_parallel_context() == ParallelContext()


def test_a_scope_belongs_to_its_thread() -> None:
    seen = []
    with parallel_context(FOUR):
        thread = threading.Thread(target=lambda: seen.append(Impl().dcp_world_size))
        thread.start()
        thread.join()
    assert seen == [1]


def test_ranks_that_share_a_cache_need_an_lse_from_those_who_have_one() -> None:
    with parallel_context(FOUR):
        assert Impl().need_to_return_lse_for_decode is True
        assert WithoutLse().need_to_return_lse_for_decode is False
    prefill_only = ParallelContext(pcp_world_size=2)
    with parallel_context(prefill_only):
        assert Impl().need_to_return_lse_for_decode is False
    assert Impl.need_to_return_lse_for_decode is False


def test_a_copy_keeps_its_ranks() -> None:
    with parallel_context(FOUR):
        impl = Impl()
    assert copy.deepcopy(impl).dcp_rank == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"dcp_world_size": 0},
        {"dcp_world_size": 2, "dcp_rank": 2},
        {"pcp_rank": 1},
        {"pcp_world_size": 2, "pcp_rank": -1},
    ],
)
def test_a_rank_outside_its_world_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"rank -?\d of world size \d"):
        ParallelContext(**wrong)


def test_defaults_promise_nothing() -> None:
    impl = Impl()
    assert impl.get_impl_variants() == (impl,)
    assert impl.process_weights_after_loading(torch.bfloat16) is None
    assert impl.prepare_for_batch(None) is None
    assert not impl.fused_output_quant_supported(kFp8StaticTensorSym)
    assert not impl.fused_rope_kvcache_supported()
    assert not impl.fused_qk_norm_rope_kvcache_supported()
    assert not impl.fused_qk_norm_mrope_kvcache_supported()
    assert AttentionImplBase.lse_base_on_e is True
    assert not impl.supports_dcp
    assert not impl.supports_pcp


@pytest.mark.parametrize(
    "name",
    [
        "do_rope_and_kv_cache_update",
        "do_qk_norm_rope_kvcache_update",
        "do_qk_norm_mrope_kvcache_update",
        "do_kv_cache_update",
    ],
)
def test_what_is_not_there_says_so(name: str) -> None:
    method = getattr(Impl(), name)
    arguments = [None] * (method.__code__.co_argcount - 1)
    with pytest.raises(NotImplementedError):
        method(*arguments)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("auto", KVQuantMode.NONE),
        ("bfloat16", KVQuantMode.NONE),
        ("fp8_e5m2", KVQuantMode.FP8_PER_TENSOR),
        ("int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD),
    ],
)
def test_the_cache_format_follows_the_string(name: str, mode: KVQuantMode) -> None:
    assert Impl(kv_cache_dtype=name).kv_quant_mode is mode


class Latent(MLAAttentionImpl[Any]):
    def __init__(self) -> None: ...

    def forward_mqa(self, *args: Any) -> Any:
        raise NotImplementedError


def test_an_mla_impl_needs_one_of_two_forwards() -> None:
    class Neither(MLAAttentionImpl[Any]):
        """May be defined, as a base of others."""

        def __init__(self) -> None: ...

    class Older(Neither):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    class Newer(Neither):
        def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(TypeError, match="Neither must define forward_mqa"):
        Neither()
    with parallel_context(FOUR):
        assert Older().dcp_rank == Newer().dcp_rank == 2
    assert Newer().supports_pcp is True
    assert Newer().hisparse_cache is None


def test_mla_outputs_are_quantised_by_the_layer_in_four_formats() -> None:
    keys = (kFp8StaticTensorSym, kNvfp4Dynamic, kFp8Dynamic128Sym, kFp8Dynamic64Sym)
    assert len(set(keys)) == 4
    assert all(Latent().fused_output_quant_supported(key) for key in keys)


def test_latents_and_rope_parts_are_written_side_by_side() -> None:
    cache = torch.full((4, 3, 6), torch.nan)
    latent, rope = torch.randn(5, 4), torch.randn(5, 1, 2)
    slots = torch.tensor([[7], [-1], [3], [9]])  # Fewer than rows: the last row is padding.
    Latent().do_kv_cache_update(latent, rope, cache, slots, "auto", torch.ones(()))
    for row, slot in ((0, 7), (2, 3), (3, 9)):
        written = torch.cat([latent[row], rope[row, 0]])
        assert torch.equal(cache.view(-1, 6)[slot], written)
    assert int(cache.isnan().all(-1).sum()) == 9
    for slot in (12, -2):
        with pytest.raises(BatchError, match=f"slot {slot} is outside the cache of 4 blocks of 3"):
            Latent().do_kv_cache_update(
                latent, rope, cache, torch.tensor([1, slot]), "auto", torch.ones(())
            )
    assert int(cache.isnan().all(-1).sum()) == 9


def test_an_empty_latent_cache_takes_nothing() -> None:
    Latent().do_kv_cache_update(
        torch.randn(2, 4),
        torch.randn(2, 1, 2),
        torch.empty(0),
        torch.zeros(2),
        "auto",
        torch.ones(()),
    )


def test_latents_with_codes_are_somebody_elses_to_write() -> None:
    cache = torch.zeros(4, 3, 6)
    with pytest.raises(NotImplementedError, match="fp8_ds_mla"):
        Latent().do_kv_cache_update(
            torch.randn(1, 4),
            torch.randn(1, 1, 2),
            cache,
            torch.tensor([5]),
            "fp8_ds_mla",
            torch.ones(()),
        )
    assert not cache.any()
