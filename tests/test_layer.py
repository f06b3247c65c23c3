"""Attention: what it hands to an impl, what it refuses before anything is written, what it returns."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import pytest
import torch

from attnkit import Attention, PagedKVCache, forward_context, make_batch
from attnkit.backends.reference import ReferenceBackend, ReferenceImpl
from attnkit.contract import (
    AttentionImpl,
    AttentionSpec,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
    VllmConfig,
)
from attnkit.errors import BackendError, BatchError, ConfigurationError, UnsupportedConfiguration
from attnkit.kvcache.write import write_kv

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4


class WritesItself(ReferenceBackend):
    """forward writes K and V: the reference as it is."""


class SplitImpl(ReferenceImpl):
    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_kv(key, value, kv_cache, slot_mapping)

    def forward(self, layer: Any, query: torch.Tensor, key: Any, value: Any, *rest: Any) -> Any:
        return super().forward(layer, query, None, None, *rest)  # type: ignore[arg-type]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class LayerWrites(ReferenceBackend):
    """The layer is asked to write K and V before forward, which reads the cache alone."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return SplitImpl


BOTH = pytest.mark.parametrize("backend", [WritesItself, LayerWrites])


class Recorder(AttentionImpl[Any]):
    """Writes down how it was made and called; the output is the number of calls before."""

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_with = (args, kwargs)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.calls.append(("process_weights_after_loading", (act_dtype,)))

    def do_kv_cache_update(self, *args: Any) -> None:
        self.calls.append(("do_kv_cache_update", args))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> Any:
        output.fill_(len(self.calls))
        self.calls.append(("forward", (layer, query, key, value, kv_cache, attn_metadata, output)))
        if self.need_to_return_lse_for_decode:
            return output, torch.full(query.shape[:2], 3.0)
        return output


class Recording(ReferenceBackend):
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return Recorder


def _layer(backend: Any = WritesItself, **arguments: Any) -> Attention:
    facts = {"num_kv_heads": KV_HEADS, "block_size": BLOCK, "backend": backend}
    facts = {"num_heads": HEADS, "head_size": SIZE, **facts}
    return Attention(**{**facts, **arguments})


def _cache(blocks: int = 9, **changes: Any) -> torch.Tensor:
    facts = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    spec = FullAttentionSpec(**{**facts, "dtype": torch.float32, **changes})
    return PagedKVCache({"a": spec}, blocks, poison=True)["a"]


def _tokens(count: int, seed: int = 0, size_v: int = SIZE) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    shapes = (HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, size_v)
    return tuple(torch.randn(count, *shape, generator=g) for shape in shapes)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one whole sequence, float64, without pages."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    score = (q @ k.mT) * scale
    hidden = torch.ones(score.shape[-2:], dtype=torch.bool).triu(
        score.shape[-1] - score.shape[-2] + 1
    )
    return (score.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)


# What it computes


@BOTH
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
def test_prefill_then_decode_equals_attention_without_pages(
    backend: Any, layout: KVCacheLayout
) -> None:
    layer = _layer(backend)
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    cache = PagedKVCache({layer.layer_name: spec}, 9, layout=layout, poison=True)
    kv_cache = cache[layer.layer_name]
    q, k, v = _tokens(11)
    expected = _dense(q, k, v, SIZE**-0.5)
    table = [7, 2, 5]
    outs = []
    for start, end in ((0, 6), (6, 9), (9, 10), (10, 11)):
        batch = make_batch([end - start], [end], [table], BLOCK)
        rows = slice(start, end)
        outs.append(layer(q[rows], k[rows], v[rows], kv_cache, layer.build(batch)))
    torch.testing.assert_close(torch.cat(outs).double(), expected, rtol=1e-5, atol=1e-6)
    assert kv_cache[[0, 1, 3, 4, 6, 8]].isnan().all()


@BOTH
def test_the_newest_token_is_seen_exactly_once(backend: Any) -> None:
    """With keys of zero every token weighs the same, so the output is the mean of the values seen."""
    layer, kv_cache = _layer(backend), _cache()
    values = torch.arange(1.0, 7.0)[:, None, None].expand(6, KV_HEADS, SIZE).contiguous()
    q, k = torch.randn(6, HEADS, SIZE), torch.zeros(6, KV_HEADS, SIZE)
    for n in range(1, 7):
        plan = layer.build(make_batch([1], [n], [[3, 6]], BLOCK))
        out = layer(q[:1], k[n - 1 : n], values[n - 1 : n], kv_cache, plan)
        torch.testing.assert_close(out, torch.full_like(out, (n + 1) / 2))


def test_both_settings_write_the_same_bytes_and_give_the_same_output() -> None:
    results = []
    for backend in (WritesItself, LayerWrites):
        layer, kv_cache = _layer(backend), _cache()
        q, k, v = _tokens(7)
        batch = make_batch([5, 2], [5, 2], [[3, 8], [1]], BLOCK)
        results.append((layer(q, k, v, kv_cache, layer.build(batch)), kv_cache.nan_to_num(7.0)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@BOTH
def test_flat_tensors_come_back_flat(backend: Any) -> None:
    layer, kv_cache = _layer(backend, head_size_v=4), _cache(head_size_v=4)
    q, k, v = _tokens(5, size_v=4)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    whole = layer(q, k, v, kv_cache, plan)
    assert whole.shape == (5, HEADS, 4)
    flat = layer(q.flatten(1), k.flatten(1), v.flatten(1), kv_cache, plan)
    assert flat.shape == (5, HEADS * 4)
    assert torch.equal(flat, whole.flatten(1))
    assert torch.equal(layer(q, k.flatten(1), v, kv_cache, plan), whole)


def test_an_lse_comes_with_the_output_where_it_was_asked_for() -> None:
    layer, kv_cache = _layer(return_lse=True), _cache()
    q, k, v = _tokens(5)
    out, lse = layer(q, k, v, kv_cache, layer.build(make_batch([5], [5], [[3, 8]], BLOCK)))
    assert lse.shape == (5, HEADS)
    assert lse.dtype == torch.float32
    first = (q[0] * k[0].repeat_interleave(2, 0)).sum(-1) * SIZE**-0.5
    torch.testing.assert_close(lse[0], first)
    assert torch.equal(
        out, _layer()(q, k, v, kv_cache, layer.build(make_batch([5], [5], [[3, 8]], 4)))
    )


def test_an_lse_in_base_2_is_turned_into_a_natural_one() -> None:
    class Base2Impl(ReferenceImpl):
        lse_base_on_e = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output, lse = super().forward(*args, **kwargs)
            return output, lse / math.log(2)

    class Base2(ReferenceBackend):
        @staticmethod
        def get_impl_cls() -> type[ReferenceImpl]:
            return Base2Impl

    q, k, v = _tokens(6)
    natural, binary = (
        layer(q, k, v, _cache(), layer.build(make_batch([6], [6], [[3, 8]], BLOCK)))[1]
        for layer in (_layer(return_lse=True), _layer(Base2, return_lse=True))
    )
    torch.testing.assert_close(natural, binary)


def test_an_lse_shorter_than_the_padded_step_leaves_the_rest_at_no_key() -> None:
    class ShortImpl(Recorder):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output, lse = super().forward(*args, **kwargs)
            return output, lse[:2]

    class Short(Recording):
        @staticmethod
        def get_impl_cls() -> type[Any]:
            return ShortImpl

    layer = _layer(Short, return_lse=True)
    _, lse = layer(*_tokens(3), _cache(), layer.build(make_batch([2], [2], [[3]], BLOCK)))
    assert (lse[:2] == 3.0).all()
    assert (lse[2] == -math.inf).all()


def test_an_lse_that_was_promised_and_does_not_come_is_an_error() -> None:
    class ForgetfulImpl(Recorder):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            super().forward(*args, **kwargs)

    class Forgetful(Recording):
        @staticmethod
        def get_impl_cls() -> type[Any]:
            return ForgetfulImpl

    layer = _layer(Forgetful, return_lse=True)
    with pytest.raises(BackendError, match=r"reference .*returned the output alone"):
        layer(*_tokens(2), _cache(), layer.build(make_batch([2], [2], [[3]], BLOCK)))


# What an impl is given


def test_an_impl_gets_ten_values_by_position_and_further_features_by_name() -> None:
    plain = Attention(6, 16, backend=Recording).impl
    assert isinstance(plain, Recorder)
    assert plain.made_with == ((6, 16, 0.25, 6, None, None, "auto", None, "decoder", None), {})
    sinks = torch.tensor([0.5, 1.0], dtype=torch.bfloat16)
    full = Attention(
        2,
        16,
        0.7,
        1,
        alibi_slopes=torch.tensor([0.5, 0.25]),  # type: ignore[arg-type]
        sliding_window=5,
        kv_cache_dtype="bfloat16",
        logits_soft_cap=30,
        kv_sharing_target_layer_name="other",
        sinks=sinks,
        use_alibi_sqrt=True,
        head_size_v=24,
        backend=Recording,
    ).impl
    assert isinstance(full, Recorder)
    args, kwargs = full.made_with
    assert args == (2, 16, 0.7, 1, [0.5, 0.25], 5, "bfloat16", 30.0, "decoder", "other")
    assert all(type(slope) is float for slope in args[4])
    assert type(args[8]) is str
    assert sorted(kwargs) == ["head_size_v", "sinks", "use_alibi_sqrt"]
    assert kwargs["sinks"].dtype == torch.float32
    assert kwargs["sinks"].tolist() == [0.5, 1.0]
    assert (kwargs["head_size_v"], kwargs["use_alibi_sqrt"]) == (24, True)


def test_a_soft_cap_of_zero_reaches_nobody() -> None:
    impl = _layer(Recording, logits_soft_cap=0.0).impl
    assert isinstance(impl, Recorder)
    assert impl.made_with[0][7] is None


def test_the_write_comes_before_the_read_and_both_see_the_same_cache() -> None:
    layer, kv_cache = _layer(Recording), _cache()
    impl = layer.impl
    assert isinstance(impl, Recorder)
    q, k, v = _tokens(3)
    plan = layer.build(make_batch([2], [2], [[3]], BLOCK))
    out = layer(q, k, v, kv_cache, plan)
    (first, update), (second, forward) = impl.calls
    assert (first, second) == ("do_kv_cache_update", "forward")
    assert update[0] is forward[0] is layer
    assert update[3] is forward[4] is kv_cache
    assert update[4] is plan.slot_mapping
    assert update[1].shape == (3, KV_HEADS, SIZE), "padding rows are the impl's to leave out"
    assert forward[5] is plan
    assert out.data_ptr() == forward[6].data_ptr()


def test_scales_are_loaded_once_for_layer_and_impl() -> None:
    layer = _layer(Recording)
    impl = layer.impl
    assert isinstance(impl, Recorder)
    layer._k_scale.fill_(0.5)
    layer.process_weights_after_loading(torch.bfloat16)
    assert impl.calls == [("process_weights_after_loading", (torch.bfloat16,))]
    assert (layer._q_scale_float, layer._k_scale_float, layer._v_scale_float) == (1.0, 0.5, 1.0)
    layer._v_scale.fill_(math.nan)
    with pytest.raises(ConfigurationError, match="_v_scale"):
        layer.process_weights_after_loading(torch.bfloat16)
    assert len(impl.calls) == 1
    assert not layer.state_dict()


# The older generation


class OldImpl(AttentionImpl[Any]):
    """Fills the buffer it is given, or makes one."""

    def __init__(self, *args: Any) -> None:
        self.buffers: list[torch.Tensor | None] = []

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.buffers.append(output)
        result = query.cumsum(0)
        if output is None:
            return result.flatten(1)
        output.copy_(result)
        return output


class Old(ReferenceBackend):
    accept_output_buffer = False

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return OldImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class OldWithBuffer(Old):
    accept_output_buffer = True


def test_both_styles_of_output_give_the_same() -> None:
    outs = []
    for backend in (Old, OldWithBuffer):
        layer = _layer(backend)
        spec = layer.get_kv_cache_spec()
        assert spec is not None
        cache = PagedKVCache({"a": spec}, 4, backends={"a": backend})
        assert cache["a"].shape == (2, 4, BLOCK, KV_HEADS, SIZE)
        outs.append(layer(*_tokens(3), cache["a"], layer.build(make_batch([3], [3], [[2]], BLOCK))))
        assert isinstance(layer.impl, OldImpl)
        assert [b is None for b in layer.impl.buffers] == [backend is Old]
    assert torch.equal(*outs)
    assert outs[0].shape == (3, HEADS, SIZE)


# Profiling and contexts


@BOTH
def test_without_a_plan_the_output_is_zero_and_nothing_is_written(backend: Any) -> None:
    layer, kv_cache = _layer(backend, return_lse=True), _cache()
    tokens = _tokens(5)
    results = [layer(*tokens)]
    for plans in ({}, {layer.layer_name: None}):
        with forward_context(plans, {layer.layer_name: kv_cache}):
            results.append(layer(*tokens))
    for out, lse in results:
        assert out.shape == (5, HEADS, SIZE)
        assert not out.any()
        assert (lse == -math.inf).all()
    assert kv_cache.isnan().all()


def test_plans_and_caches_may_come_from_a_context() -> None:
    layer = _layer()
    tokens = _tokens(5)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    expected = layer(*tokens, _cache(), plan)
    cache, other = _cache(), _cache()
    with forward_context({layer.layer_name: plan}, {layer.layer_name: cache}):
        assert torch.equal(layer(*tokens), expected)
        cache.fill_(0.0)
        assert torch.equal(layer(*tokens, other), expected)
        assert not cache.any(), "a cache that is passed is stronger"
    with forward_context({}, {layer.layer_name: cache}):
        assert torch.equal(layer(*tokens, None, plan), expected)


def test_contexts_nest_and_end_with_their_errors() -> None:
    layer, cache = _layer(), _cache()
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    with forward_context({layer.layer_name: plan}, {layer.layer_name: cache}):
        with pytest.raises(BatchError), forward_context({"other": plan}, {}):
            layer(*_tokens(5))
        with forward_context({}, {}):
            assert not layer(*_tokens(5)).any()
        assert layer(*_tokens(5)).any()
    assert not layer(*_tokens(5)).any()


def test_a_layer_that_a_context_forgets_is_named() -> None:
    layer = _layer(layer_name="model.layers.7.attn")
    with (
        forward_context({"model.layers.7.atn": object()}, {}),
        pytest.raises(
            BatchError, match=r"no plan for layer model\.layers\.7\.attn, only for .*atn"
        ),
    ):
        layer(*_tokens(2))


# Refusals


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ({"q": torch.zeros(5, HEADS, SIZE + 1)}, r"query .*\(5, 4, 9\); give \(num_tokens, 4, 8\)"),
        ({"q": torch.zeros(5, HEADS + 1, SIZE)}, r"query .*\(5, 5, 8\)"),
        ({"q": torch.zeros(1, 5, HEADS, SIZE)}, r"query .*\(1, 5, 4, 8\)"),
        ({"q": torch.zeros(5, HEADS * SIZE + 1)}, r"query .*\(5, 33\); .*or \(num_tokens, 32\)"),
        ({"q": torch.zeros(HEADS * SIZE)}, r"query .*\(32,\)"),
        ({"k": torch.zeros(5, HEADS, SIZE)}, r"key .*\(5, 4, 8\); give \(num_tokens, 2, 8\)"),
        ({"k": torch.zeros(5, 1, SIZE)}, r"key .*\(5, 1, 8\)"),
        ({"v": torch.zeros(5, KV_HEADS, SIZE - 1)}, r"value .*\(5, 2, 7\)"),
        ({"q": torch.zeros(5, HEADS, SIZE).half()}, "query .* is torch.float16 on cpu, .*float32"),
        ({"k": torch.zeros(5, KV_HEADS, SIZE).double()}, "key .* is torch.float64"),
        ({"v": torch.zeros(5, KV_HEADS, SIZE, device="meta")}, "value .* on meta, .* on cpu"),
        ({"q": torch.zeros(4, HEADS, SIZE)}, "4 query rows for a plan of 5 tokens"),
        ({"k": torch.zeros(4, KV_HEADS, SIZE)}, "4 keys and 5 values"),
        ({"k": None}, "got no key"),
        ({"v": None}, "got no value"),
        ({"k": None, "v": None}, "got no key"),
        ({"kv_cache": None}, r"plan but no cache; pass cache\['a'\]"),
        ({"kv_cache": _cache(num_kv_heads=1)}, r"cache of shape \(9, 1, 4, 16\).*\(2, 4, 16\)"),
        ({"kv_cache": _cache(block_size=8)}, r"cache of shape \(9, 2, 8, 16\)"),
        ({"kv_cache": _cache(head_size_v=4)}, r"cache of shape \(9, 2, 4, 12\)"),
        ({"kv_cache": _cache(dtype=torch.bfloat16)}, "and torch.bfloat16; its blocks .*float32"),
        ({"kv_cache": torch.empty(0)}, r"cache of shape \(0,\)"),
        ({"kv_cache": _cache().to("meta")}, "cache on meta, and was built for cpu"),
        (
            {"kv_cache": _cache().mT.contiguous().mT},
            "last dimension has stride 4; give one where it is 1",
        ),
        ({"k": torch.zeros(4, KV_HEADS, SIZE), "v": torch.zeros(4, KV_HEADS, SIZE)}, "4 keys for"),
    ],
)
@BOTH
def test_what_does_not_fit_is_refused_before_anything_is_written(
    backend: Any, tokens: dict[str, Any], named: str
) -> None:
    layer, kv_cache = _layer(backend, layer_name="a"), _cache()
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    q, k, v = _tokens(5)
    step = {"q": q, "k": k, "v": v, "kv_cache": kv_cache, **tokens}
    with pytest.raises(BatchError, match=named):
        layer(step["q"], step["k"], step["v"], step["kv_cache"], plan)
    assert kv_cache.isnan().all()
    if tokens.get("kv_cache") is not None and not tokens["kv_cache"].is_meta:
        assert tokens["kv_cache"].isnan().all()


@BOTH
def test_keys_must_reach_as_far_as_the_slots(backend: Any) -> None:
    layer, kv_cache = _layer(backend, layer_name="a"), _cache()
    batch = make_batch([5], [5], [[3, 8]], BLOCK)
    padded = batch.replace(slot_mapping=torch.cat([batch.slot_mapping, torch.tensor([-1, -1])]))
    with pytest.raises(BatchError, match="5 keys for a plan that writes 7"):
        layer(*_tokens(5), kv_cache, layer.build(padded))
    assert kv_cache.isnan().all()
    assert layer(*_tokens(7), kv_cache, layer.build(padded)).shape == (7, HEADS, SIZE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"slot_mapping": torch.zeros(5, dtype=torch.int64)},
            "5 entries of .* in slot_mapping; give 6",
        ),
        ({"seq_lens": torch.ones(1, dtype=torch.int32)}, "1 entries .* in seq_lens; give 2"),
        (
            {"block_table_tensor": torch.ones(1, 2, dtype=torch.int32)},
            "in block_table_tensor; give 2",
        ),
        ({"query_start_loc": torch.tensor([0, 6], dtype=torch.int32)}, "query_start_loc; give 3"),
        ({"seq_lens": torch.tensor([5, 1])}, "torch.int64 in seq_lens; give 2 of torch.int32"),
        (
            {"slot_mapping": torch.zeros(6, dtype=torch.int32)},
            "slot_mapping; give 6 of torch.int64",
        ),
        ({"block_table_tensor": torch.ones(2, 2)}, "torch.float32 in block_table_tensor"),
        (
            {"query_start_loc_cpu": ints(0, 7, 6)},
            r"\[0, 7, 6\]; give offsets from 0 that do not fall",
        ),
        ({"query_start_loc_cpu": ints(1, 5, 6)}, r"\[1, 5, 6\]; give offsets from 0"),
        ({"num_actual_tokens": 5}, "num_actual_tokens of the batch is 5, .* 6 at least"),
        ({"max_query_len": 4}, "max_query_len of the batch is 4, .* 5 at least"),
        ({"max_seq_len": 4}, "request 0 of the batch has 5 tokens, beside a max_seq_len of 4"),
        ({"seq_lens": ints(5, -1)}, "request 1 of the batch has -1 tokens"),
        (
            {"seq_lens": ints(5, 9), "max_seq_len": 9},
            "request 1 of the batch has 9 tokens, .* 2 blocks of 4",
        ),
    ],
)
def test_batches_that_contradict_themselves_are_not_planned(
    changes: dict[str, Any], named: str
) -> None:
    """BR-050 and BR-116, where a batch was not made by `make_batch`."""
    batch = make_batch([5, 1], [5, 1], [[3, 8], [1]], BLOCK).replace(**changes)
    with pytest.raises(BatchError, match=named):
        _layer().build(batch)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_cache_and_plan_are_named_where_something_else_is_passed(backend: str) -> None:
    layer = _layer(backend, layer_name="a")
    pages = PagedKVCache({"a": layer.get_kv_cache_spec()}, 9)  # type: ignore[dict-item]
    batch, tokens = make_batch([5], [5], [[3, 8]], BLOCK), _tokens(5)
    plan = layer.build(batch)
    for step, named in [
        ((pages["a"],), r"a cache and no plan; pass layer.build\(batch\)"),
        ((pages, plan), r"got PagedKVCache as its cache; pass its tensor, cache\['a'\]"),
        ((plan, pages["a"]), "got a tensor as its plan; the cache comes first"),
        (
            (pages["a"], layer.build(make_batch([5], [5], [[3, 99]], BLOCK))),
            "outside",
        ),
        *([] if backend == "reference" else [((pages["a"], batch), "a batch as its plan")]),
    ]:
        with pytest.raises(BatchError, match=named):
            layer(*tokens, *step)
    for wrong in (None, plan if backend == "cpu" else pages):
        with pytest.raises(BatchError, match=r"build got .*; give a CommonAttentionMetadata"):
            layer.build(wrong)  # type: ignore[arg-type]


def _wide(count: int) -> tuple[torch.Tensor, ...]:
    """Tokens with heads that flex takes too."""
    return tuple(torch.cat([x, x], dim=-1) for x in _tokens(count))


@pytest.mark.parametrize("attn_type", ["decoder", "encoder_only", "encoder_decoder"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "flex"])
def test_what_is_no_plan_is_named_and_nothing_is_written(backend: str, attn_type: str) -> None:
    layer = _layer(backend, head_size=2 * SIZE, attn_type=attn_type)
    cache = torch.zeros(9, KV_HEADS, BLOCK, 4 * SIZE)
    batch = make_batch([5], [5], [[3, 8]], BLOCK)
    other = _layer("reference" if backend == "cpu" else "cpu").build(batch)
    for plan in (3, {}, "plan", layer, other, *([] if backend == "reference" else [batch])):
        is_batch = isinstance(plan, CommonAttentionMetadata)
        given = "a batch" if is_batch else type(plan).__name__
        named = (
            f"got {given} as its plan, and plans of backend {backend} are .*; pass what layer.build"
        )
        with pytest.raises(BatchError, match=named):
            layer(*_wide(5), cache, plan)
        plans: Any = {layer.layer_name: plan}
        with (
            pytest.raises(BatchError, match=named),
            forward_context(plans, {layer.layer_name: cache}),
        ):
            layer(*_wide(5))
    assert not cache.any()
    plan = layer.build(batch)
    with pytest.raises(BatchError, match="got dict as its cache"):
        layer(*_wide(5), {}, plan)
    with pytest.raises(BatchError, match="got int as `quantized`"):
        layer(*_wide(5), cache, plan, quantized=3)
    for given in ((plan, {}), ({}, cache)):
        with (
            pytest.raises(BatchError, match="give a mapping from layer names"),
            forward_context(*given),
        ):
            pass


class Careless(ReferenceImpl):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return [][0]


class CarelessBackend(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return Careless


def test_only_block_ids_past_the_cache_are_called_that() -> None:
    cache = torch.zeros(9, KV_HEADS, BLOCK, 4 * SIZE)
    layer = _layer(CarelessBackend, head_size=2 * SIZE)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    with pytest.raises(IndexError, match="list index"):
        layer(*_wide(5), cache, plan)
    for backend in ("reference", "cpu", "flex", "triton"):
        layer = _layer(backend, head_size=2 * SIZE)
        for tables, context, named in (
            ([[3, 9]], 0, "slot"),  # Of the last new token.
            ([[9, 8]], 4, "block"),
        ):
            plan = layer.build(make_batch([5 - context], [5], tables, BLOCK))
            with pytest.raises(BatchError, match=f"{named}.* (outside|0 to 8)"):
                layer(*_wide(5 - context), cache, plan)


def test_rows_past_the_plan_are_zero() -> None:
    layer = _layer("cpu", return_lse=True)
    cache = PagedKVCache({"a": layer.get_kv_cache_spec()}, 9)["a"]  # type: ignore[dict-item]
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    torch.empty(8, HEADS, SIZE).fill_(math.nan)  # What the allocator is likely to hand out next.
    out, lse = layer(*_tokens(8), cache, plan)
    assert out[:5].all()
    assert not out[5:].any()
    assert (lse[5:] == -math.inf).all()


def test_a_freed_page_is_refused_where_a_query_looks() -> None:
    """Positions 4 to 7 are in the null block; the first query stands at 12."""
    batch = make_batch([2], [14], [[3, 0, 5, 6]], BLOCK)
    assert batch.freed_cpu is not None
    assert batch.freed_cpu.tolist() == [[4, 8]]
    with pytest.raises(BatchError, match="null block for positions 4 to 7, and layer a looks"):
        _layer("cpu", layer_name="a").build(batch)
    for window, chunk, is_seen in [
        (5, None, False),
        (6, None, True),
        (None, 4, False),
        (None, 8, False),
    ]:
        layer = _layer("reference", sliding_window=window, attention_chunk_size=chunk)
        if is_seen:
            with pytest.raises(BatchError, match="null block"):
                layer.build(batch)
        else:
            layer.build(batch)
    ranged = batch.replace(mm_req_doc_ranges={0: [(7, 12)]})
    layer = _layer("reference", sliding_window=5, use_mm_prefix=True)
    with pytest.raises(BatchError, match="null block"):
        layer.build(ranged)
    layer = _layer("reference", sliding_window=5, use_rswa=True)
    layer.build(make_batch([2], [14], [[3, 0, 5, 6]], BLOCK, rswa_prefix_lens=[4]))
    with pytest.raises(BatchError, match="null block"):
        layer.build(make_batch([2], [14], [[3, 0, 5, 6]], BLOCK, rswa_prefix_lens=[5]))
    assert make_batch([2], [14], [[3, 9, 5, 6]], BLOCK).freed_cpu is None


def test_a_batch_with_a_mask_that_the_layer_was_not_built_for_is_not_planned() -> None:
    batch = make_batch([5], [5], [[3, 8]], BLOCK, mm_req_doc_ranges={0: [(1, 3)]})
    with pytest.raises(BatchError, match="use_mm_prefix=True"):
        _layer().build(batch)
    _layer("reference", use_mm_prefix=True).build(batch)
    plain = make_batch([5], [5], [[3, 8]], BLOCK)
    batch = make_batch([5], [5], [[3, 8]], BLOCK, rswa_prefix_lens=[2])
    with pytest.raises(BatchError, match=r"has rswa_prefix_lens, and .* built without use_rswa"):
        _layer("reference", sliding_window=3).build(batch)
    layer = _layer("reference", sliding_window=3, use_rswa=True)
    with pytest.raises(BatchError, match=r"no rswa_prefix_lens, and .* built with use_rswa"):
        layer.build(plain)
    layer.build(batch)
    _layer("reference").build(batch)  # Without a window there is nothing to except it from.
    batch = make_batch([5], [5], [[3, 8]], BLOCK, tree_parents={0: [-1, 0, 0, 1, -1]})
    with pytest.raises(BatchError, match="use_tree_mask=True"):
        _layer("reference").build(batch)
    _layer("reference", use_tree_mask=True).build(batch)
    for causal in (False, torch.tensor([True])):
        batch = make_batch([5], [5], [[3, 8]], BLOCK, causal=causal)
        with pytest.raises(BatchError, match=r"causal=.* use_non_causal=True"):
            _layer("reference").build(batch)
        _layer("reference", use_non_causal=True).build(batch)
        _layer("reference", attn_type="encoder_only").build(batch)  # Never causal anyway.


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([1, 3, 5, 0, 17], "row 0: token 3 has no word, and others of its request have one"),
        ([1, 1, 5, 9, 17], "row 0: token 1 does not see itself"),
        ([1, 3, 13, 9, 17], "row 0: token 2 sees a later token"),
        ([1, 3, 5, 9], r"torch.int64 of shape \(4,\); give torch.int64 of shape \(5,\)"),
        ([1.0, 3, 5, 9, 17], "torch.float32 of shape"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_words_that_are_no_tree_are_not_planned(
    backend: str, words: list[float], named: str
) -> None:
    layer = _layer(backend, use_tree_mask=True)
    batch = make_batch([5], [5], [[3, 8]], BLOCK).replace(tree_mask=torch.tensor(words))
    with pytest.raises(BatchError, match=named):
        layer.build(batch)


def test_a_tree_of_more_than_64_tokens_is_not_planned() -> None:
    batch = make_batch([65], [65], [list(range(1, 66))], BLOCK)
    layer = _layer("reference", use_tree_mask=True)
    with pytest.raises(BatchError, match="row 0: it has 65 tokens; give at most 64"):
        layer.build(batch.replace(tree_mask=torch.ones(65, dtype=torch.int64)))
    layer.build(batch.replace(tree_mask=torch.zeros(65, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("prefix_lens", "named"),
    [
        (torch.tensor([6], dtype=torch.int32), "row 0 is 6, and the request has 5 tokens"),
        (torch.tensor([-1], dtype=torch.int32), "row 0 is -1"),
        (
            torch.tensor([2, 2], dtype=torch.int32),
            r"of shape \(2,\); give torch.int32 of shape \(1,\)",
        ),
        (torch.tensor([2]), "torch.int64 of shape"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_prefix_that_is_no_part_of_its_request_is_not_planned(
    backend: str, prefix_lens: torch.Tensor, named: str
) -> None:
    layer = _layer(backend, sliding_window=3, use_rswa=True)
    batch = make_batch([5], [5], [[3, 8]], BLOCK).replace(rswa_prefix_lens=prefix_lens)
    with pytest.raises(BatchError, match=named):
        layer.build(batch)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_kv_heads": 3}, "4 query heads do not divide over 3 KV heads"),
        ({"num_kv_heads": 0}, "num_kv_heads 0 is not allowed"),
        ({"num_heads": 4.0}, "num_heads 4.0 is not allowed"),
        ({"head_size": "8"}, "head_size '8' is not allowed"),
        ({"sliding_window": (128, 0)}, r"sliding_window \(128, 0\) is not allowed"),
        ({"dtype": "float32"}, "dtype 'float32' .* give a torch.dtype"),
        ({"kv_cache_dtype": ["fp8"]}, r"\['fp8'\] is not known"),
        ({"alibi_slopes": ["a"] * 4}, "alibi_slopes .* give 4 numbers"),
        ({"return_lse": "no"}, "return_lse 'no' is not allowed; give True or False"),
        ({"num_kv_heads": 8}, "over 8 KV heads"),
        ({"head_size_v": 0}, "head_size_v 0"),
        ({"block_size": 0}, "block_size 0"),
        ({"scale": math.nan}, "scale nan"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"logits_soft_cap": -2.0}, "logits_soft_cap -2"),
        ({"alibi_slopes": [1.0]}, r"alibi_slopes has shape \(1,\), but the layer has 4 heads"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
        ({"use_alibi_sqrt": True}, "needs alibi_slopes"),
        ({"attn_type": "sideways"}, "'sideways' is not known"),
        ({"kv_cache_dtype": "fp9"}, "'fp9' is not known"),
        ({"device": "gpu"}, "'gpu' is not known"),
        ({"layer_name": "a", "kv_sharing_target_layer_name": "a"}, "layer a .*cannot share"),
        (
            {"attn_type": "encoder_only", "kv_sharing_target_layer_name": "a"},
            r"\(encoder_only\) cannot share the cache of a",
        ),
        (
            {"attn_type": "encoder_only", "use_mm_prefix": True},
            "use_mm_prefix is for decoder layers",
        ),
        (
            {"attn_type": "encoder_only", "use_rswa": True, "sliding_window": 4},
            "use_rswa is for decoder layers",
        ),
        ({"use_rswa": True}, "use_rswa is about a window beside a prefix"),
        ({"use_tree_mask": True, "sliding_window": 4}, "use_tree_mask and sliding_window exclude"),
        (
            {"use_tree_mask": True, "sliding_window": 4, "use_rswa": True},
            "use_tree_mask and sliding_window exclude",
        ),
        ({"use_tree_mask": True, "alibi_slopes": [1.0] * 4}, "and alibi_slopes exclude each other"),
        (
            {"use_tree_mask": True, "attention_chunk_size": 16},
            "chunk_size and use_tree_mask exclude",
        ),
        ({"use_tree_mask": True, "use_mm_prefix": True}, "use_tree_mask and use_mm_prefix exclude"),
        (
            {"use_tree_mask": True, "attn_type": "encoder_only"},
            "use_tree_mask and attn_type encoder_only exclude each other",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference", "cpu", Recording])
def test_layers_that_mean_nothing_are_refused_whatever_the_backend(
    backend: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        _layer(backend, **arguments)


@pytest.mark.parametrize(("num_heads", "head_size"), [(0, 8), (-1, 8), (4, 0)])
def test_layers_without_size_are_refused(num_heads: int, head_size: int) -> None:
    with pytest.raises(ConfigurationError):
        Attention(num_heads, head_size)


def test_what_the_backend_lacks_is_refused_with_its_reasons() -> None:
    with pytest.raises(UnsupportedConfiguration) as refusal:
        _layer("reference", dtype=torch.float64, kv_cache_dtype="fp8_ds_mla")
    assert any("float64" in reason for reason in refusal.value.reasons)


# Sharing, specs, builders


@BOTH
def test_a_layer_reads_the_cache_of_another_and_writes_nothing(backend: Any) -> None:
    owner = _layer(backend, layer_name="owner")
    reader = _layer(backend, layer_name="reader", kv_sharing_target_layer_name="owner")
    assert owner.get_kv_cache_spec() is not None
    assert reader.get_kv_cache_spec() is None
    assert reader.cache_name == "owner"
    cache, (q, k, v) = _cache(), _tokens(5)
    batch = make_batch([5], [5], [[3, 8]], BLOCK)
    plans = {"owner": owner.build(batch), "reader": reader.build(batch)}
    with forward_context(plans, {"owner": cache}):
        first = owner(q, k, v)
        written = cache.clone()
        other = [x + 5.0 for x in (k, v)]
        assert torch.equal(reader(q, None, None), first)
        assert torch.equal(reader(q, *other), first)
    assert torch.equal(cache.nan_to_num(), written.nan_to_num())


def test_the_spec_follows_the_layer() -> None:
    spec = _layer(head_size_v=12, kv_cache_dtype="bfloat16").get_kv_cache_spec()
    assert spec == FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        head_size_v=12,
        dtype=torch.bfloat16,
    )
    window = _layer(sliding_window=5).get_kv_cache_spec(64)
    assert isinstance(window, SlidingWindowSpec)
    assert (window.sliding_window, window.block_size, window.dtype) == (5, 64, torch.float32)
    assert _layer(attn_type="encoder_only").get_kv_cache_spec() is None
    coded = _layer(kv_cache_dtype="fp8").get_kv_cache_spec()
    assert coded is not None
    assert coded.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR
    with pytest.raises(ConfigurationError, match="make a CrossAttentionSpec yourself"):
        _layer(attn_type="encoder_decoder").get_kv_cache_spec()


class Keeping(CommonMetadataBuilder):
    made: ClassVar[list[Keeping]] = []

    def __init__(self, spec: KVCacheSpec, names: list[str], config: Any, device: Any) -> None:
        super().__init__(spec, names, config, device)
        Keeping.made.append(self)


class Customising(ReferenceBackend):
    @staticmethod
    def get_builder_cls() -> type[CommonMetadataBuilder]:
        return Keeping

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return FullAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_head_slots=2 * spec.num_kv_heads,
            state_content_bytes=SIZE * 4,
        )


def test_a_builder_is_made_once_and_knows_the_layers_page() -> None:
    Keeping.made.clear()
    config = VllmConfig()
    owner = _layer(Customising, layer_name="a", vllm_config=config)
    batch = make_batch([1], [1], [[3]], BLOCK)
    assert owner.build(batch) is owner.build(batch) is batch
    (builder,) = Keeping.made
    assert builder.kv_cache_spec == owner.get_kv_cache_spec()
    assert builder.layer_names == ["a"]
    assert builder.vllm_config is config
    assert builder.device == torch.device("cpu")
    reader = _layer(Customising, kv_sharing_target_layer_name="a", sliding_window=None)
    assert reader.make_builder(("x", "y")).layer_names == ["x", "y"]
    assert Keeping.made[-1].kv_cache_spec == owner.get_kv_cache_spec()


def test_the_cache_is_checked_against_the_page_the_backend_wants() -> None:
    layer = _layer(Customising, layer_name="a")
    plan = layer.build(make_batch([1], [1], [[3]], BLOCK))
    with pytest.raises(BatchError, match=r"its blocks are \(4, 4, 8\) of torch.float32"):
        layer(*_tokens(1), _cache(), plan)


# Other types of attention


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "flex"])
def test_encoders_want_a_key_for_every_token_they_attend_to(backend: str, attn_type: str) -> None:
    layer = _layer(backend, layer_name="a", attn_type=attn_type, head_size=16)
    plan = layer.build(make_batch([5], [5], [[1, 2]], BLOCK))
    q, k = torch.zeros(5, HEADS, 16), torch.zeros(3, KV_HEADS, 16)
    with pytest.raises(BatchError, match="layer a got 3 keys for a plan of 5 tokens"):
        layer(q, k, k, None, plan)


def test_encoders_need_neither_cache_nor_pages() -> None:
    layer = _layer(attn_type="encoder_only")
    q, k, v = _tokens(5)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    out = layer(q, k, v, None, plan)
    whole = _dense(q[-1:], k, v, SIZE**-0.5)
    torch.testing.assert_close(out[-1:].double(), whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(BatchError, match="no key"):
        layer(q, None, None, None, plan)


@BOTH
def test_cross_attention_keeps_the_encoders_output_between_steps(backend: Any) -> None:
    layer, cache = _layer(backend, attn_type="encoder_decoder"), _cache()
    q, k, v = _tokens(6)
    table = torch.tensor([[7, 2]], dtype=torch.int32)
    slots = torch.tensor([28, 29, 30, 31, 8, 9])

    def step(written: torch.Tensor) -> CommonAttentionMetadata:
        return make_batch([1], [1], [[5]], BLOCK).replace(
            encoder_seq_lens=torch.tensor([6], dtype=torch.int32),
            block_table_tensor=table,
            slot_mapping=written,
        )

    first = layer(q[:1], k, v, cache, layer.build(step(slots)))
    torch.testing.assert_close(
        first.double(), _dense(q[:1], k, v, SIZE**-0.5), rtol=1e-5, atol=1e-6
    )
    later = layer(q[:1], None, None, cache, layer.build(step(torch.tensor([-1]))))
    assert torch.equal(later, first)


# As a module


def test_no_gradient_reaches_a_cache() -> None:
    layer, cache = _layer(LayerWrites), _cache()
    tokens = [x.requires_grad_() for x in _tokens(5)]
    out = layer(*tokens, cache, layer.build(make_batch([5], [5], [[3, 8]], BLOCK)))
    assert not out.requires_grad
    assert not cache.requires_grad


def test_a_copy_runs_itself() -> None:
    layer = _layer(Recording, layer_name="a")
    twin = copy.deepcopy(layer)
    assert isinstance(layer.impl, Recorder)
    assert isinstance(twin.impl, Recorder)
    plan = layer.build(make_batch([2], [2], [[3]], BLOCK))
    out = torch.zeros(2, HEADS, SIZE)
    with forward_context({"a": plan}, {"a": _cache()}):
        torch.ops.attnkit.attention(*_tokens(2), out, None, twin._order, twin._handle)
    assert len(twin.impl.calls) == 2
    assert layer.impl.calls == []


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_copy_gives_what_the_layer_gives(backend: str) -> None:
    layer = _layer(backend)
    batch = make_batch([5], [5], [[3, 8]], BLOCK)
    tokens = _tokens(5)
    expected = layer(*tokens, _cache(), layer.build(batch))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(*tokens, _cache(), twin.build(batch)), expected)


def test_names_are_made_up_where_none_is_given() -> None:
    assert _layer().layer_name != _layer().layer_name
    assert _layer(layer_name="a").layer_name == "a"
    assert "num_heads=4" in repr(_layer())
    assert "chosen" in str(_layer("reference").selection)


def test_scales_follow_the_protocol() -> None:
    layer = _layer()
    for name in ("_q_scale", "_k_scale", "_v_scale"):
        assert getattr(layer, name).tolist() == getattr(layer, f"{name}_float") == 1.0
    assert layer._prob_scale.tolist() == 1.0
    assert not list(layer.parameters())


def test_a_batch_of_blocks_of_another_size_is_refused() -> None:
    """Its slots would be other pages than the layer's, the null block among them."""
    layer = Attention(4, 32, num_kv_heads=2, block_size=16)
    with pytest.raises(BatchError, match="blocks of 4 tokens, the layer has blocks of 16"):
        layer.build(make_batch([5], [5], [[1, 2]], 4))
