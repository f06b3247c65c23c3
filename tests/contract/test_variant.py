"""AttentionVariant and DeviceCapability: values are whole and checked when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnkit.contract import AttentionType, AttentionVariant, DeviceCapability
from attnkit.errors import ConfigurationError


def _variant(**arguments: Any) -> AttentionVariant:
    return AttentionVariant.from_impl_args(**{"num_heads": 3, "scale": 0.5, **arguments})


def test_arguments_become_tensors_and_absent_ones_none() -> None:
    plain = _variant()
    assert (
        plain.alibi_slopes is plain.sinks is plain.logits_soft_cap is plain.sliding_window is None
    )
    assert plain.attn_type is AttentionType.DECODER
    slopes = _variant(alibi_slopes=[1, 0.5, 0.25]).alibi_slopes
    assert slopes is not None
    assert slopes.dtype == torch.float32
    sinks = torch.tensor([0.0, -math.inf, 9.0], dtype=torch.bfloat16, requires_grad=True)
    made = _variant(sinks=sinks).sinks
    assert made is not None
    assert made.tolist() == [0.0, -math.inf, 9.0]
    assert not made.requires_grad


@pytest.mark.parametrize("off", [0, 0.0, None])
def test_a_cap_of_zero_is_no_cap(off: float | None) -> None:
    assert _variant(logits_soft_cap=off).logits_soft_cap is None


@pytest.mark.parametrize("kind", AttentionType)
def test_types_are_taken_as_strings(kind: AttentionType) -> None:
    assert _variant(attn_type=kind.value).attn_type is kind


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"scale": math.nan}, "scale nan"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"scale": 1e39}, "scale 1e.39 is not allowed; give a number that float32 holds"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap 1e.39 .* float32"),
        ({"logits_soft_cap": 1e-46}, "logits_soft_cap 1e-46 .* float32"),
        ({"logits_soft_cap": -1}, "logits_soft_cap -1"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap inf"),
        ({"logits_soft_cap": math.nan}, "logits_soft_cap nan"),
        ({"alibi_slopes": [1.0, 2.0]}, r"alibi_slopes has shape \(2,\), but the layer has 3 heads"),
        ({"alibi_slopes": [1.0, 2.0, math.nan]}, "alibi_slopes contains nan"),
        ({"alibi_slopes": [1.0, 2.0, -math.inf]}, "alibi_slopes contains -inf"),
        ({"sinks": torch.tensor([0.0, math.inf, 0.0])}, "sinks contains inf"),
        ({"sinks": torch.zeros(3, 1)}, r"sinks has shape \(3, 1\)"),
        ({"use_alibi_sqrt": True}, "needs alibi_slopes"),
        ({"attn_type": "sideways"}, "'sideways' is not known; use one of decoder, encoder"),
    ],
)
def test_values_that_mean_nothing_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        _variant(**wrong)


def test_it_moves_only_where_something_moves() -> None:
    variant = _variant(sinks=torch.zeros(3), sliding_window=4, logits_soft_cap=2.0)
    assert variant.to("cpu") is variant
    moved = variant.to("meta")
    assert moved.sinks is not None
    assert moved.sinks.device.type == "meta"
    assert (moved.scale, moved.sliding_window, moved.logits_soft_cap) == (0.5, 4, 2.0)
    assert _variant().to("meta").sinks is None


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("cpu", DeviceCapability.cpu()),
        ("sm_90", DeviceCapability(9, 0)),
        ("sm90", DeviceCapability(9, 0)),
        ("9.0", DeviceCapability(9, 0)),
        ("sm_121", DeviceCapability(12, 1)),
    ],
)
def test_devices_that_are_not_here_go_by_name(name: str, capability: DeviceCapability) -> None:
    assert DeviceCapability.parse(name) == capability
    assert DeviceCapability.parse(str(capability)) == capability


@pytest.mark.parametrize("name", ["gpu", "sm_", "sm_9x", "", "9", "-9.0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not known; use 'cpu' or a form like 'sm_90'"):
        DeviceCapability.parse(name)


def test_capabilities_compare_as_numbers_and_a_cpu_is_below_every_gpu() -> None:
    assert (8, 9) < DeviceCapability(9, 0) < DeviceCapability(10, 0)
    assert DeviceCapability(9, 0) >= (9, 0)
    assert DeviceCapability.cpu() < (1, 0)
    assert DeviceCapability(12, 1).to_int() == 121
    assert DeviceCapability.of("cpu") == DeviceCapability.cpu()


@pytest.mark.parametrize(
    ("device", "named"),
    [("gpu", "'gpu' is not known"), ("meta", "device meta is not supported; use 'cpu' or 'cuda'")],
)
def test_devices_we_do_not_run_on_are_refused(device: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DeviceCapability.of(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not here")
def test_a_gpu_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sees no CUDA device"):
        DeviceCapability.of("cuda:0")


def test_a_window_beyond_all_requests_is_as_wide_as_the_longest_can_be() -> None:
    assert _variant(sliding_window=2**70).sliding_window == 2**31 - 1
