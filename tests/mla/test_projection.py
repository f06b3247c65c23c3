"""kv_b_proj becomes plain weights, whatever it is stored as, and its three uses are one matrix."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from attnkit.batch import make_batch
from attnkit.contract import MLADimensions
from attnkit.errors import BatchError, ConfigurationError
from attnkit.mla.projection import KvBProjection
from attnkit.mla_layer import MLAAttention

HEADS = 3
SIZES = MLADimensions(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
ROWS = HEADS * (16 + 24)
CPU = torch.device("cpu")


def linear(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, rows, bias=False).to(dtype)


def projection(module: nn.Module, dtype: torch.dtype = torch.float32) -> KvBProjection:
    return KvBProjection(module, HEADS, SIZES, dtype, CPU)


def test_expanded_and_absorbed_are_the_same_product() -> None:
    made = projection(linear())
    kv_c, k_pe = torch.randn(5, 32), torch.randn(5, 8)
    q, attended = torch.randn(4, HEADS, 16), torch.randn(4, HEADS, 32)
    key, value = made.expand(kv_c, k_pe)
    assert key.shape == (5, HEADS, 24)
    assert value.shape == (5, HEADS, 24)
    assert torch.equal(key[..., 16:], k_pe[:, None].expand(-1, HEADS, -1))
    by_keys = torch.einsum("thp,khp->hkt", q, key[..., :16])
    by_latents = torch.einsum("thl,kl->hkt", made.absorb_queries(q), kv_c)
    torch.testing.assert_close(by_keys, by_latents)
    output = torch.empty(4, HEADS, 24)
    made.values_of(attended, output)
    w_uv = made.weight.view(HEADS, 40, 32)[:, 16:]
    torch.testing.assert_close(output, torch.einsum("thl,hvl->thv", attended, w_uv))


def test_weights_of_the_layers_dtype_are_not_copied() -> None:
    module = linear()
    assert projection(module).weight.data_ptr() == module.weight.data_ptr()
    assert projection(module, torch.bfloat16).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_plain_weights_of_any_dtype(dtype: torch.dtype) -> None:
    module = linear(dtype)
    assert torch.equal(projection(module).weight, module.weight.float())


class Packed(nn.Module):
    """Weights as 8-bit integers with a scale per row, as quantised checkpoints have them."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.step = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / self.step).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() * self.step).T


def test_packed_weights_are_asked_what_they_make_of_the_identity() -> None:
    module = Packed(linear().weight.detach())
    torch.testing.assert_close(projection(module).weight, module.weight.float() * module.step)


def test_a_module_that_returns_its_bias_too() -> None:
    class Engines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.inner(x), None

    module = Engines()
    torch.testing.assert_close(projection(module).weight, module.inner.weight.detach())


@pytest.mark.parametrize(
    ("shape", "spread"),
    [
        ((), lambda s: s),
        ((1,), lambda s: s),
        ((ROWS,), lambda s: s[:, None]),
        ((ROWS, 1), lambda s: s),
        ((1, 1), lambda s: s),
        ((3, 2), lambda s: s.repeat_interleave(40, 0).repeat_interleave(16, 1)),
    ],
)
@pytest.mark.parametrize("attribute", ["weight_scale", "weight_scale_inv"])
def test_float8_weights_are_multiplied_out(shape, spread, attribute) -> None:
    module = linear()
    codes = (module.weight.detach() * 100).to(torch.float8_e4m3fn)
    module.weight = nn.Parameter(codes, requires_grad=False)
    scale = torch.rand(shape) + 0.5
    setattr(module, attribute, scale)
    assert torch.equal(projection(module).weight, codes.float() * spread(scale))


def test_blocks_of_128_may_be_cut() -> None:
    sizes = MLADimensions(kv_lora_rank=192, qk_nope_head_dim=48, qk_rope_head_dim=8, v_head_dim=52)
    module = nn.Linear(192, 200, bias=False)
    codes = module.weight.detach().to(torch.float8_e4m3fn)
    module.weight = nn.Parameter(codes, requires_grad=False)
    scale = module.weight_scale_inv = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    made = KvBProjection(module, 2, sizes, torch.float32, CPU)
    row, column = torch.arange(200)[:, None] // 128, torch.arange(192)[None] // 128
    assert torch.equal(made.weight, codes.float() * scale[row, column])


def test_a_scale_that_fits_nothing_is_refused() -> None:
    module = linear()
    module.weight = nn.Parameter(
        module.weight.detach().to(torch.float8_e4m3fn), requires_grad=False
    )
    module.weight_scale = torch.ones(7, 1)
    with pytest.raises(
        ConfigurationError, match=r"scale of shape \(7, 1\) for a weight of \(120, 32\)"
    ):
        projection(module)


def test_a_bias_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has a bias"):
        projection(nn.Linear(32, ROWS))


def test_other_sizes_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"\(80, 32\); 3 heads of 16 \+ 24.*need \(120, 32\)"
    ):
        projection(linear(rows=80))


def test_weights_that_are_not_there_yet() -> None:
    """A layer may be made before its checkpoint is loaded; it does not run on nothing."""
    with torch.device("meta"):
        module = nn.Linear(32, ROWS, bias=False)
    layer = MLAAttention(HEADS, SIZES, module)
    assert layer.projection.weight.numel() == 0
    plan = layer.build(make_batch([1], [1], [[1]], 16))
    with pytest.raises(BatchError, match="call process_weights_after_loading"):
        layer(
            torch.zeros(1, HEADS, 24), torch.zeros(1, 32), torch.zeros(1, 8), torch.empty(0), plan
        )
    module.to_empty(device="cpu")
    module.weight.data = linear().weight.data
    layer.process_weights_after_loading(torch.float32)
    assert torch.equal(layer.projection.weight, linear().weight)


def test_the_models_module_is_not_the_layers() -> None:
    """It would be moved, copied and saved twice."""
    layer = MLAAttention(HEADS, SIZES, linear())
    assert list(layer.parameters()) == []
    assert layer.state_dict() == {}
    assert copy.deepcopy(layer).layer_name == layer.layer_name
