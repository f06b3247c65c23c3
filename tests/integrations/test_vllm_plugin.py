"""The vLLM plugin against stubs of what it touches of vLLM; `make test-vllm` runs it in the real one."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnkit import Attention, MLAAttention, PagedKVCache, make_batch
from attnkit.contract import (
    KVCacheLayout,
    KVQuantMode,
    MLADimensions,
    ParallelConfig,
    VllmConfig,
)
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.integrations import vllm as plugin

BRIDGE = "attnkit.integrations.vllm"
BACKEND, LATENTS = f"{BRIDGE}.backend", f"{BRIDGE}.latents"
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 16


@dataclasses.dataclass(frozen=True)
class StubSpec:
    block_size: int = BLOCK
    num_kv_heads: int = KV_HEADS
    head_size: int = SIZE
    head_size_v: int = SIZE
    dtype: torch.dtype = torch.float32
    kv_quant_mode: Enum = KVQuantMode.NONE
    state_content_bytes: int | None = None
    page_size_padded: int | None = None
    sliding_window: int | None = None


FullAttentionSpec = type("FullAttentionSpec", (StubSpec,), {})
EncoderOnlyAttentionSpec = type("EncoderOnlyAttentionSpec", (StubSpec,), {})
MambaSpec = type("MambaSpec", (StubSpec,), {})


@dataclasses.dataclass(frozen=True)
class MLAAttentionSpec(StubSpec):
    num_kv_heads: int = 1
    head_size_v: int = 0
    cache_dtype_str: str | None = "auto"
    non_causal_multi_token_decode: bool = False


class StubBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.layer_names = layer_names


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Stands in for vLLM: returns what was registered, and the backend's module."""

    def stand_in(
        chosen: str | None = None,
        *,
        cpu: bool = True,
        version: str = "0.33.0",
        wanted: str = BACKEND,
    ) -> tuple[dict[str, str], Any]:
        registered: dict[str, str] = {}
        names = Enum("AttentionBackendEnum", "CPU_ATTN CPU_MLA AMX_MLA CUSTOM")
        modules: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": version},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.backend": {
                "AttentionBackend": type("AttentionBackend", (), {}),
                "AttentionImpl": type("AttentionImpl", (), {}),
                "MLAAttentionImpl": type("MLAAttentionImpl", (), {}),
                "AttentionMetadataBuilder": StubBuilder,
                "MultipleOf": dataclasses.make_dataclass("MultipleOf", ["base"]),
                "AttentionCGSupport": Enum(
                    "CG", "ALWAYS UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE NEVER"
                ),
            },
            "vllm.v1.attention.backends": {},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": names,
                "register_backend": lambda name, path: registered.update({name.name: path}),
            },
            "vllm.v1.kv_cache_interface": {
                "KVCacheLayout": Enum("Layout", {x.name: x.value for x in KVCacheLayout})
            },
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        parent = sys.modules["vllm.v1.attention"]
        monkeypatch.setattr(
            parent, "backend", sys.modules["vllm.v1.attention.backend"], raising=False
        )
        monkeypatch.delenv("ATTNKIT_VLLM", raising=False)
        if chosen is not None:
            monkeypatch.setenv("ATTNKIT_VLLM", chosen)
        ours = [f"{BRIDGE}.{name}" for name in ("answers", "plans", "backend", "latents")]
        for name in ours:
            monkeypatch.delitem(sys.modules, name, raising=False)
        plugin.register()
        module = importlib.import_module(wanted) if chosen is not None or not cpu else None
        for name in ours:  # Taken out again with the stubs.
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
        return registered, module

    return stand_in


def test_it_answers_for_the_names_vllm_leaves_to_others(vllm):
    path, latents = f"{BACKEND}.VllmBackend", f"{LATENTS}.VllmLatentBackend"
    assert vllm()[0] == {}  # Installed beside a CPU server, and not asked for.
    registered, module = vllm("reference")
    assert registered == {"CPU_ATTN": path, "CPU_MLA": latents, "AMX_MLA": latents}
    assert module.VllmBackend.get_name() == "CPU_ATTN"
    registered, module = vllm(cpu=False)
    assert registered == {"CUSTOM": path}
    assert module.VllmBackend.get_name() == "CUSTOM"
    assert module.OURS.get_name() == "triton"
    registered, module = vllm("triton_mla", cpu=False, wanted=LATENTS)
    assert registered == {"CUSTOM": latents}
    assert module.VllmLatentBackend.get_name() == "CUSTOM"
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = re.search(r'entry-points."vllm.general_plugins"\]\nattnkit = "(.*)"', project)
    assert found is not None
    point = importlib.metadata.EntryPoint("attnkit", found[1], "vllm.general_plugins")
    assert point.load() is plugin.register


def test_other_versions_are_warned_about(vllm):
    with pytest.warns(RuntimeWarning, match=r"0\.31 to 0\.33"):
        vllm("cpu", version="0.34.1")
    with pytest.warns(RuntimeWarning, match="dev"):
        plugin.check_version("dev")


def test_answers_are_ours_in_vllms_types(vllm):
    module = vllm("cpu")[1]
    backend = module.VllmBackend
    contract = sys.modules["vllm.v1.attention.backend"]
    assert isinstance(backend.get_supported_kernel_block_sizes()[0], contract.MultipleOf)
    assert backend.supported_kv_cache_layouts()[0].name == "LBHNC"
    assert type(backend.supported_kv_cache_layouts()[0]).__name__ == "Layout"
    assert backend.supports_sink()
    assert backend.supports_block_size(128)
    assert backend.get_preferred_block_size(16) == 64
    assert backend.supports_attn_type("decoder")
    assert backend.supports_attn_type("encoder_only")
    assert not backend.supports_attn_type("encoder_decoder")
    assert "auto" in backend.supported_kv_cache_dtypes
    assert "nvfp4" not in backend.supported_kv_cache_dtypes
    plain, packed = FullAttentionSpec(), FullAttentionSpec(
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, dtype=torch.int8
    )  # fmt: skip
    assert backend.customize_spec(plain) is plain
    assert backend.customize_spec(packed).state_content_bytes == 2 * (SIZE + 4)
    with pytest.raises(UnsupportedConfiguration, match="TURBO"):
        backend.customize_spec(FullAttentionSpec(kv_quant_mode=Enum("Mode", "TURBO").TURBO))
    level = module.VllmBuilder.get_cudagraph_support(VllmConfig(), FullAttentionSpec())
    assert level is contract.AttentionCGSupport.NEVER


@pytest.mark.parametrize(("chosen", "window"), [("cpu", None), ("cpu", 5), ("reference", 5)])
def test_a_layer_gives_what_ours_gives(vllm, chosen, window):
    """Own builder, own cache write, sinks that are loaded after the layer was made."""
    module = vllm(chosen)[1]
    g = torch.Generator().manual_seed(0)
    sinks = torch.zeros(HEADS)
    impl = module.VllmBackend.get_impl_cls()(
        HEADS, SIZE, 0.3, KV_HEADS, None, window, "auto", None, "decoder", None, sinks=sinks,
        use_alibi_sqrt=False,
    )  # fmt: skip
    sinks.copy_(torch.randn(HEADS, generator=g))
    impl.process_weights_after_loading(torch.float32)
    builder = module.VllmBackend.get_builder_cls()(
        FullAttentionSpec(sliding_window=window), ["a"], VllmConfig(), torch.device("cpu"), more=1
    )
    builder.set_kernel_block_size(BLOCK)
    assert not builder.use_cascade_attention(0)
    ours = Attention(
        HEADS, SIZE, 0.3, KV_HEADS, sliding_window=window, sinks=sinks, backend="reference"
    )
    spec = ours.get_kv_cache_spec()
    assert spec is not None
    caches = [PagedKVCache({"a": spec}, num_blocks=9, poison=True)["a"] for _ in range(2)]
    for query_lens, seq_lens in (([18, 3], [18, 3]), ([1, 2], [19, 5])):
        batch = make_batch(query_lens, seq_lens, [[5, 2], [7]], BLOCK)
        theirs = SimpleNamespace(**vars(batch), only_in_theirs=1)
        plan = builder.build(0, theirs)
        n = sum(query_lens)
        q = torch.randn(n, HEADS, SIZE, generator=g)
        k, v = torch.randn(2, n, KV_HEADS, SIZE, generator=g)
        if not module.VllmBackend.forward_includes_kv_cache_update:
            impl.do_kv_cache_update(ours, k, v, caches[0], batch.slot_mapping, skip_scale=True)
        output = torch.full_like(q, torch.nan)
        assert impl.forward(ours, q, k, v, caches[0], plan, output) is output
        expected = ours(q, k, v, caches[1], ours.build(batch))
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)
    assert impl.forward(ours, q, k, v, torch.tensor([]), None, output).abs().max() == 0
    with pytest.raises(NotImplementedError):
        impl.forward(ours, q, k, v, caches[0], plan, output, torch.ones(1))
    with pytest.raises(BatchError, match="values as wide as keys"):
        impl.forward(ours, q, k, v, caches[0][..., :12], plan, output)
    impl.reserve_workspace(1)
    assert impl.set_interleaved_v_cache(True) is False


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_caches_with_codes_hold_what_ours_hold(vllm, cache_dtype):
    """vLLM gives pages of bytes, scales of no dimension, and asks for the size of packed ones."""
    module = vllm("cpu")[1]
    g = torch.Generator().manual_seed(0)
    ours = Attention(HEADS, SIZE, 0.3, KV_HEADS, kv_cache_dtype=cache_dtype, backend="reference")
    ours._k_scale.fill_(0.5), ours._v_scale.fill_(2.0)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    spec = ours.get_kv_cache_spec()
    assert spec is not None
    asked = FullAttentionSpec(kv_quant_mode=spec.kv_quant_mode, dtype=torch.uint8)
    content = module.VllmBackend.customize_spec(asked).state_content_bytes or 2 * SIZE
    theirs = torch.zeros(9, KV_HEADS, BLOCK, content, dtype=torch.uint8)
    mine = PagedKVCache({"a": spec}, num_blocks=9)["a"]
    impl = module.VllmImpl(HEADS, SIZE, 0.3, KV_HEADS, kv_cache_dtype=cache_dtype)
    builder = module.VllmBuilder(asked, ["a"], VllmConfig(), torch.device("cpu"))
    batch = make_batch([18, 3], [18, 3], [[5, 2], [7]], BLOCK)
    q, (k, v) = (
        torch.randn(21, HEADS, SIZE, generator=g),
        torch.randn(2, 21, KV_HEADS, SIZE, generator=g),
    )
    impl.do_kv_cache_update(layer, k, v, theirs, batch.slot_mapping)
    output = impl.forward(layer, q, k, v, theirs, builder.build(0, batch), torch.empty_like(q))
    torch.testing.assert_close(output, ours(q, k, v, mine, ours.build(batch)), atol=2e-6, rtol=2e-6)
    assert torch.equal(theirs[[2, 5, 7]], mine.view(torch.uint8)[[2, 5, 7]])


def test_encoder_layers_keep_no_cache(vllm):
    module = vllm("cpu")[1]
    impl = module.VllmImpl(HEADS, SIZE, 0.3, KV_HEADS, None, 5, attn_type="encoder_only")
    spec = EncoderOnlyAttentionSpec()
    builder = module.VllmBuilder(spec, ["a"], VllmConfig(), torch.device("cpu"))
    batch = make_batch([7, 3], [7, 3], [[1], [2]], BLOCK).replace(causal=False)
    q, (k, v) = torch.randn(10, HEADS, SIZE), torch.randn(2, 10, KV_HEADS, SIZE)
    impl.do_kv_cache_update(None, k, v, torch.tensor([]), batch.slot_mapping)  # vLLM calls it.
    output = impl.forward(None, q, k, v, torch.tensor([]), builder.build(0, batch), q.clone())
    ours = Attention(
        HEADS, SIZE, 0.3, KV_HEADS, sliding_window=5, attn_type="encoder_only", backend="reference"
    )
    expected = ours(q, k, v, torch.tensor([]), ours.build(batch))
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)


LATENT: dict[str, Any] = {
    "num_heads": HEADS, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip


def latent_impl(module: Any, projection: torch.nn.Module, **changes: Any) -> Any:
    """Made as vLLM's MLA layer makes it."""
    return module.VllmLatentBackend.get_impl_cls()(
        **{
            **LATENT, "head_size": 40, "qk_head_dim": 24, "scale": 0.3, "num_kv_heads": 1,
            "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
            "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None,
            "kv_b_proj": projection, "indexer": None, **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize(("chosen", "cache_dtype"), [("cpu_mla", "auto"), ("reference_mla", "fp8")])
def test_a_layer_over_latents_gives_what_ours_gives(vllm, chosen, cache_dtype):
    """vLLM absorbs queries and expands what decodes attended to; its projection is loaded late."""
    module = vllm(chosen, wanted=LATENTS)[1]
    backend = module.VllmLatentBackend
    assert backend.is_mla()
    g = torch.Generator().manual_seed(0)
    projection = torch.nn.Linear(32, HEADS * (16 + 12), bias=False)
    impl = latent_impl(module, projection, kv_cache_dtype=cache_dtype)
    with torch.no_grad():
        projection.weight.copy_(torch.randn(projection.weight.shape, generator=g) / 6)
    impl.process_weights_after_loading(torch.float32)
    sizes = {k: v for k, v in LATENT.items() if k not in ("num_heads", "q_lora_rank")}
    ours = MLAAttention(
        HEADS, MLADimensions(**sizes), projection, scale=0.3, kv_cache_dtype=cache_dtype,
        backend="reference_mla", prefill_backend="torch", block_size=BLOCK,
    )  # fmt: skip
    spec = ours.get_kv_cache_spec()
    assert spec is not None
    asked = MLAAttentionSpec(
        head_size=40,
        dtype=spec.dtype,
        kv_quant_mode=spec.kv_quant_mode,
        cache_dtype_str=cache_dtype,
    )
    builder = backend.get_builder_cls()(asked, ["a"], VllmConfig(), torch.device("cpu"))
    assert builder.get_cudagraph_support(VllmConfig(), asked).name == "NEVER"
    mine, theirs = (PagedKVCache({"a": spec}, num_blocks=13, poison=True)["a"] for _ in range(2))
    w, tables = (
        projection.weight.view(HEADS, 28, 32),
        [[1], [2], [3, 4, 5, 6, 11], [7, 8, 9, 10, 12]],
    )
    for query_lens, seq_lens in (([1, 1, 40, 70], [1, 1, 40, 70]), ([1, 2, 36], [2, 3, 76])):
        batch = make_batch(query_lens, seq_lens, tables[: len(query_lens)], BLOCK)
        plan = builder.build(0, SimpleNamespace(**vars(batch), only_in_theirs=1))
        n = sum(query_lens)
        q = torch.randn(n, HEADS, 24, generator=g)
        kv_c, k_pe = torch.randn(n, 32, generator=g), torch.randn(n, 1, 8, generator=g)
        written = (kv_c, k_pe, theirs[:, 0], batch.slot_mapping, cache_dtype, ours._k_scale)
        impl.do_kv_cache_update(*written, skip_scale=True)
        output = torch.full((n, HEADS * 12), torch.nan)
        d = plan.num_decode_tokens
        assert d < n
        cache = theirs[:, 0]
        impl.forward_mha(q[d:], kv_c[d:], k_pe[d:], cache, plan, ours._k_scale, output[d:])
        if d:
            absorbed = torch.einsum("thp,hpl->thl", q[:d, :, :16], w[:, :16])
            attended, lse = impl.forward_mqa((absorbed, q[:d, :, 16:]), cache, plan, ours)
            assert lse is None
            output[:d] = torch.einsum("thl,hvl->thv", attended, w[:, 16:]).flatten(1)
        expected = ours(q, kv_c, k_pe, mine, ours.build(batch))
        torch.testing.assert_close(output, expected.flatten(1), atol=5e-6, rtol=5e-6)
    impl.reserve_workspace()
    assert not impl.fused_output_quant_supported("any")


def test_layers_over_latents_that_cannot_be_served_are_refused(vllm):
    module = vllm("cpu_mla", wanted=LATENTS)[1]
    projection = torch.nn.Linear(32, HEADS * 28, bias=False)
    for given, message in (
        ({"indexer": SimpleNamespace(topk_indices_buffer=0)}, "sparse"),
        ({"sliding_window": 9}, "sliding_window is not served over latents"),
        ({"topk_indices_buffer": 1}, "topk_indices_buffer is not served"),
        ({"kv_cache_dtype": "fp8_ds_mla", "kv_lora_rank": 512}, "caches of auto"),
    ):
        with pytest.raises(UnsupportedConfiguration, match=message):
            latent_impl(module, projection, **given)
    plans = sys.modules[f"{BRIDGE}.plans"]
    with pytest.raises(UnsupportedConfiguration, match="not MLAAttentionSpec"):
        plans.our_spec(MLAAttentionSpec(non_causal_multi_token_decode=True))


def test_layers_of_the_other_kind_are_refused(vllm):
    """A named backend runs or raises: vLLM's own does not take its place in silence."""
    module = vllm("cpu_mla")[1]
    with pytest.raises(UnsupportedConfiguration, match=r"cpu_mla cannot serve.*or name another"):
        module.VllmImpl(HEADS, SIZE, 0.3)
    module = vllm("cpu", wanted=LATENTS)[1]
    with pytest.raises(UnsupportedConfiguration, match=r"cpu cannot serve.*or name another"):
        latent_impl(module, torch.nn.Linear(32, HEADS * 28, bias=False))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attn_type": "encoder_decoder"}, "decoder and encoder_only layers, not encoder_decoder"),
        ({"kv_cache_dtype": "nvfp4", "head_size": 16}, "caches of auto"),
        ({"chunk_lookback": 3}, "chunk_lookback is not known"),
        ({"head_size": 72}, "head size 72"),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused_when_it_is_made(vllm, given, message):
    """On a CPU nobody asks the backend before."""
    module = vllm("cpu")[1]
    if "head_size" in given:
        narrow = type("Narrow", (module.OURS,), {"get_supported_head_sizes": lambda: [64]})
        module.OURS = sys.modules[f"{BRIDGE}.answers"].OURS = narrow
    arguments = {"num_heads": HEADS, "head_size": SIZE, "scale": 0.3, **given}
    with pytest.raises(UnsupportedConfiguration, match=message):
        module.VllmImpl(**arguments)


def test_batches_and_groups_of_other_kinds_are_refused(vllm):
    module = vllm("cpu")[1]
    device = torch.device("cpu")
    with pytest.raises(UnsupportedConfiguration, match="MambaSpec"):
        module.VllmBuilder(MambaSpec(), ["a"], VllmConfig(), device)
    spread = VllmConfig(parallel_config=ParallelConfig(decode_context_parallel_size=2))
    with pytest.raises(UnsupportedConfiguration, match="over ranks"):
        module.VllmBuilder(FullAttentionSpec(), ["a"], spread, device)
    builder = module.VllmBuilder(FullAttentionSpec(), ["a"], VllmConfig(), device)
    refuses = {"supports_rswa": classmethod(lambda cls: False)}
    sys.modules[f"{BRIDGE}.plans"].OURS = type("Narrow", (module.OURS,), refuses)
    batch = make_batch([1], [1], [[1]], BLOCK).replace(rswa_prefix_lens=torch.ones(1))
    with pytest.raises(UnsupportedConfiguration, match="rswa_prefix_lens"):
        builder.build(0, SimpleNamespace(**vars(batch)))
