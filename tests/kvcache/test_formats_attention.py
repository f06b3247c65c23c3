"""Attention over quantised caches, through the layer and the reference backend.

Right is attention in float64 over what the bytes of the cache mean, by the tables of
`stored_numbers`; near enough to the unquantised is what half a step of each code explains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from stored_numbers import QUANTISED, SCALED_BY_LAYER, decode_content, largest_error

from attnkit.backends.reference import ReferenceBackend
from attnkit.batch import make_batch
from attnkit.contract import KVCacheLayout, KVQuantMode
from attnkit.errors import ConfigurationError, UnsupportedConfiguration
from attnkit.kvcache.pool import PagedKVCache
from attnkit.layer import Attention

HEADS, KV_HEADS, HEAD_SIZE, HEAD_SIZE_V, BLOCK = 4, 2, 32, 16, 4
SEQ_LENS, QUERY_LENS = (11, 4, 6), (1, 4, 3)
TABLES = [[7, 2, 5], [3], [8, 1]]
NUM_BLOCKS = 10


@dataclass(frozen=True)
class Sequences:
    """Whole requests: q, k, v per request, in float32."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def sequences(seed: int = 0) -> Sequences:
    g = torch.Generator().manual_seed(seed)

    def draw(heads: int, size: int) -> list[torch.Tensor]:
        return [torch.randn(n, heads, size, generator=g) for n in SEQ_LENS]

    return Sequences(draw(HEADS, HEAD_SIZE), draw(KV_HEADS, HEAD_SIZE), draw(KV_HEADS, HEAD_SIZE_V))


def layer_of(name: str, *, per_head: bool = False, **changes: Any) -> Attention:
    arguments: dict[str, Any] = {"block_size": BLOCK, **changes}
    layer = Attention(
        HEADS,
        HEAD_SIZE,
        num_kv_heads=KV_HEADS,
        head_size_v=HEAD_SIZE_V,
        kv_cache_dtype=name,
        backend="reference",
        use_per_head_quant_scales=per_head,
        **arguments,
    )
    layer._k_scale.copy_(torch.tensor([0.02, 0.5]) if per_head else torch.tensor(0.02))
    layer._v_scale.copy_(torch.tensor([0.3, 0.01]) if per_head else torch.tensor(0.01))
    layer.process_weights_after_loading(torch.float32)
    return layer


def cache_of(layer: Attention, layout: KVCacheLayout = KVCacheLayout.LBHNC) -> torch.Tensor:
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    specs = {layer.layer_name: spec, "other": spec}
    cache = PagedKVCache(specs, NUM_BLOCKS, layout=layout, poison=True)
    return cache[layer.layer_name]


def two_steps(layer: Attention, cache: torch.Tensor, s: Sequences) -> torch.Tensor:
    """The contexts in one step, then the queries of the next; the output of that."""
    context = [n - q for n, q in zip(SEQ_LENS, QUERY_LENS, strict=True)]
    out = torch.empty(0)
    for query_lens, seq_lens in ((context, context), (QUERY_LENS, SEQ_LENS)):
        batch = make_batch(query_lens, seq_lens, TABLES, BLOCK)
        rows = [slice(n - q, n) for n, q in zip(seq_lens, query_lens, strict=True)]
        q, k, v = (
            torch.cat([x[r] for x, r in zip(xs, rows, strict=True)]) for xs in (s.q, s.k, s.v)
        )
        out = layer(
            q.to(layer.dtype), k.to(layer.dtype), v.to(layer.dtype), cache, layer.build(batch)
        )
        assert isinstance(out, torch.Tensor)
    return out


def column(scale: torch.Tensor) -> np.ndarray:
    """A layer's scale as () or (heads, 1)."""
    return scale.numpy()[..., None] if scale.dim() else scale.numpy()


def read(layer: Attention, cache: torch.Tensor, request: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V of one request, from the bytes of its pages."""
    data = cache.view(torch.uint8).numpy()
    table = TABLES[request]
    content = np.stack([data[table[j // BLOCK], :, j % BLOCK] for j in range(SEQ_LENS[request])])
    scales = column(layer._k_scale), column(layer._v_scale)
    return decode_content(layer.kv_cache_dtype, content, HEAD_SIZE, HEAD_SIZE_V, *scales)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Causal attention of the last rows in float64: output, sum of |weight * value|, and the largest
    sum of |q * k| of a row's scores, which rounding is proportional to."""
    k, v = (np.repeat(x.astype(np.float64), HEADS // KV_HEADS, axis=1) for x in (k, v))
    q = q.astype(np.float64) * HEAD_SIZE**-0.5
    hidden = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]
    score = np.where(hidden[:, None], -np.inf, np.einsum("qhd,khd->qhk", q, k))
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    products = np.einsum("qhd,khd->qhk", np.abs(q), np.abs(k)).max(-1, keepdims=True)
    return (
        np.einsum("qhk,khd->qhd", weight, v),
        np.einsum("qhk,khd->qhd", weight, np.abs(v)),
        products,
    )


CASES = [(name, False) for name in QUANTISED] + [(name, True) for name in SCALED_BY_LAYER]


@pytest.mark.parametrize(("name", "per_head"), CASES)
@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_output_is_attention_over_what_the_bytes_mean(
    name: str, per_head: bool, layout: KVCacheLayout
) -> None:
    layer, s = layer_of(name, per_head=per_head), sequences()
    cache = cache_of(layer, layout)
    out = two_steps(layer, cache, s).double().numpy()
    first = 0
    for request, q_len in enumerate(QUERY_LENS):
        wanted, terms, products = attend(
            s.q[request][-q_len:].numpy(), *read(layer, cache, request)
        )
        error = np.abs(out[first : first + q_len] - wanted)
        assert (error <= 8 * 2.0**-24 * (1 + products) * terms).all()
        first += q_len


@pytest.mark.parametrize(("name", "per_head"), CASES)
def test_output_is_near_the_unquantised_by_what_half_a_step_explains(
    name: str, per_head: bool
) -> None:
    """With d the most that any score moves, weights change by at most e^(2d), values by their step."""
    layer, s = layer_of(name, per_head=per_head), sequences()
    s = Sequences([q / 8 for q in s.q], s.k, s.v)  # Else the bound of the coarsest says nothing.
    scales = column(layer._k_scale), column(layer._v_scale)
    out = two_steps(layer, cache_of(layer), s).double().numpy()
    first = 0
    for request, q_len in enumerate(QUERY_LENS):
        q = s.q[request][-q_len:].numpy()
        k, v = s.k[request].numpy(), s.v[request].numpy()
        if name in SCALED_BY_LAYER:  # No number saturates, or the bound would not hold.
            assert np.abs(k).max() < 6 * 448 * scales[0].min()
            assert np.abs(v).max() < 6 * 448 * scales[1].min()
        wanted, terms, _ = attend(q, k, v)
        k_step = np.repeat(largest_error(name, k, scales[0]), HEADS // KV_HEADS, axis=1)
        v_step = largest_error(name, v, scales[1]).max((0, 2)).repeat(HEADS // KV_HEADS)
        moved = np.einsum("qhd,khd->qhk", np.abs(q) * HEAD_SIZE**-0.5, k_step).max(-1)
        bound = np.expm1(2 * moved)[..., None] * terms + v_step[:, None]
        error = np.abs(out[first : first + q_len] - wanted)
        assert (error <= bound + 1e-6).all()
        assert error.max() > 1e-4, "nothing was quantised"
        first += q_len


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_layers_write_the_same_codes(name: str, dtype: torch.dtype) -> None:
    s = sequences()
    rounded = Sequences(*([x.to(dtype).float() for x in xs] for xs in (s.q, s.k, s.v)))
    wide, low = layer_of(name), layer_of(name, dtype=dtype)
    wide_cache, low_cache = cache_of(wide), cache_of(low)
    expected = two_steps(wide, wide_cache, rounded)
    out = two_steps(low, low_cache, rounded)
    assert torch.equal(wide_cache.view(torch.uint8), low_cache.view(torch.uint8))
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("name", QUANTISED)
def test_the_newest_token_is_seen_as_it_is_stored(name: str) -> None:
    """One key only: the output is its value, through the cache and so quantised."""
    layer, s = layer_of(name), sequences(1)
    cache = cache_of(layer)
    batch = make_batch([1], [1], [[6]], BLOCK)
    value = s.v[0][:1]
    out = layer(s.q[0][:1], s.k[0][:1], value, cache, layer.build(batch))
    data = cache.view(torch.uint8)[6, :, 0].numpy()[None]
    scales = column(layer._k_scale), column(layer._v_scale)
    _, stored = decode_content(name, data, HEAD_SIZE, HEAD_SIZE_V, *scales)
    assert isinstance(out, torch.Tensor)
    assert np.allclose(out[0, ::2].double().numpy(), stored[0], rtol=2.0**-22, atol=0)
    assert not torch.equal(out[:, ::2], value)


@pytest.mark.parametrize("name", SCALED_BY_LAYER)
def test_each_head_has_its_own_scale(name: str) -> None:
    """Equal bytes in two heads are read back in the ratio of the heads' scales."""
    layer = layer_of(name, per_head=True)
    cache = cache_of(layer)
    batch = make_batch([1], [9], [[4, 2, 9]], BLOCK)
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(9, 1, n, generator=g) for n in (HEAD_SIZE, HEAD_SIZE_V))
    k, v = (x.expand(-1, KV_HEADS, -1) for x in (k, v))
    prompt = make_batch([9], [9], [[4, 2, 9]], BLOCK)
    layer(torch.zeros(9, HEADS, HEAD_SIZE), k, v, cache, layer.build(prompt))
    assert not torch.equal(cache[4, 0].view(torch.uint8), cache[4, 1].view(torch.uint8))
    cache.view(torch.uint8)[:, 1] = cache.view(torch.uint8)[:, 0]
    batch = batch.replace(slot_mapping=torch.full((1,), -1))
    zero = torch.zeros(1, HEADS, HEAD_SIZE)
    out = layer(zero, k[:1], v[:1], cache, layer.build(batch))
    assert isinstance(out, torch.Tensor)
    ratio = layer._v_scale[1] / layer._v_scale[0]
    assert torch.allclose(out[0, 2:], out[0, :2] * ratio, rtol=1e-5)
    assert out.abs().max() > 0.1


def one_channel(*numbers: float) -> torch.Tensor:
    x = torch.zeros(len(numbers), 1, 8)
    x[..., 0] = torch.tensor(numbers)[:, None]
    return x


def small_layer(name: str, **changes: Any) -> Attention:
    arguments = {"scale": 1.0, "kv_cache_dtype": name, "backend": "reference", **changes}
    return Attention(1, 8, **arguments)


def test_br066_scales_reach_reader_and_lse() -> None:
    layer = small_layer("fp8_e4m3", return_lse=True)
    cache = torch.zeros(3, 1, 16, 16, dtype=torch.float8_e4m3fn)
    cache[2, 0, 1, 0], cache[2, 0, 1, 8] = 8.0, 1.0
    batch = make_batch([1], [2], [[2]], 16).replace(slot_mapping=torch.full((1,), -1))
    for shape in ((), (1,)):
        layer._k_scale, layer._v_scale = torch.full(shape, 0.25), torch.full(shape, 0.5)
        for loaded in (False, True):
            if loaded:
                layer.process_weights_after_loading(torch.float32)
                assert (layer._k_scale_float, layer._v_scale_float) == (0.25, 0.5)
            out, lse = layer(one_channel(1.0), one_channel(9.0), one_channel(9.0), cache, batch)
            assert math.isclose(out[0, 0, 0], 0.440399, abs_tol=1e-6)
            assert math.isclose(lse[0, 0], 2.126928, abs_tol=1e-6)


def test_br068_values_have_their_own_scale_and_readers_use_the_writers() -> None:
    layer = small_layer("fp8")
    layer._k_scale.fill_(0.5)
    cache = torch.zeros(2, 1, 16, 16, dtype=torch.float8_e4m3fn)
    batch = make_batch([1], [1], [[1]], 16)
    out = layer(one_channel(0.0), one_channel(1.0), one_channel(1.0), cache, batch)
    assert out[0, 0, 0] == 1.0
    layer._v_scale.fill_(1.5)
    out = layer(one_channel(0.0), one_channel(1.0), one_channel(3.0), cache, batch)
    assert cache[1, 0, 0, 8].float() == 2.0
    assert out[0, 0, 0] == 3.0


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_br070_what_is_declared_is_what_is_written_and_read(name: str, block_size: int) -> None:
    layer = small_layer(name, block_size=block_size)
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    cache = PagedKVCache({"a": spec}, 6, poison=True)["a"]
    numbers = [1.0, 2.0, 3.5, 0.25]
    batch = make_batch([1] * 4, [1] * 4, [[5], [2], [4], [3]], block_size)
    x = one_channel(*numbers)
    out = layer(torch.zeros_like(x), x, x, cache, layer.build(batch))
    assert out[:, 0, 0].tolist() == numbers
    assert cache[[5, 2, 4, 3], 0, 0, 8].float().tolist() == numbers


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head"])
@pytest.mark.parametrize("length", [1, 2, 7, 15, 16, 17, 31, 32, 33, 48])
def test_br072_stale_scales_of_a_partly_filled_block_do_not_matter(name: str, length: int) -> None:
    layer = layer_of(name, block_size=16)
    g = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(length, heads, size, generator=g)
        for heads, size in ((HEADS, HEAD_SIZE), (KV_HEADS, HEAD_SIZE), (KV_HEADS, HEAD_SIZE_V))
    )
    spec = layer.get_kv_cache_spec()
    assert spec is not None
    plain = attend(q.numpy(), k.numpy(), v.numpy())[0]
    outs = []
    for filler in (1e6, math.nan):
        pages = PagedKVCache({"a": spec}, 5)["a"].view(torch.uint8)
        pages.fill_(0x7F)
        stale = torch.tensor([filler]).view(torch.uint8)
        pages[..., HEAD_SIZE : HEAD_SIZE + 4] = pages[..., -4:] = stale
        batch = make_batch([length], [length], [[4, 1, 3][: -(-length // 16)]], 16)
        outs.append(layer(q, k, v, pages.view(spec.dtype), layer.build(batch)))
    assert torch.equal(outs[0], outs[1])
    if name == "int8_per_token_head":
        error = np.abs(outs[0].double().numpy() - plain)
        assert error.max() <= np.abs(v.numpy()).max() / 127


@pytest.mark.parametrize("name", ["_q_scale", "_k_scale", "_v_scale"])
@pytest.mark.parametrize("value", [0.0, 1e-45, -1.0, math.nan, math.inf])
def test_scales_that_divide_by_nothing_are_named(name: str, value: float) -> None:
    layer = small_layer("fp8", layer_name="attn7")
    getattr(layer, name).fill_(value)
    value = float(torch.tensor(value))
    with pytest.raises(ConfigurationError, match=f"{name} of layer attn7 is {value}"):
        layer.process_weights_after_loading(torch.float32)
    assert layer._k_scale_float == layer._v_scale_float == layer._q_scale_float == 1.0


def test_one_bad_head_is_enough() -> None:
    layer = layer_of("fp8", per_head=True)
    layer._v_scale[1] = 0.0
    with pytest.raises(ConfigurationError, match=r"_v_scale of layer .* 0\.0\]"):
        layer.process_weights_after_loading(torch.float32)


@pytest.mark.parametrize(
    ("per_head", "shape", "hint"),
    [
        (False, (2,), "use_per_head_quant_scales=True"),
        (False, (1, 2), r"\(\) for one number"),
        (True, (), r"\(2,\) for one per KV head"),
        (True, (4,), r"\(2,\) for one per KV head"),
        (True, (2, 1), r"\(2,\) for one per KV head"),
    ],
)
def test_scales_of_another_shape_than_the_layers_are_named(
    per_head: bool, shape: tuple[int, ...], hint: str
) -> None:
    layer = layer_of("fp8", per_head=per_head)
    layer._k_scale = torch.ones(shape)
    with pytest.raises(ConfigurationError, match=f"_k_scale .*shape .*{hint}"):
        layer.process_weights_after_loading(torch.float32)


def test_loaded_scales_of_any_dtype_become_float32() -> None:
    layer = layer_of("fp8", per_head=True)
    layer._k_scale = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    layer.process_weights_after_loading(torch.bfloat16)
    assert layer._k_scale.dtype is torch.float32
    assert layer._k_scale.tolist() == [0.5, 0.25]
    # No one number stands for two.
    assert math.isnan(layer._k_scale_float)


def test_scales_per_head_are_a_feature_that_a_backend_may_lack() -> None:
    class OneScale(ReferenceBackend):
        @classmethod
        def supports_per_head_quant_scales(cls) -> bool:
            return False

    with pytest.raises(UnsupportedConfiguration, match="one K/V scale per head"):
        small_layer("fp8", backend=OneScale, use_per_head_quant_scales=True)
    small_layer("fp8", backend=OneScale)


def test_builders_of_layers_that_share_a_cache_see_its_format() -> None:
    """Such a layer has no spec of its own, but its kernels read the other's pages."""
    layer = layer_of("nvfp4", kv_sharing_target_layer_name="owner")
    spec: Any = layer.make_builder().kv_cache_spec
    assert spec.kv_quant_mode is KVQuantMode.NVFP4
    assert spec == layer_of("nvfp4").get_kv_cache_spec()
