"""Weights in codes: within their rounding of the plain layer; no token's result hangs on another's."""

import pytest
import tiny_models
import torch
from torch import nn

from attnkit import LLM, SamplingParams
from attnkit.errors import ConfigurationError
from attnkit.runner.linear import PackedLinear
from attnkit.runner.weights import Int4Linear, Int8Linear, quantize_linears

HAS_INT8 = torch.cpu._is_vnni_supported()
needs_int8 = pytest.mark.skipif(not HAS_INT8, reason="the processor has no VNNI")
KINDS = [pytest.param(Int8Linear, marks=needs_int8), Int4Linear]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def linear_of(dtype, bias=True, scale=1.0):
    torch.manual_seed(1)
    linear = nn.Linear(96, 48, bias=bias).requires_grad_(False)
    linear.weight *= scale * torch.logspace(-2, 2, 48)[:, None]
    return linear.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_that_of_rounded_numbers(kind, bias, dtype):
    linear = linear_of(dtype, bias)
    coded = kind(linear)
    x = torch.randn(2, 5, 96).to(dtype)
    x[0, 1] = 0
    weight, rows = linear.weight.double(), x.double()
    exact = nn.functional.linear(
        rows, weight, None if linear.bias is None else linear.bias.double()
    )
    if kind is Int8Linear:
        w_step = (weight.abs().amax(1, keepdim=True) / 127).expand_as(weight)
        x_step = rows.abs().amax(-1, keepdim=True) / 127
    else:
        low, high = weight.unflatten(1, (-1, 32)).aminmax(dim=2)
        spread = high - low + 2**-7 * torch.maximum(low.abs(), high.abs())
        w_step, x_step = (spread / 15).repeat_interleave(32, dim=1), torch.zeros(())
    # Each number is off by half a step at most, and the result by its own rounding.
    bound = 0.51 * (rows.abs() @ w_step.T + x_step * weight.abs().sum(1) + x_step * w_step.sum(1))
    bound += 4 * torch.finfo(dtype).eps * (rows.abs() @ weight.abs().T + exact.abs() + 1e-3)
    y = coded(x)
    assert y.dtype == dtype
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()
    assert (y.double() - exact).abs().max() > 0


@needs_int8
def test_a_token_does_not_depend_on_those_beside_it():
    coded = Int8Linear(linear_of(torch.bfloat16))
    x = torch.randn(33, 96, dtype=torch.bfloat16)
    x[7] = float("nan")
    together = coded(x)
    assert together[7].isnan().all()
    for row in (0, 8, 32):
        assert torch.equal(together[row], coded(x[row : row + 1])[0])


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=needs_int8), "int4"])
def test_a_model_generates_compiled_and_not(weights, tmp_path, monkeypatch):
    model = tiny_models.make_model("llama", num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, weights=weights, num_blocks=8, max_model_len=64)
    linears = [
        m for m in llm.engine.model.model.modules() if isinstance(m, Int8Linear | Int4Linear)
    ]
    assert len(linears) == 15
    assert isinstance(llm.engine.model.model.lm_head, Int8Linear if HAS_INT8 else nn.Linear)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([[1, 2, 3, 4]], params)
    graphs = []
    llm.engine.model.model.compile(
        dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True
    )
    (again,) = llm.generate([[1, 2, 3, 4]], params)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert graphs, "the model was traced"


def test_sizes_that_do_not_fit_4_bits_take_8():
    model = nn.Sequential(nn.Linear(40, 16), nn.Linear(64, 24), nn.Linear(64, 32))
    assert quantize_linears(model, "int4") == (3 if HAS_INT8 else 1)
    assert isinstance(model[2], Int4Linear)
    assert not any(isinstance(m, Int4Linear | PackedLinear) for m in model[:2])


def test_what_is_not_allowed_is_said_before_a_model_is_loaded(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"'int3' is not known; use one of int8, int4"):
        LLM(weights="int3", device="cpu")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ConfigurationError, match="needs a processor with VNNI"):
        LLM(weights="int8", device="cpu")
