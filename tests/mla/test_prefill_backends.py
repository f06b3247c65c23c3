"""Who prefills is a choice of its own: each passes the kit's prefills, and says why it cannot."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rival_doubles as doubles
from attnkit import PagedKVCache, make_batch
from attnkit.backends import flash_attn, flashinfer, flashinfer_mla_prefill
from attnkit.backends.flash_attn_mla_prefill import FlashAttnMLAPrefill
from attnkit.backends.flashinfer_mla_prefill import FlashInferMLAPrefill
from attnkit.conformance.checks import run_and_judge
from attnkit.conformance.mla.cases import all_mla_cases
from attnkit.conformance.mla.subject import MLASubject
from attnkit.contract import DeviceCapability, MLADimensions
from attnkit.errors import UnknownBackend, UnsupportedConfiguration
from attnkit.mla.prefill_backend import MLAPrefillBackend
from attnkit.mla_layer import MLAAttention

SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
CASES = (
    "expanded-mixed-fp32", "expanded-mixed-bf16", "expanded-mixed-fp16", "peaked-prefill-bf16",
    "small_workspace-extend-fp32", "small_workspace-extend-bf16", "no_key_at_all-two_pages",
    "more_queries_than_keys-two_pages", "contexts_here_and_there-two_pages", "fp8-in_pieces",
    "latent_448_64_64-bf16", "long_extend-two_pages", "empty_first-two_pages",
)  # fmt: skip


def layer(prefill_backend: str | type[MLAPrefillBackend] = "auto", **changes) -> MLAAttention:
    kv_b_proj = nn.Linear(32, 4 * 40, bias=False)
    return MLAAttention(4, SIZES, kv_b_proj, prefill_backend=prefill_backend, **changes)


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_prefills_of_cpu_mla_by_another(name: str, case: str) -> None:
    subject = MLASubject.of("cpu_mla", "cpu")
    found = {c.name: c for c in all_mla_cases(subject.basis())}[case]
    made = subject.layer(found, prefill_backend=name)
    assert made.impl.prefill_backend.get_name() == name
    run_and_judge(subject, made, subject.inputs(made, found))


class FlashAttnHere(FlashAttnMLAPrefill):
    unavailable_reason = classmethod(lambda cls: None)
    supports_compute_capability = classmethod(lambda cls, capability: True)
    supports_dtype = classmethod(lambda cls, dtype: True)


class FlashInferHere(FlashInferMLAPrefill):
    unavailable_reason = classmethod(lambda cls: None)
    supports_compute_capability = classmethod(lambda cls, capability: True)
    supports_dtype = classmethod(lambda cls, dtype: True)
    supports_dimensions = classmethod(lambda cls, dimensions: None)


LIBRARIES = [
    pytest.param(FlashAttnHere, doubles.dao_flash_attention_3, id="dao-3"),
    pytest.param(FlashAttnHere, doubles.vllm_flash_attention, id="vllm-3"),
    pytest.param(FlashAttnHere, doubles.flash_attention_2, id="dao-2"),
    pytest.param(FlashInferHere, doubles.flashinfer, id="flashinfer"),
]


@pytest.mark.parametrize(("prefill", "double"), LIBRARIES)
def test_a_library_passes_the_kits_prefills_over_its_double(
    prefill: type[MLAPrefillBackend], double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doubles have the published signatures, so the kit judges what their arguments say: lengths,
    scale, masks, sizes of values, and bases of the LSE."""
    library = double()
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setattr(flash_attn, "is_installed", lambda name: name == library.__name__)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 64)
    flashinfer_mla_prefill._wrappers.cache_clear()
    subject = MLASubject.of("cpu_mla", "cpu")
    cases = {c.name: c for c in all_mla_cases(subject.basis())}
    unequal = replace(cases["small_workspace-extend-bf16"], qk_nope_head_dim=64, v_head_dim=16)
    for case in (*(cases[name] for name in CASES), unequal):
        made = subject.layer(case, prefill_backend=prefill)
        run_and_judge(subject, made, subject.inputs(made, case))
    flashinfer_mla_prefill._wrappers.cache_clear()


def test_libraries_say_why_they_do_not_serve() -> None:
    said = str(layer(backend="cpu_mla").prefill_selection)
    for reason in (
        r"flash_attn: refused: none of .* is installed; device cpu .*; dtype float32",
        r"flashinfer: refused: flashinfer is not installed; .*; heads of 24 / 24 are not supported",
    ):
        assert re.search(reason, said), said
    wide = MLADimensions(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=32)
    assert "no larger than keys" in str(FlashAttnMLAPrefill.supports_dimensions(wide))
    deepseek = MLADimensions(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    for library in (FlashAttnMLAPrefill, FlashInferMLAPrefill):
        reasons = library.validate_configuration(
            DeviceCapability(9, 0), torch.bfloat16, deepseek, here=False
        )
        assert reasons == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["flash_attn", "flashinfer", "hopper"])
def test_prompts_on_a_card_are_those_of_the_reference(name: str) -> None:
    """DeepSeek's heads, a context in chunks, one request of it without any; with LSE."""
    deepseek = MLADimensions(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    torch.manual_seed(0)
    device = torch.device("cuda")
    kv_b_proj = nn.Linear(512, 16 * 256, bias=False, device=device, dtype=torch.bfloat16)
    nn.init.normal_(kv_b_proj.weight, std=512**-0.5)
    batch = make_batch([100, 64, 1, 40], [356, 64, 9, 240], TABLES, 16, device=device)
    rows = [torch.randn(205, *n, device=device).bfloat16() for n in ((16, 192), (512,), (64,))]
    answers = []
    for backend, prefill in (("hopper_mla", name), ("reference_mla", "auto")):
        made = MLAAttention(
            16,
            deepseek,
            kv_b_proj,
            dtype=torch.bfloat16,
            device=device,
            backend=backend,
            prefill_backend=prefill,
            return_lse=True,
        )
        cache = PagedKVCache({made.layer_name: made.get_kv_cache_spec()}, 64, device=device)
        pages = cache[made.layer_name]
        g = torch.Generator(device).manual_seed(1)
        pages.copy_(torch.randn(pages.shape, generator=g, device=device))
        out, lse = made(*rows, pages, made.build(batch))
        answers.append((out.float(), lse))
    (out, lse), (right, right_lse) = answers
    torch.testing.assert_close(out, right, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, right_lse, atol=1e-2, rtol=1e-2)


TABLES = [list(range(1, 24)), [24, 25, 26, 27], [28], list(range(30, 45))]


def test_auto_is_the_backends_own_and_tells_of_the_others() -> None:
    made = layer(backend="cpu_mla")
    assert made.prefill_selection is not None
    assert made.prefill_selection.name == "cpu"
    said = str(made.prefill_selection)
    assert "cpu: chosen (cost 1)" in said
    assert "torch: possible" in said
    assert layer(backend="reference_mla").prefill_selection.name == "reference"


def test_a_named_one_runs_or_says_why_not() -> None:
    with pytest.raises(
        UnknownBackend,
        match="'cutlass'; use auto, hopper, triton, cpu, flash_attn, flashinfer, torch, ref",
    ):
        layer("cutlass")

    class Choosy(MLAPrefillBackend):
        run_prefill_new_tokens = run_prefill_context_chunk = None

        @staticmethod
        def get_name() -> str:
            return "choosy"

        @classmethod
        def supports_dtype(cls, dtype: torch.dtype) -> bool:
            return dtype is torch.bfloat16

        @classmethod
        def supports_dimensions(cls, dimensions: MLADimensions) -> str | None:
            return f"{dimensions} is too small"

    with pytest.raises(UnsupportedConfiguration) as refusal:
        layer(Choosy)
    assert refusal.value.reasons == ("dtype float32 is not supported", f"{SIZES} is too small")
