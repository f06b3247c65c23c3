"""Verify: no output is timed before it has been compared with float64.

In: a workload's inputs and what a contender returned. Out: the relative error, or `WrongOutput`.
Whole requests would take minutes to recompute, so rows are sampled: first, last and random requests,
and of long queries the first, last and random rows, over all heads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.bench.contender import Prepared
from attnkit.bench.inputs import Inputs
from attnkit.bench.workloads import ATTENTION_KINDS, Workload
from attnkit.contract import KVQuantMode, get_kv_quant_mode
from attnkit.errors import AttnkitError

_REQUESTS = 4
_ROWS = 24
_WORST = 8.0
"""A single row and head may be this much worse than the whole: rounding spreads that far over a
thousand rows, a swapped head or a wrong page does not."""


class WrongOutput(AttnkitError):
    """The output is not what float64 says. Attributes: error, its relative error."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Right rows of an output.

    Attributes:
        rows: int64 (n,): rows of the output that were recomputed.
        out: float64 (n, num_heads, head_size).
    """

    rows: torch.Tensor
    out: torch.Tensor


def tolerance(workload: Workload) -> float:
    """Largest relative error that rounding explains.

    Twice the machine epsilon of the dtype: outputs and probabilities are rounded to it once each, and
    low-precision attention lands at half an epsilon or less. float32 gets 1e-3, because rivals
    multiply in tf32. Formats with a scale per token add the rounding of their codes, which the
    reference does not see: up to 1/254 of a token's largest element for 8 bits, so 5e-2 overall.
    """
    if get_kv_quant_mode(workload.kv_cache_dtype) not in (
        KVQuantMode.NONE,
        KVQuantMode.FP8_PER_TENSOR,
    ):
        return 5e-2
    return max(2 * torch.finfo(workload.torch_dtype).eps, 1e-3)


def answer(inputs: Inputs) -> Answer:
    """Recompute sampled rows of an attention workload in float64."""
    workload = inputs.workload
    generator = torch.Generator().manual_seed(1)
    starts = inputs.batch.query_start_loc_cpu.tolist()
    rows, outs = [], []
    for request in _sample(workload.num_reqs, _REQUESTS, generator):
        picked = _sample(workload.query_lens[request], _ROWS, generator)
        k, v = inputs.sequence(request)
        first = workload.seq_lens[request] - workload.query_lens[request]
        q = inputs.query[[starts[request] + row for row in picked]]
        positions = torch.tensor([first + row for row in picked], device=inputs.device)
        outs.append(attend(q, k, v, positions))
        rows += [starts[request] + row for row in picked]
    return Answer(rows=torch.tensor(rows, device=inputs.device), out=torch.cat(outs))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Causal attention of a few queries of one request, in float64.

    Args:
        q: (n, num_heads, head_size).
        k, v: (seq_len, num_kv_heads, head_size).
        positions: int64 (n,), of the queries in the request.
    """
    n, heads, size = q.shape
    seq_len, kv_heads, _ = k.shape
    group = heads // kv_heads
    folded = (
        q.double().view(n, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
    )
    score = folded @ k.double().permute(1, 2, 0) / math.sqrt(size)
    hidden = torch.arange(seq_len, device=q.device)[None, :] > positions[:, None]
    score = score.view(kv_heads, group, n, seq_len).masked_fill(hidden, -math.inf).flatten(1, 2)
    out = score.softmax(-1) @ v.double().permute(1, 0, 2)
    return out.view(kv_heads, group, n, size).permute(2, 0, 1, 3).reshape(n, heads, size)


def check(inputs: Inputs, prepared: Prepared, right: Answer | None) -> float:
    """Run a contender and compare, once as it will be timed and once into memory full of NaN.

    Args:
        inputs: of the workload.
        prepared: the contender.
        right: from `answer`; None for workloads without attention.

    Returns:
        The relative error: attention's over the sampled rows, a write's over all new tokens, 0 for a
        plan.

    Raises:
        WrongOutput: the error is above `tolerance`, or something was not written at all.
    """
    kind = inputs.workload.kind
    if kind == "build":
        prepared.run()
        return 0.0
    if kind == "write":
        return _check_write(inputs, prepared)
    assert kind in ATTENTION_KINDS
    assert right is not None
    error = _compare(inputs.workload, prepared.run(), right)
    with nan_filled_allocations():
        return max(error, _compare(inputs.workload, prepared.run(), right))


@contextmanager
def nan_filled_allocations() -> Iterator[None]:
    """New uninitialised tensors hold NaN inside, so that an element nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # Operators without a deterministic form warn; determinism is not what is wanted here.
            warnings.simplefilter("ignore")
            yield
    finally:
        settings.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _compare(workload: Workload, output: torch.Tensor, right: Answer) -> float:
    out = output.reshape(workload.num_tokens, workload.num_heads, workload.head_size)
    if not bool(torch.isfinite(out).all()):
        raise WrongOutput(
            "the output has elements that are not finite or were not written", math.nan
        )
    return _judge(workload, out[right.rows].double(), right.out)


def _check_write(inputs: Inputs, prepared: Prepared) -> float:
    """Blank the slots of the new tokens, run, and read them back; other slots must stay."""
    workload, size = inputs.workload, inputs.workload.block_size
    if not inputs.plain_format:
        prepared.run()
        return 0.0
    key, value = inputs.new_tokens
    slots = inputs.batch.slot_mapping
    pages = prepared.run()
    before = pages.clone()
    pages[slots // size, :, slots % size] = torch.zeros((), dtype=pages.dtype, device=pages.device)
    prepared.run()
    rows = pages[slots // size, :, slots % size].double()
    error = _judge(workload, rows, torch.cat((key, value), dim=-1).to(pages.dtype).double())
    if not torch.equal(_bits(before), _bits(pages)):
        raise WrongOutput("the write changed slots that are not of this step", error)
    return error


def _bits(pages: torch.Tensor) -> torch.Tensor:
    return pages.contiguous().view(torch.uint8)


def _judge(workload: Workload, out: torch.Tensor, right: torch.Tensor) -> float:
    limit = tolerance(workload)
    difference = (out - right).norm(dim=-1)
    size = right.norm(dim=-1)
    error = float(difference.norm() / size.norm())
    worst = float((difference / size.clamp_min(1e-30)).max())
    if not (error <= limit and worst <= _WORST * limit):
        raise WrongOutput(
            f"relative error {error:.1e} over all, {worst:.1e} in the worst row and head; allowed are "
            f"{limit:.1e} and {_WORST * limit:.1e}",
            error,
        )
    return error


def _sample(count: int, limit: int, generator: torch.Generator) -> list[int]:
    """Up to `limit` of range(count): all, or the first, the last and random ones between."""
    if count <= limit:
        return list(range(count))
    between = torch.randperm(count - 2, generator=generator)[: limit - 2] + 1
    return sorted({0, count - 1, *between.tolist()})
