"""Who prefills is a choice of its own: each passes the kit's prefills, and says why it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attnkit.conformance.checks import run_and_judge
from attnkit.conformance.mla.cases import all_mla_cases
from attnkit.conformance.mla.subject import MLASubject
from attnkit.contract import MLADimensions
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
        UnknownBackend, match="'cutlass'; use auto, hopper, triton, cpu, torch, reference"
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
