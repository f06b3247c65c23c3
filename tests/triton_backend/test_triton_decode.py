"""The decode kernels against the oracle, and their promise that splitting changes no bit.

Segments are made short, so that contexts of a few hundred keys have many.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_problem import DEVICE, Problem, make_problem

from attnkit.backends.triton.configs import DecodeConfig
from attnkit.backends.triton.launch import launch_decode
from attnkit.backends.triton.operands import Parts

SHORT = DecodeConfig(
    block_m=16,
    block_n=32,
    num_warps=4,
    num_stages=2,
    segment=32,
    max_segments=4,
)
LENS: dict[str, Any] = {"query_lens": (1, 1, 0, 3, 2), "kv_lens": (1, 150, 0, 77, 1)}
"""One key, five segments stretched to three, an empty row, three of them, more queries than keys."""

SLOPES = [0.5, 0.25, 0.125, 1.0]
SINKS = torch.tensor([-1.0, 0.5, 3.0, -math.inf])

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "causal_per_request": {"causal": (False, True, False, True, False)},
    "window_sinks": {"sliding_window": 70, "sinks": SINKS},
    "window_on_both_sides": {"sliding_window": 2, "causal": False},
    "softcap_alibi_sinks": {"logits_soft_cap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS},
    "ranges_window": {"ranges": {3: [(3, 75)], 1: [(40, 149)]}, "sliding_window": 9},
    "prefix": {"prefix_lens": (0, 33, 0, 50, 1), "sliding_window": 9},
    "prefix_of_whole_tiles": {"prefix_lens": (1, 64, 0, 77, 0), "sliding_window": 30},
    "alibi_sqrt_window": {"alibi_slopes": SLOPES, "use_alibi_sqrt": True, "sliding_window": 40},
}


def decode(
    problem: Problem,
    num_splits: int,
    config: DecodeConfig | None = SHORT,
    max_query_len: int = 3,
    max_segments: int = 4,
) -> None:
    parts = None
    if num_splits > 1:
        numel = Parts.numel(problem.operands, max_query_len, max_segments)
        memory = torch.full((numel,), math.nan, device=DEVICE)
        parts = Parts.of(memory, problem.operands, max_query_len, max_segments)
    launch_decode(
        problem.operands,
        problem.variant,
        max_query_len=max_query_len,
        num_splits=num_splits,
        parts=parts,
        config=config,
    )


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_each_feature_is_right_and_splits_change_no_bit(features: dict[str, Any]) -> None:
    one = make_problem(**LENS, **features)
    decode(one, num_splits=1)
    one.check()
    for num_splits in (2, 4):
        many = one.fresh()
        decode(many, num_splits)
        assert torch.equal(many.operands.output, one.operands.output)
        assert torch.equal(many.operands.lse, one.operands.lse)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "query_len"),
    [(4, 4, 16), (8, 1, 5), (28, 4, 2), (71, 1, 1), (20, 1, 3)],
)
def test_tiles_of_rows_cut_queries_and_groups(heads: int, kv_heads: int, query_len: int) -> None:
    """More rows than a tile: queries go to further tiles, then heads of the group."""
    problem = make_problem(
        (query_len, 1), (100, 7), heads=heads, kv_heads=kv_heads, head_size=16, page=5
    )
    decode(problem, num_splits=2, max_query_len=query_len)
    problem.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page", [16, 64])
def test_half_precision_with_the_config_that_is_served(dtype: torch.dtype, page: int) -> None:
    problem = make_problem((1, 2), (1300, 40), dtype=dtype, page=page, head_size=128)
    decode(problem, num_splits=2, config=None)
    problem.check()


def test_values_of_another_size_than_keys() -> None:
    problem = make_problem((1, 2), (90, 40), head_size=40, head_size_v=24)
    decode(problem, num_splits=3)
    problem.check()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_requests_with_more_queries_are_left_alone(num_splits: int) -> None:
    problem = make_problem((1, 4, 2), (50, 60, 30))
    decode(problem, num_splits, max_query_len=2)
    problem.check(requests=[0, 2])


def test_a_context_longer_than_its_memory_gets_longer_segments() -> None:
    """A captured graph's memory is sized for the longest request; a longer one must not leave it."""
    problem = make_problem((1, 1), (300, 90))
    decode(problem, num_splits=2, max_segments=2)
    problem.check()


def test_bits_do_not_depend_on_batch_mates() -> None:
    lens = (150, 9, 301)
    together = make_problem((1, 1, 1), lens, sliding_window=200)
    decode(together, num_splits=1, max_query_len=1)
    o = together.operands
    for r, num_splits in enumerate((3, 1, 4)):
        alone = replace(
            o,
            query=o.query[r : r + 1],
            output=torch.full_like(o.output[:1], math.nan),
            lse=torch.full_like(o.lse[:1], math.nan),
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            kv_lens=o.kv_lens[r : r + 1],
            block_table=o.block_table[r : r + 1],
        )
        decode(replace(together, operands=alone), num_splits, max_query_len=1)
        assert torch.equal(alone.output[0], o.output[r])
        assert torch.equal(alone.lse[0], o.lse[r])
