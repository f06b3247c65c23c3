"""Quantised weights of linear layers on a CPU: int8, or 4 bits in groups.

In: a model on the CPU and the name of a format. Out: the same model with its `nn.Linear` replaced by
layers that keep codes. Products are our own on processors with AVX-512 VNNI (`backends/cpu/coded.c`),
where 8 bits have groups too; else torch's (oneDNN's int8 product, ATen's 4-bit one): nothing needs to be
installed. Weights are rounded to nearest, without data: quality is measured by
`benchmarks/weights_cpu.py`.

By torch, one core with AMX took for a weight of 576 x 1536 that was in no near cache 197 us with 1 row
and 212 with 16 in bfloat16, 121 and 130 in int8, 72 and 383 in 4 bits. There, 4 bits serve one stream,
and int8 saves half the memory; in so small a model what makes codes of activations costs more than the
product saves. By our own, 8 bits gave two cores with AVX-512 VNNI and no instructions for bfloat16 1.4
times the tokens of weights in bfloat16, compiled, with one prompt and with 16
(`benchmarks/weights-int8-cpu.json`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from attnkit.backends.cpu.native import native_kernels
from attnkit.backends.cpu.operands import CODED_COLUMNS, CODED_GROUP, NativeCodedLinear
from attnkit.backends.cpu.pages import use_huge_pages_later
from attnkit.errors import ConfigurationError
from attnkit.runner.linear import OpaqueLinear, replace_linears

WEIGHTS = ("int8", "int4")
"""Names of formats."""

GROUP = CODED_GROUP
"""Numbers of a row that share a scale and a zero point in 4 bits."""

_COLUMNS = 2048
"""Of a weight that are rounded at a time; whole blocks."""

_LEAST_ROWS = 8
"""oneDNN's int8 product of few numbers runs in scalar code: 1 row of 576 times 576 x 192 took 2.9 ms, 8
rows 27 us."""

_TINY = torch.finfo(torch.float32).tiny


class Int8Linear(OpaqueLinear):
    """y = x W^T + b with a scale per row of W and, found anew for each token, one per row of x.

    Sums are exact integers, so that a token's result does not depend on the tokens beside it.
    """

    def __init__(self, linear: nn.Linear, name: str = "linear") -> None:
        super().__init__(linear, name)
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / 127).clamp(min=_TINY)
        codes = (weight / scale[:, None]).round().to(torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(codes, [16, self.in_features])
        self.codes = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", scale, persistent=False)
        zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self.register_buffer("zero", zeros, persistent=False)
        self.bias = linear.bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        # All of it in the node that a compiled graph does not look into: with the rounding of rows in
        # the graph, that of SmolLM2-135M was not compiled in four minutes.
        numbers = x.reshape(-1, self.in_features).float()
        scale = (numbers.abs().amax(-1, keepdim=True) / 127).clamp(min=_TINY)
        rows = (numbers / scale).round().to(torch.int8)
        num_rows = rows.shape[0]
        if num_rows < _LEAST_ROWS:
            rows = torch.cat([rows, rows.new_zeros(_LEAST_ROWS - num_rows, self.in_features)])
        y = torch.ops.onednn.qlinear_pointwise.default(
            rows,
            1.0,
            0,
            self.codes,
            self.scale,
            self.zero,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        y = y[:num_rows] * scale
        y = (y if self.bias is None else y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


class Int4Linear(OpaqueLinear):
    """y = x W^T + b with a scale and a zero point for every `GROUP` numbers of a row of W, by torch."""

    def __init__(self, linear: nn.Linear, name: str = "linear") -> None:
        super().__init__(linear, name)
        dtype = linear.weight.dtype
        groups = linear.weight.detach().float().unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=2)
        # Rounded as they will be kept; codes stand for (code - 8) * scale + zero.
        scale = ((high - low) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        zero = (low + 8 * scale.float()).to(dtype)
        codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round() + 8
        codes = codes.clamp(0, 15).to(torch.int32).flatten(1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.codes = nn.Parameter(packed, requires_grad=False)
        scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(rows, self.codes, GROUP, self.scales)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class GroupedLinear(OpaqueLinear):
    """`Int4Linear` with 4 or 8 bits by our own kernel (`backends/cpu/coded.c`), which rounds x too: each
    group of a row to 8 bits with a scale of its own. Sums over a group are exact integers.

    Attributes:
        codes: uint8 (blocks of columns, groups, bytes): codes, scales and zero points as they are read.
    """

    def __init__(self, linear: nn.Linear, name: str = "linear", *, bits: int) -> None:
        super().__init__(linear, name)
        # In pieces, since what they are made of takes many times as much memory.
        pieces = linear.weight.detach().split(_COLUMNS)
        packed = torch.cat([_pack_groups(piece, bits) for piece in pieces])
        self.codes = nn.Parameter(packed, requires_grad=False)
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self.native = NativeCodedLinear.of(packed, bias, bits, self.in_features)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply_all([self], x)[0]

    @classmethod
    def multiply_all(cls, layers: Sequence[GroupedLinear], x: torch.Tensor) -> list[torch.Tensor]:
        kernels = native_kernels()
        assert kernels is not None, "a layer of this kind is made where there are kernels"
        outputs = [x.new_empty(*x.shape[:-1], layer.out_features) for layer in layers]
        kernels.multiply_codes([layer.native for layer in layers], x.contiguous(), outputs)
        return outputs


def _pack_groups(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of a weight as `coded.c` reads them: uint8 (blocks, groups, bytes)."""
    codes, scale, zero = _round_groups(weight, bits)
    blocks, groups = weight.shape[0] // CODED_COLUMNS, weight.shape[1] // GROUP
    # Four codes are moved as one number, and two times four are joined in it: none of 4 bits leaves its
    # byte.
    fours = codes.to(torch.uint8).view(torch.int32)
    fours = fours.view(blocks, CODED_COLUMNS, groups, GROUP // 4).permute(0, 2, 3, 1)
    if bits == 4:
        fours = fours[:, :, 0::2] | fours[:, :, 1::2] << 4
    fours = fours.contiguous().view(torch.uint8)
    scales = torch.stack([scale, zero], -1).view(blocks, CODED_COLUMNS, groups, 2)
    parts = (fours, scales.transpose(1, 2).contiguous().view(torch.uint8))
    return torch.cat([part.reshape(blocks, groups, -1) for part in parts], -1)


def _round_groups(
    weight: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (rows, groups, `GROUP`), and of each group scale and zero point in bfloat16: a code stands
    for code * scale + zero. Both are rounded so that codes reach the least and the largest number."""
    groups = weight.to(torch.float32, copy=True).unflatten(1, (-1, GROUP))
    # Apart: torch's aminmax took 5 times as long as both.
    low, high, largest = groups.amin(2), groups.amax(2), 2**bits - 1
    zero = -_round_up(-low)
    tiny = torch.finfo(torch.bfloat16).tiny
    scale = _round_up(((high - zero.float()) / largest).clamp(min=tiny))
    codes = groups.sub_(zero.float()[..., None]).div_(scale.float()[..., None])
    return codes.round_().clamp_(0, largest), scale, zero


def _round_up(x: torch.Tensor) -> torch.Tensor:
    """float32 -> the next bfloat16 that is not less."""
    near = x.to(torch.bfloat16)
    return torch.where(near.float() < x, near.nextafter(torch.full_like(near, torch.inf)), near)


def check_weights(weights: str, device: torch.device) -> None:
    """
    Raises:
        ConfigurationError: no such format, or none for this device or processor.
    """
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise ConfigurationError(
            f"weights {weights!r} is not known; use one of {', '.join(WEIGHTS)}, or None"
        )
    if device.type != "cpu":
        raise ConfigurationError(
            f"weights={weights!r} is for models on a CPU, and this one is on {device}; leave it out"
        )
    if weights == "int8" and not _has_int8():
        raise ConfigurationError(
            "weights='int8' needs a processor with VNNI instructions, which this one does not have; "
            "use 'int4', or leave it out"
        )


def quantize_linears(model: nn.Module, weights: str) -> int:
    """Replace the linear layers of `model`, which is on a CPU, in place.

    With "int4", the layer that gives the logits and layers whose sizes groups do not fit (in_features
    a multiple of 32, out_features of 16) are in 8 bits where the processor has it, else left alone.

    Args:
        weights: of `WEIGHTS`, checked.

    Returns:
        How many layers were replaced.
    """
    has_int8 = _has_int8()
    head = getattr(model, "get_output_embeddings", lambda: None)()

    kernels = native_kernels()
    has_grouped = kernels is not None and kernels.has_code_products
    pieces = []

    def quantize(linear: nn.Linear, name: str) -> nn.Module | None:
        fits = linear.in_features % GROUP == 0 and linear.out_features % CODED_COLUMNS == 0
        if fits and has_grouped:
            bits = 8 if weights == "int8" or linear is head else 4
            layer = GroupedLinear(linear, name, bits=bits)
            pieces.append((layer.codes.data_ptr(), layer.codes.nbytes))
            return layer
        if weights == "int4" and fits and linear is not head:
            return Int4Linear(linear, name)
        return Int8Linear(linear, name) if has_int8 else None

    num_replaced = replace_linears(model, quantize)
    use_huge_pages_later(pieces)
    return num_replaced


def _has_int8() -> bool:
    """Without VNNI, sums of two int8 products may saturate."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()
