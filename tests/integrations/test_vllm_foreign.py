"""A backend written for vLLM, run by our layers and runner, with a stand-in for vLLM's package.

`make test-vllm` does the same with the real one and its CPU attention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch

from attnkit import LLM, Attention, PagedKVCache, SamplingParams, make_batch
from attnkit.contract import COMMON_METADATA_FIELDS, KVCacheLayout
from attnkit.errors import UnsupportedConfiguration
from attnkit.selection import resolve

FOREIGN = "attnkit.integrations.vllm.foreign"
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 16

Batch = dataclasses.make_dataclass(
    "CommonAttentionMetadata", [(n, Any, None) for n in (*COMMON_METADATA_FIELDS[:9], "theirs")]
)


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: int
    sliding_window: int | None = None


class SlidingWindowSpec(FullAttentionSpec):
    pass


class TheirBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        assert isinstance(kv_cache_spec, FullAttentionSpec)
        assert vllm_config.compilation_config.static_forward_context == {}
        assert (
            vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config) == HEADS
        )
        assert vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config) == KV_HEADS
        assert vllm_config.model_config.get_head_size() in (SIZE, 16)
        assert vllm_config.compilation_config.cudagraph_mode == "none"
        self.num_blocks = vllm_config.cache_config.num_gpu_blocks
        self.isa = "abacus"

    def build(self, common_prefix_len: int, batch: Any, fast_build: bool = False) -> Any:
        assert type(batch) is Batch
        return SimpleNamespace(batch=batch, num_blocks=self.num_blocks)


class TheirImpl:
    """Gathers every request's pages, and attends in torch."""

    def __init__(self, *given: Any) -> None:
        self.heads, self.size, self.scale, self.kv_heads, _, self.window = given[:6]
        assert given[6:] == ("auto", None, "decoder", None)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        pass

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        assert layer.isa == "abacus"
        cache[slots // BLOCK, :, slots % BLOCK] = torch.cat([key, value], -1)[: len(slots)]

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, plan: Any, output: Any
    ) -> Any:
        assert layer._k_scale_float == 1.0
        assert plan.num_blocks == cache.shape[0]
        batch = plan.batch
        starts = batch.query_start_loc.tolist()
        for row, (a, b) in enumerate(itertools.pairwise(starts)):
            n = int(batch.seq_lens[row])
            pages = cache[batch.block_table_tensor[row, : -(-n // BLOCK)]].transpose(0, 1)
            k, v = pages.flatten(1, 2)[:, :n].split(self.size, -1)
            at = torch.arange(n - (b - a), n)[:, None] - torch.arange(n)
            seen = (at >= 0) & (at < (self.window or n))
            output[a:b] = torch.nn.functional.scaled_dot_product_attention(
                query[a:b].transpose(0, 1), k, v, seen, scale=self.scale, enable_gqa=True
            ).transpose(0, 1)
        return output


class TheirBackend:
    supported_dtypes = (torch.float32,)
    forward_includes_kv_cache_update = False
    get_name = staticmethod(lambda: "CPU_ATTN")
    get_impl_cls = staticmethod(lambda: TheirImpl)
    get_builder_cls = staticmethod(lambda: TheirBuilder)
    get_supported_kernel_block_sizes = staticmethod(lambda: [SimpleNamespace(base=BLOCK)])
    supported_kv_cache_layouts = staticmethod(lambda: (KVCacheLayout.LBHNC,))
    is_mla = is_sparse = staticmethod(lambda: False)
    get_supported_head_sizes = staticmethod(lambda: [SIZE, 16])
    supports_head_size = staticmethod(lambda size: size in (SIZE, 16))
    supports_kv_cache_dtype = staticmethod(lambda name: True)
    supports_sink = supports_batch_invariance = staticmethod(lambda: False)
    supports_non_causal = supports_sliding_window = staticmethod(lambda: True)
    supports_attn_type = staticmethod(lambda kind: True)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, over a package that stands in for vLLM."""
    names = Enum("AttentionBackendEnum", {"CPU_ATTN": "a"})
    names.get_class = lambda self: TheirBackend  # type: ignore[attr-defined]
    backend, specs = (
        ModuleType("vllm.v1.attention.backend"),
        ModuleType("vllm.v1.kv_cache_interface"),
    )
    vars(backend).update(CommonAttentionMetadata=Batch)
    vars(specs).update(FullAttentionSpec=FullAttentionSpec, SlidingWindowSpec=SlidingWindowSpec)
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {
            "set_current_vllm_config": contextlib.nullcontext,
            "AttentionConfig": SimpleNamespace,
            "CUDAGraphMode": SimpleNamespace(NONE="none"),
        },
        "vllm.triton_utils": {"HAS_TRITON": False},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1": {"kv_cache_interface": specs},
        "vllm.v1.attention": {"backend": backend},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": names},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, FOREIGN, raising=False)
    module = importlib.import_module(FOREIGN)
    monkeypatch.setitem(sys.modules, FOREIGN, module)  # Taken out again with the stand-in.
    return module


@pytest.mark.parametrize("window", [None, 5])
def test_a_layer_gives_what_ours_gives(foreign, window):
    theirs = resolve(f"{FOREIGN}:CPU_ATTN")
    assert theirs is foreign.adapt(TheirBackend)
    layers = [
        Attention(
            HEADS, SIZE, 0.3, KV_HEADS, sliding_window=window, backend=backend, layer_name="a"
        )
        for backend in (theirs, "reference")
    ]
    assert "vllm:CPU_ATTN" in str(layers[0].selection)
    caches = [
        PagedKVCache({"a": layers[1].get_kv_cache_spec()}, 9, poison=True)["a"] for _ in layers
    ]
    for query_lens, seq_lens in (([18, 3], [18, 3]), ([1, 2], [19, 5])):
        batch = make_batch(query_lens, seq_lens, [[5, 2], [7]], BLOCK)
        q, (k, v) = (
            torch.randn(sum(query_lens), HEADS, SIZE),
            torch.randn(2, sum(query_lens), KV_HEADS, SIZE),
        )
        got, want = (x(q, k, v, c, x.build(batch)) for x, c in zip(layers, caches, strict=True))
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_the_runner_takes_it_by_name(foreign, tmp_path):
    model = tiny_models.make_model("llama")
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, backend=f"{FOREIGN}:CPU_ATTN", block_size=BLOCK, dtype="float32")
    prompts = [list(range(1, 20)), [7, 8, 9]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [
        tiny_models.greedy(model, p, 6) for p in prompts
    ]


def test_what_cannot_be_run_is_refused(foreign):
    theirs = foreign.adapt(TheirBackend)
    for given, message in (
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"head_size": 24}, "24"),
        ({"sinks": torch.zeros(HEADS)}, "sink"),
        ({"logits_soft_cap": 30.0}, "soft cap"),
    ):
        arguments = {"num_heads": HEADS, "head_size": SIZE, "num_kv_heads": KV_HEADS, **given}
        with pytest.raises(UnsupportedConfiguration, match=message):
            Attention(**arguments, backend=theirs)
    layer = Attention(HEADS, SIZE, num_kv_heads=KV_HEADS, backend=theirs)
    step = *torch.zeros(3, 1, HEADS, SIZE), torch.zeros(0), None, torch.zeros(1, HEADS, SIZE)
    for scales in ((torch.ones(()),), (None, torch.ones(()))):
        with pytest.raises(UnsupportedConfiguration, match="quantised outputs are not supported"):
            layer.impl.forward(layer, *step, *scales)
    tritons = type("Tritons", (TheirBackend,), {"get_name": staticmethod(lambda: "TRITON_ATTN")})
    with pytest.raises(UnsupportedConfiguration, match="TRITON_ATTN needs Triton, which this vLLM"):
        Attention(HEADS, SIZE, num_kv_heads=KV_HEADS, backend=foreign.adapt(tritons))
    latents = type("Latents", (TheirBackend,), {"is_mla": staticmethod(lambda: True)})
    with pytest.raises(UnsupportedConfiguration, match="Latents is for latents"):
        foreign.adapt(latents)
    with pytest.raises(AttributeError, match="upper case"):
        _ = foreign.nothing
