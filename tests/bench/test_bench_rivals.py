"""Rivals: what is missing is said, and adapters pass what the libraries' arguments mean."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import rival_doubles as doubles
from attnkit.backends import flashinfer as flashinfer_backend
from attnkit.bench.contender import Contender, NotInstalled, Refused
from attnkit.bench.inputs import Inputs
from attnkit.bench.rivals import RIVALS, flash_attention, flashinfer, pages, rivals, vllm
from attnkit.bench.verify import answer, check
from attnkit.bench.workloads import (
    LayerShape,
    Workload,
    build,
    decode,
    mixed,
    prefill,
    verify,
    write,
)
from attnkit.contract import KVCacheLayout
from attnkit.errors import ConfigurationError

LAYER = LayerShape(num_heads=6, num_kv_heads=2, head_size=16, block_size=16, dtype="float32")
ATTENTION = [
    prefill(2, 37, LAYER),
    prefill(1, 30, LAYER, context=21),
    decode(5, 45, LAYER),
    verify(3, 4, 63, LAYER),
    mixed(33, 15, 5, 50, LAYER),
]
UNIFORM = [w for w in ATTENTION if w.uniform]


def named(name: str) -> Contender:
    (found,) = rivals(name)
    return found


def error_of(contender: Contender, workload: Workload, layout: KVCacheLayout) -> float:
    inputs = Inputs(workload, "cpu", seed=5)
    inputs.pages(layout)
    right = answer(inputs) if workload.kind in ("prefill", "decode", "verify", "mixed") else None
    return check(inputs, contender.prepare(inputs), right)


def test_every_name_of_the_table_is_a_rival_of_that_name() -> None:
    found = rivals("all")
    assert [c.name for c in found] == list(RIVALS)
    assert all(c.is_rival for c in found)
    assert rivals("none") == []


def test_an_unknown_rival_is_named_beside_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"no rival is called fa9.*flashinfer"):
        rivals("sdpa,fa9")


@pytest.mark.parametrize(
    "name", [n for n in RIVALS if n not in ("sdpa", "sdpa-gqa", "torch-write", "vllm-cpu")]
)
def test_rivals_of_a_gpu_are_not_installed_on_a_cpu(name: str) -> None:
    with pytest.raises(NotInstalled, match="needs a CUDA device"):
        named(name).prepare(Inputs(decode(2, 20, LAYER), "cpu"))


def test_a_library_that_is_missing_is_not_installed() -> None:
    inputs = Inputs(decode(2, 20, LAYER), "cpu")
    with pytest.raises(NotInstalled, match=r"no_such_library\.attention is not installed"):
        pages.need("cpu", inputs, "no_such_library.attention")


def test_a_library_that_is_broken_is_not_called_missing(monkeypatch, tmp_path) -> None:
    (tmp_path / "broken_rival.py").write_text("import a_dependency_that_is_gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    inputs = Inputs(decode(2, 20, LAYER), "cpu")
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_gone"):
        pages.need("cpu", inputs, "broken_rival")


@pytest.mark.parametrize("workload", UNIFORM, ids=lambda w: w.name)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC])
def test_sdpa_is_right_on_every_uniform_batch(workload: Workload, layout: KVCacheLayout) -> None:
    assert error_of(named("sdpa"), workload, layout) < 1e-5


@pytest.mark.parametrize("workload", [decode(5, 45, LAYER), verify(3, 4, 63, LAYER)])
def test_sdpa_with_torchs_own_grouping_is_right(workload: Workload) -> None:
    assert error_of(named("sdpa-gqa"), workload, KVCacheLayout.LBNHC) < 1e-5


def test_sdpa_refuses_what_it_cannot_do() -> None:
    with pytest.raises(Refused, match="equal lengths"):
        named("sdpa").prepare(Inputs(mixed(33, 15, 5, 50, LAYER), "cpu"))
    with pytest.raises(Refused, match="attention only"):
        named("sdpa").prepare(Inputs(build(4, 30, LAYER), "cpu"))
    with pytest.raises(Refused, match="short queries"):
        named("sdpa-gqa").prepare(Inputs(prefill(2, 37, LAYER), "cpu"))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_torch_writes_every_new_token(kv_cache_dtype: str) -> None:
    layer = LayerShape(num_heads=4, num_kv_heads=2, head_size=8, kv_cache_dtype=kv_cache_dtype)
    assert error_of(named("torch-write"), write(3, 20, layer), KVCacheLayout.LBHNC) == 0.0


def lend(monkeypatch, adapters: ModuleType, library: ModuleType) -> None:
    """Let adapters find a library's double instead of the library."""
    monkeypatch.setattr(adapters, "need", lambda device, inputs, *names: library)


@pytest.mark.parametrize("workload", ATTENTION, ids=lambda w: w.name)
@pytest.mark.parametrize("name", ["fa3", "fa3-own"])
@pytest.mark.parametrize("library", [doubles.vllm_flash_attention, doubles.dao_flash_attention_3])
def test_flash_attention_3_is_called_as_it_says(monkeypatch, workload, name, library) -> None:
    lend(monkeypatch, flash_attention, library())
    for layout in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC):
        assert error_of(named(name), workload, layout) < 1e-5


@pytest.mark.parametrize("workload", ATTENTION[:2], ids=lambda w: w.name)
@pytest.mark.parametrize("library", [doubles.vllm_flash_attention, doubles.dao_flash_attention_3])
def test_flash_attention_3_without_pages_is_called_as_it_says(
    monkeypatch, workload, library
) -> None:
    lend(monkeypatch, flash_attention, library())
    assert error_of(named("fa3-dense"), workload, KVCacheLayout.LBHNC) < 1e-5


@pytest.mark.parametrize("block_size", [16, 256])
def test_flash_attention_2_takes_its_pages_or_none(monkeypatch, block_size: int) -> None:
    layer = LayerShape(
        num_heads=6, num_kv_heads=2, head_size=16, block_size=block_size, dtype="float32"
    )
    lend(monkeypatch, flash_attention, doubles.flash_attention_2())
    assert error_of(named("fa2"), prefill(2, 300, layer), KVCacheLayout.LBNHC) < 1e-5
    if block_size == 16:
        with pytest.raises(Refused, match="multiples of 256"):
            error_of(named("fa2"), decode(2, 300, layer), KVCacheLayout.LBNHC)
    else:
        assert error_of(named("fa2"), decode(2, 300, layer), KVCacheLayout.LBNHC) < 1e-5


def test_the_plan_of_flash_attention_3_is_what_build_times(monkeypatch) -> None:
    lend(monkeypatch, flash_attention, doubles.vllm_flash_attention())
    plan = named("fa3").prepare(Inputs(build(4, 30, LAYER), "cpu")).run()
    assert plan == ("plan", 6, 2, 16, 16)
    with pytest.raises(Refused, match="no plan"):
        named("fa3-own").prepare(Inputs(build(4, 30, LAYER), "cpu"))


@pytest.mark.parametrize("workload", ATTENTION, ids=lambda w: w.name)
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-own"])
def test_flashinfer_is_called_as_it_says(monkeypatch, workload, name) -> None:
    lend(monkeypatch, flashinfer, doubles.flashinfer())
    monkeypatch.setattr(flashinfer_backend, "_WORKSPACE_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for layout in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC):
        assert error_of(named(name), workload, layout) < 1e-5


def test_flashinfer_reads_narrow_pages(monkeypatch) -> None:
    layer = LayerShape(
        num_heads=6, num_kv_heads=2, head_size=16, dtype="float32", kv_cache_dtype="fp8"
    )
    lend(monkeypatch, flashinfer, doubles.flashinfer())
    monkeypatch.setattr(flashinfer_backend, "_WORKSPACE_BYTES", 64)
    assert error_of(named("flashinfer"), decode(3, 45, layer), KVCacheLayout.LBNHC) < 1e-5


@pytest.mark.parametrize("workload", ATTENTION, ids=lambda w: w.name)
def test_vllm_triton_is_called_as_it_says(monkeypatch, workload) -> None:
    lend(monkeypatch, vllm, doubles.vllm_triton())
    for layout in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC):
        assert error_of(named("vllm-triton"), workload, layout) < 1e-5


def test_shared_pages_are_views_and_own_pages_are_not() -> None:
    inputs = Inputs(decode(2, 20, LAYER), "cpu")
    storage = inputs.pages(KVCacheLayout.LBHNC).untyped_storage().data_ptr()
    k, v = pages.shared_pages(inputs)
    assert k.shape == v.shape == (5, 16, 2, 16)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == storage
    own = pages.own_pages(inputs)
    assert own.is_contiguous()
    assert torch.equal(own[:, 1], v)


def test_formats_with_scales_beside_the_codes_have_no_pages_for_rivals() -> None:
    layer = LayerShape(kv_cache_dtype="int8_per_token_head")
    with pytest.raises(Refused, match="int8_per_token_head"):
        pages.shared_pages(Inputs(decode(1, 20, layer), "cpu"))
