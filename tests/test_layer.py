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
from attnkit.errors import BackendError, BatchError, ConfigurationError
from small_layers import (
    BLOCK,
    BOTH,
    HEADS,
    KV_HEADS,
    SIZE,
    LayerWrites,
    Recorder,
    Recording,
    WritesItself,
    make_cache,
    make_layer,
    make_tokens,
)


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
    layer = make_layer(backend)
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    cache = PagedKVCache({layer.layer_name: spec}, 9, layout=layout, poison=True)
    kv_cache = cache[layer.layer_name]
    q, k, v = make_tokens(11)
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
    layer, kv_cache = make_layer(backend), make_cache()
    values = torch.arange(1.0, 7.0)[:, None, None].expand(6, KV_HEADS, SIZE).contiguous()
    q, k = torch.randn(6, HEADS, SIZE), torch.zeros(6, KV_HEADS, SIZE)
    for n in range(1, 7):
        plan = layer.build(make_batch([1], [n], [[3, 6]], BLOCK))
        out = layer(q[:1], k[n - 1 : n], values[n - 1 : n], kv_cache, plan)
        torch.testing.assert_close(out, torch.full_like(out, (n + 1) / 2))


def test_both_settings_write_the_same_bytes_and_give_the_same_output() -> None:
    results = []
    for backend in (WritesItself, LayerWrites):
        layer, kv_cache = make_layer(backend), make_cache()
        q, k, v = make_tokens(7)
        batch = make_batch([5, 2], [5, 2], [[3, 8], [1]], BLOCK)
        results.append((layer(q, k, v, kv_cache, layer.build(batch)), kv_cache.nan_to_num(7.0)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@BOTH
def test_flat_tensors_come_back_flat(backend: Any) -> None:
    layer, kv_cache = make_layer(backend, head_size_v=4), make_cache(head_size_v=4)
    q, k, v = make_tokens(5, size_v=4)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    whole = layer(q, k, v, kv_cache, plan)
    assert whole.shape == (5, HEADS, 4)
    flat = layer(q.flatten(1), k.flatten(1), v.flatten(1), kv_cache, plan)
    assert flat.shape == (5, HEADS * 4)
    assert torch.equal(flat, whole.flatten(1))
    assert torch.equal(layer(q, k.flatten(1), v, kv_cache, plan), whole)


def test_an_lse_comes_with_the_output_where_it_was_asked_for() -> None:
    layer, kv_cache = make_layer(return_lse=True), make_cache()
    q, k, v = make_tokens(5)
    out, lse = layer(q, k, v, kv_cache, layer.build(make_batch([5], [5], [[3, 8]], BLOCK)))
    assert lse.shape == (5, HEADS)
    assert lse.dtype == torch.float32
    first = (q[0] * k[0].repeat_interleave(2, 0)).sum(-1) * SIZE**-0.5
    torch.testing.assert_close(lse[0], first)
    assert torch.equal(
        out, make_layer()(q, k, v, kv_cache, layer.build(make_batch([5], [5], [[3, 8]], 4)))
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

    q, k, v = make_tokens(6)
    natural, binary = (
        layer(q, k, v, make_cache(), layer.build(make_batch([6], [6], [[3, 8]], BLOCK)))[1]
        for layer in (make_layer(return_lse=True), make_layer(Base2, return_lse=True))
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

    layer = make_layer(Short, return_lse=True)
    _, lse = layer(*make_tokens(3), make_cache(), layer.build(make_batch([2], [2], [[3]], BLOCK)))
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

    layer = make_layer(Forgetful, return_lse=True)
    with pytest.raises(BackendError, match=r"reference .*returned the output alone"):
        layer(*make_tokens(2), make_cache(), layer.build(make_batch([2], [2], [[3]], BLOCK)))


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
    impl = make_layer(Recording, logits_soft_cap=0.0).impl
    assert isinstance(impl, Recorder)
    assert impl.made_with[0][7] is None


def test_the_write_comes_before_the_read_and_both_see_the_same_cache() -> None:
    layer, kv_cache = make_layer(Recording), make_cache()
    impl = layer.impl
    assert isinstance(impl, Recorder)
    q, k, v = make_tokens(3)
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
    layer = make_layer(Recording)
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
        layer = make_layer(backend)
        spec = layer.get_kv_cache_spec()
        assert spec is not None
        cache = PagedKVCache({"a": spec}, 4, backends={"a": backend})
        assert cache["a"].shape == (2, 4, BLOCK, KV_HEADS, SIZE)
        outs.append(
            layer(*make_tokens(3), cache["a"], layer.build(make_batch([3], [3], [[2]], BLOCK)))
        )
        assert isinstance(layer.impl, OldImpl)
        assert [b is None for b in layer.impl.buffers] == [backend is Old]
    assert torch.equal(*outs)
    assert outs[0].shape == (3, HEADS, SIZE)


# Profiling and contexts


@BOTH
def test_without_a_plan_the_output_is_zero_and_nothing_is_written(backend: Any) -> None:
    layer, kv_cache = make_layer(backend, return_lse=True), make_cache()
    tokens = make_tokens(5)
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
    layer = make_layer()
    tokens = make_tokens(5)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    expected = layer(*tokens, make_cache(), plan)
    cache, other = make_cache(), make_cache()
    with forward_context({layer.layer_name: plan}, {layer.layer_name: cache}):
        assert torch.equal(layer(*tokens), expected)
        cache.fill_(0.0)
        assert torch.equal(layer(*tokens, other), expected)
        assert not cache.any(), "a cache that is passed is stronger"
    with forward_context({}, {layer.layer_name: cache}):
        assert torch.equal(layer(*tokens, None, plan), expected)


def test_contexts_nest_and_end_with_their_errors() -> None:
    layer, cache = make_layer(), make_cache()
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    with forward_context({layer.layer_name: plan}, {layer.layer_name: cache}):
        with pytest.raises(BatchError), forward_context({"other": plan}, {}):
            layer(*make_tokens(5))
        with forward_context({}, {}):
            assert not layer(*make_tokens(5)).any()
        assert layer(*make_tokens(5)).any()
    assert not layer(*make_tokens(5)).any()


def test_a_layer_that_a_context_forgets_is_named() -> None:
    layer = make_layer(layer_name="model.layers.7.attn")
    with (
        forward_context({"model.layers.7.atn": object()}, {}),
        pytest.raises(
            BatchError, match=r"no plan for layer model\.layers\.7\.attn, only for .*atn"
        ),
    ):
        layer(*make_tokens(2))


# Sharing, specs, builders


@BOTH
def test_a_layer_reads_the_cache_of_another_and_writes_nothing(backend: Any) -> None:
    owner = make_layer(backend, layer_name="owner")
    reader = make_layer(backend, layer_name="reader", kv_sharing_target_layer_name="owner")
    assert owner.get_kv_cache_spec() is not None
    assert reader.get_kv_cache_spec() is None
    assert reader.cache_name == "owner"
    cache, (q, k, v) = make_cache(), make_tokens(5)
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
    spec = make_layer(head_size_v=12, kv_cache_dtype="bfloat16").get_kv_cache_spec()
    assert spec == FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        head_size_v=12,
        dtype=torch.bfloat16,
    )
    window = make_layer(sliding_window=5).get_kv_cache_spec(64)
    assert isinstance(window, SlidingWindowSpec)
    assert (window.sliding_window, window.block_size, window.dtype) == (5, 64, torch.float32)
    assert make_layer(attn_type="encoder_only").get_kv_cache_spec() is None
    coded = make_layer(kv_cache_dtype="fp8").get_kv_cache_spec()
    assert coded is not None
    assert coded.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR
    with pytest.raises(ConfigurationError, match="make a CrossAttentionSpec yourself"):
        make_layer(attn_type="encoder_decoder").get_kv_cache_spec()


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
    owner = make_layer(Customising, layer_name="a", vllm_config=config)
    batch = make_batch([1], [1], [[3]], BLOCK)
    assert owner.build(batch) is owner.build(batch) is batch
    (builder,) = Keeping.made
    assert builder.kv_cache_spec == owner.get_kv_cache_spec()
    assert builder.layer_names == ["a"]
    assert builder.vllm_config is config
    assert builder.device == torch.device("cpu")
    reader = make_layer(Customising, kv_sharing_target_layer_name="a", sliding_window=None)
    assert reader.make_builder(("x", "y")).layer_names == ["x", "y"]
    assert Keeping.made[-1].kv_cache_spec == owner.get_kv_cache_spec()


def test_without_a_configuration_the_builder_reads_the_layers_own_facts() -> None:
    Keeping.made.clear()
    make_layer(Customising, layer_name="a", dtype=torch.float16, block_size=8).make_builder()
    (builder,) = Keeping.made
    assert builder.vllm_config.model_config.dtype is torch.float16
    assert builder.vllm_config.cache_config.block_size == 8


def test_the_cache_is_checked_against_the_page_the_backend_wants() -> None:
    layer = make_layer(Customising, layer_name="a")
    plan = layer.build(make_batch([1], [1], [[3]], BLOCK))
    with pytest.raises(BatchError, match=r"its blocks are \(4, 4, 8\) of torch.float32"):
        layer(*make_tokens(1), make_cache(), plan)


# Other types of attention


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "flex"])
def test_encoders_want_a_key_for_every_token_they_attend_to(backend: str, attn_type: str) -> None:
    layer = make_layer(backend, layer_name="a", attn_type=attn_type, head_size=16)
    plan = layer.build(make_batch([5], [5], [[1, 2]], BLOCK))
    q, k = torch.zeros(5, HEADS, 16), torch.zeros(3, KV_HEADS, 16)
    with pytest.raises(BatchError, match="layer a got 3 keys for a plan of 5 tokens"):
        layer(q, k, k, None, plan)


def test_encoders_need_neither_cache_nor_pages() -> None:
    layer = make_layer(attn_type="encoder_only")
    q, k, v = make_tokens(5)
    plan = layer.build(make_batch([5], [5], [[3, 8]], BLOCK))
    out = layer(q, k, v, None, plan)
    whole = _dense(q[-1:], k, v, SIZE**-0.5)
    torch.testing.assert_close(out[-1:].double(), whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(BatchError, match="no key"):
        layer(q, None, None, None, plan)


@BOTH
def test_cross_attention_keeps_the_encoders_output_between_steps(backend: Any) -> None:
    layer, cache = make_layer(backend, attn_type="encoder_decoder"), make_cache()
    q, k, v = make_tokens(6)
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
    layer, cache = make_layer(LayerWrites), make_cache()
    tokens = [x.requires_grad_() for x in make_tokens(5)]
    out = layer(*tokens, cache, layer.build(make_batch([5], [5], [[3, 8]], BLOCK)))
    assert not out.requires_grad
    assert not cache.requires_grad


def test_a_copy_runs_itself() -> None:
    layer = make_layer(Recording, layer_name="a")
    twin = copy.deepcopy(layer)
    assert isinstance(layer.impl, Recorder)
    assert isinstance(twin.impl, Recorder)
    plan = layer.build(make_batch([2], [2], [[3]], BLOCK))
    out = torch.zeros(2, HEADS, SIZE)
    with forward_context({"a": plan}, {"a": make_cache()}):
        torch.ops.attnkit.attention(*make_tokens(2), out, None, twin._order, twin._handle)
    assert len(twin.impl.calls) == 2
    assert layer.impl.calls == []


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_copy_gives_what_the_layer_gives(backend: str) -> None:
    layer = make_layer(backend)
    batch = make_batch([5], [5], [[3, 8]], BLOCK)
    tokens = make_tokens(5)
    expected = layer(*tokens, make_cache(), layer.build(batch))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(*tokens, make_cache(), twin.build(batch)), expected)


def test_names_are_made_up_where_none_is_given() -> None:
    assert make_layer().layer_name != make_layer().layer_name
    assert make_layer(layer_name="a").layer_name == "a"
    assert "num_heads=4" in repr(make_layer())
    assert "chosen" in str(make_layer("reference").selection)


def test_scales_follow_the_protocol() -> None:
    layer = make_layer()
    for name in ("_q_scale", "_k_scale", "_v_scale"):
        assert getattr(layer, name).tolist() == getattr(layer, f"{name}_float") == 1.0
    assert layer._prob_scale.tolist() == 1.0
    assert not list(layer.parameters())


def test_a_batch_of_blocks_of_another_size_is_refused() -> None:
    """Its slots would be other pages than the layer's, the null block among them."""
    layer = Attention(4, 32, num_kv_heads=2, block_size=16)
    with pytest.raises(BatchError, match="blocks of 4 tokens, the layer has blocks of 16"):
        layer.build(make_batch([5], [5], [[1, 2]], 4))
