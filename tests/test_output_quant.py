"""Quantised outputs: the formats by their bytes, and what is refused. That layers write them rightly
the kit checks (`codes_of_outputs_are_those_of_numbers`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import Attention
from attnkit.backends.reference import ReferenceBackend, ReferenceImpl
from attnkit.contract import (
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from attnkit.errors import BatchError, ConfigurationError, UnsupportedConfiguration
from attnkit.output_quant import OUTPUT_KEYS, QuantizedOutput

X = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(0))
SCALE = torch.tensor(0.02)


def of(key: Any, width: int = 256) -> QuantizedOutput:
    scale = SCALE if key in (kFp8StaticTensorSym, kNvfp4Dynamic) else None
    made = QuantizedOutput.empty(key, 5, width, scale=scale)
    assert made.key == key
    return made


@pytest.mark.parametrize(
    ("key", "num_bytes", "error"),
    [
        (kFp8StaticTensorSym, 256, 2**-4),
        (kFp8Dynamic128Sym, 256 + 8, 2**-4),
        (kFp8Dynamic64Sym, 256 + 16, 2**-4),
        (kNvfp4Dynamic, 128 + 16, 1 / 6 + 2**-4),
    ],
)
def test_bytes_and_numbers_of_each_format(key: Any, num_bytes: int, error: float) -> None:
    made = of(key)
    made.write(X[:3])
    parts = [made.codes] if made.block_scale is None else [made.codes, made.block_scale]
    assert sum(x[0].numel() * x.itemsize for x in parts) == num_bytes
    off, x = ((y[:3].flatten(1)).unflatten(1, (-1, 16)) for y in (made.decode() - X.flatten(1), X))
    assert bool((off.abs() <= error * x.abs().amax(-1, keepdim=True)).all())


def test_codes_saturate_and_groups_are_neighbours_of_a_row() -> None:
    made = of(kFp8StaticTensorSym)
    made.write(X * 1e6)
    assert made.codes.float().abs().max() == 448
    groups = of(kFp8Dynamic64Sym)
    groups.write(X)
    assert groups.block_scale is not None
    largest = X.flatten(1).unflatten(1, (-1, 64)).abs().amax(-1)
    torch.testing.assert_close(groups.block_scale, largest / 448)


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"as 'fp8'; use one of .*kNvfp4Dynamic"):
        QuantizedOutput.empty("fp8", 5, 96)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="groups of 128"):
        QuantizedOutput.empty(kFp8Dynamic128Sym, 5, 96)
    with pytest.raises(ConfigurationError, match="takes one scale"):
        QuantizedOutput.empty(kFp8StaticTensorSym, 5, 96)
    with pytest.raises(ConfigurationError, match="takes no scale"):
        QuantizedOutput.empty(kFp8Dynamic64Sym, 5, 64, scale=SCALE)
    with pytest.raises(BatchError, match="none of the formats"):
        QuantizedOutput(codes=torch.zeros(5, 64), scale=SCALE)
    codes = torch.zeros(5, 2, 64, dtype=torch.float8_e4m3fn)
    for apart in (codes.transpose(0, 1), codes[:, :, 0, None][0, 0], [1.0]):
        with pytest.raises(BatchError, match="contiguous"):
            QuantizedOutput(codes=apart, scale=SCALE)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"block_scale .* with strides \(1, 5\)"):
        QuantizedOutput(codes=codes, block_scale=torch.zeros(2, 5).T)
    for scale in (SCALE.double(), SCALE.to("meta"), torch.ones(2), 0.1):
        with pytest.raises(BatchError, match="one float32 number on cpu"):
            QuantizedOutput(codes=codes, scale=scale)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="do not fit"):
        of(kFp8StaticTensorSym).write(X[..., :-1])


class Plain(ReferenceImpl):
    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(self, layer: Any, query: Any, *rest: Any) -> Any:
        self.refuse_output_scales(*rest[5:7])
        raise AssertionError("it was let through")


class PlainBackend(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return Plain


@pytest.mark.parametrize("key", OUTPUT_KEYS)
def test_a_backend_that_writes_numbers_only_refuses(key: Any) -> None:
    layer, made = Attention(2, 128, backend=PlainBackend), of(key)
    q = torch.zeros(5, 2, 128)
    with pytest.raises(UnsupportedConfiguration, match="quantise after"):
        layer(q, q, q, quantized=made)
    with pytest.raises(UnsupportedConfiguration, match="quantise after"):
        layer.impl.forward(layer, q, q, q, q, None, made.codes, made.scale or q, made.block_scale)


def test_memory_of_another_shape_and_a_profiling_run() -> None:
    layer, q = Attention(2, 128, backend="reference"), torch.zeros(5, 2, 128)
    with pytest.raises(BatchError, match="its output is"):
        layer(q, q, q, quantized=of(kFp8StaticTensorSym, 128))
    made = of(kFp8StaticTensorSym)
    assert not layer(q, q, q, quantized=made).view(torch.uint8).any()
