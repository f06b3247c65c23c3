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

from attnkit import Attention, PagedKVCache, make_batch
from attnkit.contract import KVCacheLayout, KVQuantMode, ParallelConfig, VllmConfig
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.integrations import vllm as plugin

BACKEND = "attnkit.integrations.vllm.backend"
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


class StubBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.layer_names = layer_names


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Stands in for vLLM: returns what was registered, and the backend's module."""

    def stand_in(
        chosen: str | None = None, *, cpu: bool = True, version: str = "0.33.0"
    ) -> tuple[dict[str, str], Any]:
        registered: dict[str, str] = {}
        names = Enum("AttentionBackendEnum", {"CPU_ATTN": "a", "CUSTOM": "b"})
        modules: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": version},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.backend": {
                "AttentionBackend": type("AttentionBackend", (), {}),
                "AttentionImpl": type("AttentionImpl", (), {}),
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
        monkeypatch.delitem(sys.modules, BACKEND, raising=False)
        plugin.register()
        module = importlib.import_module(BACKEND) if chosen is not None or not cpu else None
        monkeypatch.setitem(sys.modules, BACKEND, module)  # Taken out again with the stubs.
        return registered, module

    return stand_in


def test_it_answers_for_the_names_vllm_leaves_to_others(vllm):
    path = f"{BACKEND}.VllmBackend"
    assert vllm()[0] == {}  # Installed beside a CPU server, and not asked for.
    registered, module = vllm("reference")
    assert registered == {"CPU_ATTN": path}
    assert module.VllmBackend.get_name() == "CPU_ATTN"
    registered, module = vllm(cpu=False)
    assert registered == {"CUSTOM": path}
    assert module.VllmBackend.get_name() == "CUSTOM"
    assert module.OURS.get_name() == "triton"
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


def test_backends_for_latents_are_named_with_what_vllm_does_then(vllm):
    with pytest.raises(UnsupportedConfiguration, match=r"cpu_mla.*keep vLLM's own"):
        vllm("cpu_mla")


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
        module.OURS = type("Narrow", (module.OURS,), {"get_supported_head_sizes": lambda: [64]})
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
    module.OURS = type("Narrow", (module.OURS,), refuses)
    batch = make_batch([1], [1], [[1]], BLOCK).replace(rswa_prefix_lens=torch.ones(1))
    with pytest.raises(UnsupportedConfiguration, match="rswa_prefix_lens"):
        builder.build(0, SimpleNamespace(**vars(batch)))
