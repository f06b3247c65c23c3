"""Repeated launches of the Triton kernels are what whole ones would be, argument for argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from launches import Started, Step, check_repeats, note_whole, rows_of, stand_in
from triton_problem import DEVICE

from attnkit import Attention, PagedKVCache, make_batch
from attnkit.backends.triton import cache_launch, launch
from attnkit.backends.triton.impl import TritonImpl
from attnkit.backends.triton.plan import TritonMetadata, Workspace
from attnkit.contract import (
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from attnkit.kvcache.formats import cache_format
from attnkit.output_quant import QuantizedOutput

HEADS, KV_HEADS, SIZE = (32, 8, 128) if DEVICE.type == "cuda" else (2, 1, 16)
KERNELS = {
    launch: ("attention_kernel", "decode_kernel", "merge_kernel"),
    cache_launch: ("write_kernel", "encode_kernel"),
}
OWN = ("lse_ptr",)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    return stand_in(monkeypatch, KERNELS)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels whose launches are whole."""
    return note_whole(monkeypatch, KERNELS)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What impls are built with, and caches and scales of steps."""

    heads: int
    kv_heads: int
    head_size: int
    head_size_v: int
    kv_cache_dtype: str
    attn_type: str
    features: dict[str, Any]

    def impl(self) -> TritonImpl:
        return TritonImpl(
            self.heads,
            self.head_size,
            0.1,
            self.kv_heads,
            kv_cache_dtype=self.kv_cache_dtype,
            attn_type=self.attn_type,
            head_size_v=self.head_size_v,
            **self.features,
        )

    @functools.cached_property
    def caches(self) -> list[torch.Tensor]:
        made = cache_format(self.kv_cache_dtype)
        if made.codec is None:
            dtype, content = made.dtype or torch.bfloat16, self.head_size + self.head_size_v
        else:
            assert made.dtype is not None
            dtype = made.dtype
            layout = made.layout(self.head_size, self.head_size_v)
            content = layout.num_bytes // dtype.itemsize
        pool = torch.empty(2, 4, 16, self.kv_heads, content, dtype=dtype)
        # Blocks of two layers after one another, one layer with heads before tokens, smaller blocks.
        return [
            pool[0].transpose(1, 2),
            pool[1].transpose(1, 2),
            pool.view(2, 4, self.kv_heads, 16, content)[0],
            pool.view(2, 8, 8, self.kv_heads, content)[0].transpose(1, 2),
        ]

    @functools.cached_property
    def scales(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        one, other, many = torch.ones(()), torch.ones(()), torch.ones(2, self.kv_heads)
        return [
            (one, other),
            (one, one),
            (other, other),
            (many[0], many[1]),
            (one, many[0]),
            (one.expand(self.kv_heads), many[0]),
            (one.double(), one),
        ]


def draw_layer(draw: Callable[..., Any], codes: bool) -> Layer:
    heads, kv_heads = draw(st.sampled_from([(8, 2), (3, 3), (6, 1), (32, 8)]))
    attn_type = (
        "decoder" if codes else draw(st.sampled_from(["decoder", "decoder", "encoder_only"]))
    )
    features = {
        "sliding_window": draw(st.sampled_from([None, 1, 64])),
        "logits_soft_cap": draw(st.sampled_from([None, 30.0])),
        "alibi_slopes": draw(st.sampled_from([None, torch.ones(heads)])),
        "sinks": draw(st.sampled_from([None, torch.zeros(heads)])),
    }
    own = ["auto", "bfloat16", "float16"]
    coded = ["fp8", "fp8_e5m2", "int8_per_token_head", "int4_per_token_head", "nvfp4"]
    size, size_v = draw(st.sampled_from([(128, 128), (64, 64), (192, 128), (16, 16)]))
    return Layer(
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        head_size_v=size_v,
        kv_cache_dtype=draw(st.sampled_from(coded if codes else own)),
        attn_type=attn_type,
        features=features,
    )


ROWS = st.sampled_from(["own", "packed", "unaligned", "wide", "heads first"])
COUNTS = {
    "num_reqs": st.sampled_from([1, 2, 3, 16, 40]),
    "longest": st.sampled_from([1, 2, 16, 100]),
    "padding": st.sampled_from([0, 3]),
    "width": st.sampled_from([1, 4, 16, 17]),
    "table_stride": st.sampled_from([17, 32]),
    "is_prefill": st.booleans(),
    "max_kv_len": st.sampled_from([1, 300, 3000, 40000]),
    "longest_to_mean": st.sampled_from([1.0, 5.0]),
}
"""What differs from step to step without a kernel being another."""
CHOICES = {
    "dtype": st.sampled_from([torch.bfloat16, torch.float32]),
    "query": ROWS,
    "key": ROWS,
    "value": ROWS,
    "output": ROWS,
    "keys_with_values": st.sampled_from([False, True, "apart"]),
    "slots": st.sampled_from([torch.int64, torch.int32]),
    "lens": st.sampled_from([torch.int32, torch.int64]),
    "causal": st.sampled_from([True, False, "each"]),
    "spans": st.booleans(),
    "prefix_lens": st.booleans(),
    "tree": st.booleans(),
    "decode_query_len": st.sampled_from([1, 2, 5]),
    "is_captured": st.booleans(),
    "quantized": st.sampled_from([None, kFp8StaticTensorSym, kNvfp4Dynamic, kFp8Dynamic128Sym]),
    "wants_lse": st.booleans(),
    "cache": st.integers(0, 3),
    "scales": st.integers(0, 6),
}
"""What may make it another."""
START = {
    "dtype": torch.bfloat16,
    "query": "own",
    "key": "packed",
    "value": "own",
    "output": "own",
    "keys_with_values": False,
    "slots": torch.int64,
    "lens": torch.int32,
    "causal": True,
    "spans": False,
    "prefix_lens": False,
    "tree": False,
    "decode_query_len": 1,
    "is_captured": False,
    "quantized": None,
    "wants_lse": False,
    "cache": 0,
    "scales": 0,
}


def make_step(layer: Layer, workspace: Workspace, c: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a step: a plan, tensors, one of the layer's caches and scales."""
    num_reqs, longest = c["num_reqs"], c["longest"]
    tokens = num_reqs * longest
    rows = tokens + c["padding"]
    table = torch.zeros(num_reqs, c["table_stride"], dtype=torch.int32)
    plan = TritonMetadata(
        num_actual_tokens=tokens,
        query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32),
        kv_lens=torch.zeros(num_reqs + 1, dtype=c["lens"])[1:],
        block_table=table[:, : c["width"]],
        block_size=16,
        views=(),
        slot_mapping=torch.zeros(tokens, dtype=c["slots"]),
        causal=torch.ones(num_reqs, dtype=torch.bool) if c["causal"] == "each" else c["causal"],
        spans=torch.zeros(tokens, 2, dtype=torch.int32) if c["spans"] else None,
        prefix_lens=torch.zeros(num_reqs, dtype=torch.int32) if c["prefix_lens"] else None,
        tree=torch.zeros(tokens, dtype=torch.int64) if c["tree"] else None,
        max_query_len=longest,
        min_query_len=longest if c["is_prefill"] else 1,
        max_kv_len=c["max_kv_len"],
        longest_to_mean=c["longest_to_mean"],
        decode_query_len=c["decode_query_len"],
        is_captured=c["is_captured"],
        workspace=workspace,
    )
    heads, kv_heads, dtype = layer.heads, layer.kv_heads, c["dtype"]
    size, size_v, codes, quantized = layer.head_size, layer.head_size_v, c["quantized"], None
    if codes is not None and size_v % max(1, codes.scale.group_shape.col) == 0:
        scale = None if codes is kFp8Dynamic128Sym else torch.ones(2)
        if scale is not None:
            scale = scale[1:] if c["output"] == "unaligned" else scale[:1]
        quantized = QuantizedOutput.empty(codes, rows, heads * size_v, scale=scale)
    key = rows_of(c["key"], rows, kv_heads, size, dtype)
    value = rows_of(c["value"], rows, kv_heads, size_v, dtype)
    if c["keys_with_values"]:
        both = torch.empty(rows, kv_heads, size + size_v, dtype=dtype)
        other = torch.empty_like(both) if c["keys_with_values"] == "apart" else both
        key, value = both[..., :size], other[..., size:]
    return {
        "plan": plan,
        "query": rows_of(c["query"], rows, heads, size, dtype),
        "key": key,
        "value": value,
        "output": rows_of(c["output"], rows, heads, size_v, dtype),
        "quantized": quantized,
        "wants_lse": c["wants_lse"],
        "cache": c["cache"],
        "scales": c["scales"],
    }


def run(layer: Layer, impl: TritonImpl, step: dict[str, Any]) -> None:
    k_scale, v_scale = layer.scales[step["scales"]]
    caller: Any = SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)
    impl.need_to_return_lse_for_decode = step["wants_lse"]
    cache, plan, quantized = layer.caches[step["cache"]], step["plan"], step["quantized"]
    rows = (step["query"], step["key"], step["value"])
    if layer.attn_type == "decoder":
        impl.do_kv_cache_update(caller, *rows[1:], cache, plan.slot_mapping)
    output, scales = step["output"], (None, None)
    if quantized is not None:
        output, scales = quantized.codes, (quantized.scale, quantized.block_scale)
    impl.forward(caller, *rows, cache, plan, output, *scales)


@pytest.mark.parametrize("codes", [False, True], ids=["numbers", "codes"])
def test_a_repeated_launch_is_the_whole_one(log: list[Started], codes: bool) -> None:
    def prepare(
        draw: Callable[..., Any],
    ) -> tuple[Callable[[], TritonImpl], Callable[..., Step]]:
        layer, workspace = draw_layer(draw, codes), Workspace(torch.device("cpu"))

        def step_of(**chosen: Any) -> Step:
            step = make_step(layer, workspace, chosen)
            return lambda impl: run(layer, impl, step)

        return layer.impl, step_of

    choices = {name: (START[name], others) for name, others in CHOICES.items()}
    num_repeated = check_repeats(log, prepare, choices, COUNTS, OWN, max_examples=150)
    expected = {"decode_kernel", "merge_kernel", "attention_kernel"}
    assert num_repeated.keys() == expected | {"encode_kernel" if codes else "write_kernel"}
    assert min(num_repeated.values()) >= 10, num_repeated


def make_layer(**features: Any) -> tuple[Attention, torch.Tensor]:
    """A layer and a cache of 480 blocks."""
    new = {"dtype": torch.bfloat16, "device": DEVICE}
    layer = Attention(HEADS, SIZE, num_kv_heads=KV_HEADS, backend="triton", **new, **features)
    spec = layer.get_kv_cache_spec()
    if spec is None:
        return layer, torch.empty(0, device=DEVICE)
    return layer, PagedKVCache({layer.layer_name: spec}, 480, device=DEVICE)[layer.layer_name]


def make_qkv(num_tokens: int, unaligned: bool = False) -> tuple[torch.Tensor, ...]:
    """As a projection leaves them, side by side."""
    heads = HEADS + 2 * KV_HEADS
    memory = torch.randn(num_tokens * heads * SIZE + 2, dtype=torch.bfloat16, device=DEVICE)
    memory = memory[2:] if unaligned else memory[:-2]
    return memory.view(num_tokens, heads, SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)


def make_plan(layer: Attention, lens: list[int], before: int) -> Any:
    """Of requests with so many tokens before theirs."""
    kv_lens = [n + before for n in lens]
    tables = [[1 + 110 * i + j for j in range(-(-n // 16))] for i, n in enumerate(kv_lens)]
    batch = make_batch(lens, kv_lens, tables, 16, device=DEVICE)
    return layer.make_builder().build(0, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_repeated_launches_compute_what_first_ones_do(
    whole: list[str], kv_cache_dtype: str
) -> None:
    layer, cache = make_layer(kv_cache_dtype=kv_cache_dtype, return_lse=True)
    seen = set()
    for lens, before, unaligned in (
        ([5, 30, 34], 3, False),
        ([1, 1, 1], 270, False),
        ([1, 1, 1], 260, True),
        ([3, 20, 1, 1], 280, False),
        ([1, 1], 530, False),
        ([1, 1, 1, 1], 40, True),
        ([40, 2, 2], 0, False),
    ):
        plan = make_plan(layer, lens, before)
        q, k, v = make_qkv(sum(lens), unaligned)
        fresh, other = make_layer(kv_cache_dtype=kv_cache_dtype, return_lse=True)
        other.copy_(cache)
        want = fresh(q, k, v, other, plan)
        # A kernel is another for other alignments, and decodes with parts for the merge are.
        with_parts = "merge_kernel" in whole
        needed = {(name, unaligned, name == "decode_kernel" and with_parts) for name in whole}
        whole.clear()
        got = layer(q, k, v, cache, plan)
        assert sorted(whole) == sorted(name for name, *_ in needed - seen)
        seen |= needed
        whole.clear()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
    assert len(seen) == 9, seen


@pytest.mark.gpu
def test_a_moved_cache_and_new_scales_are_seen(whole: list[str]) -> None:
    layer, cache = make_layer(kv_cache_dtype="fp8")
    plan = make_plan(layer, [1, 1, 1], 20)
    q, k, v = make_qkv(3)
    for moved in (False, True):
        for scale in (1.0, 0.5):
            cache = cache.clone() if moved else cache
            fresh, other = make_layer(kv_cache_dtype="fp8")
            other.copy_(cache)
            for one in (layer, fresh):
                one._k_scale.fill_(scale)
                one._v_scale = torch.full((), 2 * scale, device=DEVICE)
                one.process_weights_after_loading(torch.bfloat16)
            want = fresh(q, k, v, other, plan)
            assert torch.equal(layer(q, k, v, cache, plan), want)
            assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.gpu
def test_a_repeated_launch_is_captured_and_replayed(whole: list[str]) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("needs a GPU")
    layer, cache = make_layer()
    plan = make_plan(layer, [1, 1, 1, 1], 1000)
    q, k, v = make_qkv(4)
    layer(q, k, v, cache, plan)
    whole.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(q, k, v, cache, plan)
    assert not whole
    for _ in range(2):
        q.normal_()
        k.normal_()
        graph.replay()
        assert torch.equal(out, layer(q, k, v, cache, plan))


@pytest.mark.gpu
def test_encoders_repeat_over_keys_of_the_step(whole: list[str]) -> None:
    layer, cache = make_layer(attn_type="encoder_only")
    for num_tokens, packed in ((40, True), (70, True), (40, False), (90, False)):
        q, k, v = make_qkv(num_tokens)
        if not packed:
            k, v = k.contiguous(), v.contiguous()
        plan = make_plan(layer, [num_tokens - 9, 9], 0)
        fresh, _ = make_layer(attn_type="encoder_only")
        want = fresh(q, k, v, cache, plan)
        whole.clear()
        assert torch.equal(layer(q, k, v, cache, plan), want)
        assert bool(whole) == (num_tokens == 40)
