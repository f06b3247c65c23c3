"""Prompts over latents in the emulator: pieces of context, cut tiles, both output dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnkit.backends.hopper.mla import HopperMLABackend
from attnkit.backends.hopper.mla_prefill import HopperMLAPrefill
from attnkit.conformance.checks import check_case, run_and_judge
from attnkit.conformance.mla.subject import MLASubject
from attnkit.contract import DeviceCapability, MLADimensions
from attnkit.mla.plan import ContextChunk

DEEPSEEK = MLADimensions(
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
LONG = {"query_lens": (150, 9, 40), "seq_lens": (150, 300, 120)}
"""Two tiles of the diagonal, contexts, and a request whose end lies inside a tile of the next one's."""

CASES = {
    "in_one_piece": {"query_lens": (150, 9), "seq_lens": (150, 9)},
    "in_pieces": {**LONG, "workspace_pages": 3},
    "no_key_at_all": {"query_lens": (9, 12, 20), "seq_lens": (9, 0, 70), "workspace_pages": 2},
    "no_query": {"query_lens": (0, 9, 0), "seq_lens": (40, 30, 64), "workspace_pages": 1},
    "before_the_first_key": {"query_lens": (12, 5), "seq_lens": (0, 0)},
    "negative_scale": {**LONG, "scale": -0.07},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_prompts_are_right(emulated_mla: type[HopperMLABackend], name: str, dtype: str) -> None:
    subject = MLASubject.of(emulated_mla)
    fields = {"num_heads": 2, "block_size": 16, "decode_query_len": 1, **CASES[name]}
    case = subject.plain_case(name, dtype=dtype, return_lse=True, **fields)
    made = subject.layer(case)
    assert isinstance(made.impl.prefill_backend, HopperMLAPrefill)
    run_and_judge(subject, made, subject.inputs(made, case))


def test_a_request_without_keys_sees_none_of_anothers(
    emulated_mla: type[HopperMLABackend],
) -> None:
    chunk = ContextChunk(
        rows=slice(0, 6),
        query_start_loc=torch.tensor([0, 2, 6], dtype=torch.int32),
        kv_lens=torch.tensor([16, 0], dtype=torch.int32),
        block_table=torch.zeros(2, 1, dtype=torch.int32),
        pages=torch.tensor([0]),
        max_query_len=4,
        max_kv_len=16,
        query_start_loc_cpu=np.array([0, 2, 6]),
        kv_lens_cpu=np.array([16, 0]),
    )
    new = {"dtype": torch.bfloat16}
    key, value = torch.randn(1, 16, 1, 192, **new), torch.full((1, 16, 1, 128), torch.nan, **new)
    output, lse = torch.full((6, 1, 128), 7.0), torch.full((6, 1), 7.0)
    backend = HopperMLAPrefill(1, 0.07, DEEPSEEK)
    query = torch.randn(6, 1, 192, **new)
    backend.run_prefill_context_chunk(query, key, value, chunk, output, lse)
    assert output[:2].isnan().all()
    assert (output[2:] == 0).all()
    assert (lse[2:] == -torch.inf).all()


def test_heads_of_other_sizes_go_to_the_portable_kernel(
    emulated_mla: type[HopperMLABackend],
) -> None:
    subject = MLASubject.of(emulated_mla)
    sizes = MLADimensions(kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=32)
    case = subject.plain_case(
        "other heads", query_lens=(20, 9), seq_lens=(20, 40), dimensions=sizes
    )
    assert subject.layer(case).impl.prefill_backend.get_name() == "triton"
    check_case(subject, case)


def test_it_says_what_it_does_not_take() -> None:
    def reasons(**changes: object) -> str:
        asked = {
            "device_capability": DeviceCapability(9, 0),
            "dtype": torch.bfloat16,
            "dimensions": DEEPSEEK,
        }
        found = HopperMLAPrefill.validate_configuration(**{**asked, **changes}, here=False)
        return "; ".join(found)

    assert reasons() == ""
    assert "float32" in reasons(dtype=torch.float32)
    assert "sm_80" in reasons(device_capability=DeviceCapability(8, 0))
    small = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
    assert "heads of 24 / 24 are not supported (allowed: 192 / 128)" in reasons(dimensions=small)
