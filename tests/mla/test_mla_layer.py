"""MLAAttention: what it is built from, what it refuses, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import attnkit
from attnkit.backends import MLA_BACKENDS
from attnkit.backends.reference_mla import ReferenceMLABackend, ReferenceMLAImpl
from attnkit.batch import make_batch
from attnkit.compiled import forward_context
from attnkit.contract import AttentionBackend, MLAAttentionImpl, MLAAttentionSpec, MLADimensions
from attnkit.errors import (
    BackendError,
    BatchError,
    ConfigurationError,
    UnsupportedConfiguration,
)
from attnkit.kvcache.pool import PagedKVCache
from attnkit.layer import Attention
from attnkit.mla_layer import MLAAttention
from attnkit.selection import AttentionRequest, decide, select

HEADS = 3
SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
DEEPSEEK = MLADimensions(
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)


def layer_of(dimensions: MLADimensions = SIZES, heads: int = HEADS, **how: Any) -> MLAAttention:
    d = dimensions
    torch.manual_seed(0)
    rows = heads * (d.qk_nope_head_dim + d.v_head_dim)
    module = nn.Linear(d.kv_lora_rank, rows, bias=False, dtype=how.get("dtype", torch.float32))
    return MLAAttention(heads, d, module, **how)


def tensors(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(num_tokens, *s).to(dtype) for s in ((HEADS, 24), (32,), (8,))]


def step(layer: MLAAttention, query_lens=(3, 1), seq_lens=(3, 1)) -> tuple[Any, torch.Tensor]:
    pages = iter(range(1, 9))
    tables = [[next(pages) for _ in range(-(-s // 16))] for s in seq_lens]
    cache = PagedKVCache({layer.layer_name: layer.get_kv_cache_spec()}, 9)
    return layer.build(make_batch(query_lens, seq_lens, tables, 16)), cache[layer.layer_name]


def test_flat_and_shaped_tensors_are_the_same() -> None:
    layer = layer_of(return_lse=True)
    plan, cache = step(layer)
    q, kv_c, k_pe = tensors(4)
    out, lse = layer(q, kv_c, k_pe, cache, plan)
    assert out.shape == (4, HEADS, 24)
    assert lse.shape == (4, HEADS)
    flat, flat_lse = layer(q.flatten(1), kv_c[:, None], k_pe[:, None], cache, plan)
    assert torch.equal(flat, out.flatten(1))
    assert torch.equal(flat_lse, lse)


def test_what_the_cache_holds() -> None:
    spec = layer_of().get_kv_cache_spec(64)
    assert isinstance(spec, MLAAttentionSpec)
    assert (spec.head_size, spec.head_size_v, spec.num_kv_heads) == (40, 0, 1)
    assert spec.page_size_bytes == 64 * 40 * 4
    row_bytes = {
        "auto": 576 * 2,
        "fp8": 576,
        "fp8_ds_mla": 656,
        "float32": 576 * 4,
    }
    for name, size in row_bytes.items():
        layer = layer_of(DEEPSEEK, 1, kv_cache_dtype=name, dtype=torch.bfloat16)
        assert layer.get_kv_cache_spec(1).page_size_bytes == size, name
    # Against 16 heads of expanded keys and values.
    expanded = Attention(16, 192, head_size_v=128, dtype=torch.bfloat16)
    dense = expanded.get_kv_cache_spec(1)
    assert dense is not None
    assert dense.page_size_bytes / (576 * 2) == 16 * (192 + 128) / 576


def test_the_context_of_a_forward_serves_it() -> None:
    layer = layer_of()
    plan, cache = step(layer)
    given = tensors(4)
    direct = layer(*given, cache, plan)
    with forward_context({layer.layer_name: plan}, {layer.layer_name: cache}):
        assert torch.equal(layer(*given), direct)


def test_a_compiled_layer_is_one_node() -> None:
    layer = layer_of(return_lse=True)
    plan, cache = step(layer)
    given = tensors(4)
    want = layer(*given, cache, plan)
    cache_after = cache.clone()
    cache.zero_()
    compiled = torch.compile(lambda *x: layer(*x), fullgraph=True, backend="aot_eager")
    with forward_context({layer.layer_name: plan}, {layer.layer_name: cache}):
        got = compiled(*given)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(cache, cache_after)


@pytest.mark.parametrize(
    "how", ["rows", "slots", "cache", "no_cache", "q", "kv_c", "k_pe", "dtype"]
)
def test_what_does_not_fit_is_refused_before_anything_is_written(how: str) -> None:
    layer = layer_of()
    plan, cache = step(layer)
    q, kv_c, k_pe = tensors(4)
    given: dict[str, tuple[Any, ...]] = {
        "rows": (q[:3], kv_c, k_pe, cache),
        "slots": (q, kv_c[:3], k_pe[:3], cache),
        "cache": (q, kv_c, k_pe, cache[..., :-1]),
        "no_cache": (q, kv_c, k_pe, None),
        "q": (q[..., :-1], kv_c, k_pe, cache),
        "kv_c": (q, kv_c[:, :-1], k_pe, cache),
        "k_pe": (q, kv_c, k_pe[:3], cache),
        "dtype": (q, kv_c.bfloat16(), k_pe, cache),
    }
    before = cache.clone()
    with pytest.raises(BatchError, match=layer.layer_name):
        layer(*given[how], plan)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"scale": float("nan")}, "scale nan is not allowed"),
        ({"block_size": 0}, "block_size 0"),
        ({"kv_cache_dtype": "fp3"}, "fp3"),
    ],
)
def test_values_that_are_not_allowed(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        layer_of(**wrong)


def test_no_heads() -> None:
    with pytest.raises(ConfigurationError, match="num_heads 0"):
        MLAAttention(0, SIZES, nn.Linear(32, 40, bias=False))


@pytest.mark.parametrize("size", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim"])
def test_sizes_below_one(size: str) -> None:
    sizes = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    with pytest.raises(ConfigurationError, match=f"{size} 0 is not allowed"):
        MLADimensions(**{**sizes, size: 0})


# Selection.


def test_latents_and_dense_layers_do_not_mix() -> None:
    with pytest.raises(
        UnsupportedConfiguration, match="the layer is MLA, this backend reads dense"
    ):
        layer_of(backend="reference")
    with pytest.raises(
        UnsupportedConfiguration, match="the layer is dense, this backend reads MLA"
    ):
        Attention(4, 32, backend="reference_mla")
    with pytest.raises(UnsupportedConfiguration, match="the layer is MLA"):
        select(AttentionRequest(head_size=576, dtype=torch.float32, use_mla=True), "cpu")


def test_each_kind_of_layer_has_its_own_candidates() -> None:
    dense = {d.name for d in decide(AttentionRequest(head_size=64, dtype=torch.float32))}
    latent = {
        d.name for d in decide(AttentionRequest(head_size=576, dtype=torch.float32, use_mla=True))
    }
    assert dense & latent == set()
    assert "reference" in dense
    assert "reference_mla" in latent
    assert {"reference", "reference_mla"} <= set(attnkit.backend_names())


def test_sizes_a_format_cannot_hold_are_refused_by_selection() -> None:
    with pytest.raises(
        UnsupportedConfiguration, match="fp8_ds_mla needs head sizes that 128 divides"
    ):
        layer_of(kv_cache_dtype="fp8_ds_mla", backend="reference_mla")


class SmallOnly(ReferenceMLABackend):
    @classmethod
    def supports_mla_dimensions(
        cls, dimensions: MLADimensions, kv_cache_dtype: str | None
    ) -> str | None:
        return None if dimensions.kv_lora_rank < 64 else f"latents of {dimensions} are too large"


class Lists:
    topk_indices_buffer = torch.zeros(8, 4, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["cpu_mla", "reference_mla"])
@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_no_plan_or_outside_the_cache_is_named(backend: str, sparse: bool) -> None:
    how = {"backend": f"{backend}_sparse", "indexer": Lists()} if sparse else {"backend": backend}
    layer = layer_of(**how)
    batch = make_batch([4], [4], [[3]], 16)
    cache = torch.zeros(9, 1, 16, 40)
    wrong = [3, {}, batch]
    if backend == "cpu_mla":  # The reference reads every plan over latents.
        wrong.append(layer_of(backend="reference_mla").build(batch))
    for plan in wrong:
        given = "a batch" if plan is batch else type(plan).__name__
        with pytest.raises(BatchError, match=f"got {given} as its plan, and plans of"):
            layer(*tensors(4), cache, plan)
    assert not cache.any()
    for query_len in (1, 4):  # A decode, and a prompt behind a context.
        beyond = make_batch([query_len], [16 + query_len], [[9, 3]], 16)
        with pytest.raises(BatchError, match=r"block.* (outside|0 to 8)"):
            layer(*tensors(query_len), cache, layer.build(beyond))


def test_batch_invariance_is_asked_of_the_backend() -> None:
    with pytest.raises(UnsupportedConfiguration) as refusal:
        layer_of(use_batch_invariant=True)
    named = [line for line in str(refusal.value).splitlines() if "batch invariance" in line]
    assert len(named) == len(MLA_BACKENDS)

    class Invariant(ReferenceMLABackend):
        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return True

    assert layer_of(use_batch_invariant=True, backend=Invariant).backend is Invariant
    with pytest.raises(ConfigurationError, match="use_batch_invariant"):
        layer_of(use_batch_invariant="yes")


def test_unknown_sizes_are_refused_with_the_backends_reason() -> None:
    assert layer_of(backend=SmallOnly).backend is SmallOnly
    with pytest.raises(UnsupportedConfiguration, match=r"latents of latent 512 \+ 64.* too large"):
        layer_of(DEEPSEEK, backend=SmallOnly)


class OlderImpl(MLAAttentionImpl[Any]):
    def __init__(self, *args: Any) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


class Older(ReferenceMLABackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return OlderImpl


def test_an_older_impl_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(UnsupportedConfiguration, match="define forward_mqa"):
        layer_of(backend=Older)


class Forgetful(ReferenceMLAImpl):
    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward_mqa(*args, **kwargs)[0], None


class ForgetfulBackend(ReferenceMLABackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return Forgetful


def test_an_lse_that_does_not_come() -> None:
    layer = layer_of(backend=ForgetfulBackend, return_lse=True)
    plan, cache = step(layer, (1,), (4,))
    with pytest.raises(BackendError, match="returned none"):
        layer(*tensors(1), cache, plan)


class HalfLse(ReferenceMLAImpl):
    can_return_lse_for_prefill = False


class HalfLseBackend(ReferenceMLABackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return HalfLse


def test_an_lse_of_decodes_alone_is_none() -> None:
    backend: type[AttentionBackend] = HalfLseBackend
    assert not backend.supports_lse()
    with pytest.raises(UnsupportedConfiguration, match="log-sum-exp"):
        layer_of(backend=backend, return_lse=True)
