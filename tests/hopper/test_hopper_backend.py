"""What the backend says of itself, on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attnkit.backends.hopper.backend import HopperBackend
from attnkit.backends.hopper.impl import HopperImpl
from attnkit.backends.hopper.launch import check_strides
from attnkit.contract import DeviceCapability
from attnkit.errors import BatchError, UnsupportedConfiguration
from attnkit.selection import AttentionRequest, decide, reasons_against

HOPPER = DeviceCapability(9, 0)


def _request(**fields: object) -> AttentionRequest:
    values = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "block_size": 16,
        "device_capability": HOPPER,
    }
    return AttentionRequest(**{**values, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_size": 96}, "head size 96"),
        ({"dtype": torch.float32}, "float32"),
        ({"block_size": 8}, "block size 8"),
        ({"device_capability": DeviceCapability(8, 0)}, "sm_80"),
        ({"device_capability": DeviceCapability(10, 0)}, "sm_100"),
        ({"device_capability": DeviceCapability.cpu()}, "cpu"),
        ({"kv_cache_dtype": "float16"}, "differs from the layer's bfloat16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"head_size_v": 64}, "value head size 64"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"use_batch_invariant": True}, "batch invariance"),
    ],
)
def test_what_the_kernels_do_not_do_is_a_reason(fields: dict, words: str) -> None:
    reasons = reasons_against(HopperBackend, _request(**fields), here=False)
    assert len(reasons) == 1, reasons
    assert words in reasons[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"head_size": 256, "block_size": 256, "has_sink": True, "return_lse": True},
        {"block_size": 48, "has_sliding_window": True, "has_logits_soft_cap": True},
        {"use_alibi": True, "use_alibi_sqrt": True, "use_non_causal": True},
        {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
    ],
)
def test_what_they_do_has_no_reason(fields: dict) -> None:
    assert not reasons_against(HopperBackend, _request(**fields), here=False)


def test_groups_larger_than_a_tile_are_left_to_others() -> None:
    """Selection asks before it knows heads, so the cost says it, and the impl refuses."""
    request = _request(num_heads=71, num_kv_heads=1)
    assert HopperBackend.estimate_cost(request) == float("inf")
    with pytest.raises(UnsupportedConfiguration, match="71 query heads"):
        HopperImpl(71, 64, 0.1, 1)


def test_coded_groups_fit_the_rows_of_a_warps_product() -> None:
    request = _request(num_heads=32, num_kv_heads=1, kv_cache_dtype="fp8")
    assert HopperBackend.estimate_cost(request) == float("inf")
    with pytest.raises(UnsupportedConfiguration, match=r"32 query heads .* fp8 at most 16"):
        HopperImpl(32, 64, 0.1, 1, kv_cache_dtype="fp8")
    with pytest.raises(UnsupportedConfiguration, match="int8_per_token_head is not one of auto"):
        HopperImpl(4, 64, 0.1, 1, kv_cache_dtype="int8_per_token_head")


def test_without_a_gpu_it_says_why_it_cannot_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert HopperBackend.unavailable_reason() == "torch sees no CUDA device"
    (decision,) = decide(_request(), "attnkit.backends.hopper.backend:HopperBackend")
    assert any("no CUDA device" in reason for reason in decision.reasons)


def test_the_host_files_need_neither_triton_nor_a_gpu() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from attnkit.backends.hopper.backend import HopperBackend as B\n"
        "assert B.supports_lse() and B.get_builder_cls() and B.get_impl_cls()(8, 64, 0.1, 2)\n"
        "assert 'triton.language' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, 2, 60, dtype=torch.bfloat16),
        torch.zeros(4, 2, 128, dtype=torch.bfloat16)[..., 4:],
        torch.zeros(4, 2, 128, dtype=torch.bfloat16)[..., ::2],
    ],
)
def test_strides_the_copy_engine_cannot_take_are_named(x: torch.Tensor) -> None:
    with pytest.raises(BatchError, match=r"query has strides \(\d+, \d+, \d\)"):
        check_strides("query", x, BatchError)


def test_slices_of_one_projection_can_be_read() -> None:
    fused = torch.zeros(6, 12, 64, dtype=torch.bfloat16)
    check_strides("query", fused[:, 2:10], BatchError)
