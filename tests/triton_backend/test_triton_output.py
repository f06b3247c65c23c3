"""Outputs that kernels write as codes: to the bit those of the numbers that they write otherwise, by the
attention kernel, the decode kernel and the fold of its parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_triton_decode import SHORT
from triton_problem import DEVICE, Problem, make_problem

from attnkit.backends.triton.launch import launch_attention, launch_decode
from attnkit.backends.triton.operands import OutputCodes, Parts
from attnkit.conformance.checks import bits
from attnkit.contract import (
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from attnkit.output_quant import OUTPUT_KEYS, QuantizedOutput


def attend(problem: Problem, kernel: str) -> None:
    if kernel == "attention":
        launch_attention(problem.operands, problem.variant)
        return
    parts, splits = None, 1
    if kernel == "merge":
        splits, memory = 2, torch.full((Parts.numel(problem.operands, 3, 4),), math.nan)
        parts = Parts.of(memory.to(DEVICE), problem.operands, 3, 4)
    launch_decode(
        problem.operands,
        problem.variant,
        max_query_len=3,
        num_splits=splits,
        parts=parts,
        config=SHORT,
    )


def memory_for(key: QuantKey, problem: Problem, scale: float) -> QuantizedOutput:
    num_tokens, heads, _ = problem.operands.query.shape
    given = None
    if key in (kFp8StaticTensorSym, kNvfp4Dynamic):
        given = torch.full((), scale, device=DEVICE)
    width = heads * problem.operands.head_size_v
    return QuantizedOutput.empty(key, num_tokens, width, scale=given, device=DEVICE)


@pytest.mark.parametrize("kernel", ["attention", "decode", "merge"])
@pytest.mark.parametrize(
    ("size_v", "dtype", "scale"), [(128, torch.bfloat16, 0.007), (192, torch.float32, 1e-4)]
)
def test_codes_are_those_of_the_numbers(
    kernel: str, size_v: int, dtype: torch.dtype, scale: float
) -> None:
    """The last request sees nothing. The second scale makes most static codes saturate, and heads of 192
    lie in tiles of 256."""
    problem = make_problem(
        (3, 1, 2), (70, 33, 0), heads=4, head_size=16, head_size_v=size_v, dtype=dtype
    )
    attend(problem, kernel)
    for key in OUTPUT_KEYS:
        if not OutputCodes.are_supported(key, size_v):
            assert (key, size_v) == (kFp8Dynamic128Sym, 192)
            continue
        made, right = (memory_for(key, problem, scale) for _ in range(2))
        assert isinstance(problem.operands.output, torch.Tensor)
        right.write(problem.operands.output)
        written = OutputCodes.of(made, 4, problem.operands.query.shape[0])
        lse = torch.full_like(problem.operands.lse, math.nan)
        coded = replace(problem, operands=replace(problem.operands, output=written, lse=lse))
        attend(coded, kernel)
        assert torch.equal(lse, problem.operands.lse)
        for name in ("codes", "block_scale"):
            got, wanted = (getattr(x, name) for x in (made, right))
            assert got is None or torch.equal(bits(got), bits(wanted)), (key, name)


def test_groups_that_reach_over_heads_are_no_kernels() -> None:
    supported = [OutputCodes.are_supported(key, 64) for key in OUTPUT_KEYS]
    assert supported == [key != kFp8Dynamic128Sym for key in OUTPUT_KEYS]
    assert not OutputCodes.are_supported(kFp8Dynamic64Sym, 96)
    assert not OutputCodes.are_supported(kNvfp4Dynamic, 40)
