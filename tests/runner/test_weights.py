"""Weights in codes: within their rounding of the plain layer; no token's result hangs on another's."""

from functools import partial

import pytest
import tiny_models
import torch
from torch import nn

from attnkit import LLM, SamplingParams
from attnkit.backends.cpu.native import native_kernels
from attnkit.errors import ConfigurationError
from attnkit.runner import weights as weights_module
from attnkit.runner.linear import PackedLinear
from attnkit.runner.weights import GroupedLinear, Int4Linear, Int8Linear, quantize_linears

KERNELS = native_kernels()
HAS_INT8 = torch.cpu._is_vnni_supported()
HAS_GROUPED = KERNELS is not None and KERNELS.has_code_products
needs_int8 = pytest.mark.skipif(not HAS_INT8, reason="the processor has no VNNI")
needs_grouped = pytest.mark.skipif(
    not HAS_GROUPED, reason="the processor has no AVX-512 VNNI, or there is no native library"
)
GROUPED_4 = pytest.param(partial(GroupedLinear, bits=4), marks=needs_grouped, id="grouped-4")
GROUPED_8 = pytest.param(partial(GroupedLinear, bits=8), marks=needs_grouped, id="grouped-8")
INT8 = pytest.param(Int8Linear, marks=needs_int8)
KINDS = [INT8, Int4Linear, GROUPED_4, GROUPED_8]
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
    x_step = torch.zeros_like(rows)
    if kind is Int8Linear:
        w_step = (weight.abs().amax(1, keepdim=True) / 127).expand_as(weight)
        x_step += rows.abs().amax(-1, keepdim=True) / 127
    else:
        low, high = weight.unflatten(1, (-1, 32)).aminmax(dim=2)
        spread = high - low + 2**-7 * torch.maximum(low.abs(), high.abs())
        bits = 4 if kind is Int4Linear else kind.keywords["bits"]
        w_step = (spread / (2**bits - 1)).repeat_interleave(32, dim=1)
        if kind is not Int4Linear:
            largest = rows.unflatten(-1, (-1, 32)).abs().amax(-1)
            x_step = (largest / 127).repeat_interleave(32, dim=-1)
    # Each number is off by half a step at most, and the result by its own rounding.
    bound = 0.51 * (rows.abs() @ w_step.T + x_step @ (weight.abs() + w_step).T)
    bound += 4 * torch.finfo(dtype).eps * (rows.abs() @ weight.abs().T + exact.abs() + 1e-3)
    y = coded(x)
    assert y.dtype == dtype
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()
    assert (y.double() - exact).abs().max() > 0


@pytest.mark.parametrize("kind", [INT8, GROUPED_4, GROUPED_8])
def test_a_token_does_not_depend_on_those_beside_it(kind):
    coded = kind(linear_of(torch.bfloat16))
    x = torch.randn(33, 96, dtype=torch.bfloat16)
    x[7] = float("nan")
    together = coded(x)
    assert together[7].isnan().all()
    for row in (0, 8, 32):
        assert torch.equal(together[row], coded(x[row : row + 1])[0])


@needs_grouped
@pytest.mark.parametrize("bits", [4, 8])
def test_several_layers_in_one_call_are_the_same(bits):
    layers = [GroupedLinear(nn.Linear(64, size), bits=bits) for size in (16, 48, 2048)]
    x = torch.randn(3, 2, 64)
    products = GroupedLinear.multiply_all(layers, x[:, :1])
    for layer, product in zip(layers, products, strict=True):
        assert torch.equal(product, layer(x)[:, :1])
    assert layers[0](x[:0]).shape == (0, 2, 16)


def test_torch_serves_4_bits_where_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(weights_module, "native_kernels", lambda: None)
    model = nn.Sequential(nn.Linear(64, 32))
    assert quantize_linears(model, "int4") == 1
    assert isinstance(model[0], Int4Linear)


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=needs_int8), "int4"])
def test_a_model_generates_compiled_and_not(weights, tmp_path, monkeypatch):
    model = tiny_models.make_model("llama", num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, weights=weights, num_blocks=8, max_model_len=64)
    kinds = Int8Linear | Int4Linear | GroupedLinear
    linears = [m for m in llm.engine.model.model.modules() if isinstance(m, kinds)]
    assert len(linears) == (15 if HAS_INT8 else 4)  # The others have 48 inputs, no whole groups.
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
    in_4_bits = GroupedLinear if HAS_GROUPED else Int4Linear
    assert isinstance(model[2], in_4_bits)
    assert not any(isinstance(m, in_4_bits | PackedLinear) for m in model[:2])


def test_what_is_not_allowed_is_said_before_a_model_is_loaded(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"'int3' is not known; use one of int8, int4"):
        LLM(weights="int3", device="cpu")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ConfigurationError, match="needs a processor with VNNI"):
        LLM(weights="int8", device="cpu")
