"""The attention kernel against the oracle: every feature, and features that meet in its tiles.

Tiles are made small (16 or 32 keys) so that short requests cross their borders.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from triton_problem import make_problem

from attnkit.backends.triton.configs import KernelConfig
from attnkit.backends.triton.launch import launch_attention

SMALL = KernelConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
RAGGED: dict[str, Any] = {"query_lens": (1, 37, 0, 9, 5), "kv_lens": (40, 37, 0, 83, 3)}
"""A decode, a prompt, an empty row, a chunk on a context, and more queries than keys."""

SLOPES = [0.5, 0.25, 0.125, 1.0]
SINKS = torch.tensor([-1.0, 0.5, 3.0, -math.inf])

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "causal_per_request": {"causal": (True, False, True, False, True)},
    "window_of_itself": {"sliding_window": 1},
    "window": {"sliding_window": 20},
    "window_wider_than_all": {"sliding_window": 1000},
    "window_on_both_sides": {"sliding_window": 7, "causal": False},
    "window_sinks": {"sliding_window": 18, "sinks": SINKS},
    "softcap_alibi_sinks": {"logits_soft_cap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS},
    "softcap_window": {"logits_soft_cap": 1.5, "sliding_window": 24},
    "alibi_window": {"alibi_slopes": SLOPES, "sliding_window": 24},
    "alibi_sqrt": {"alibi_slopes": SLOPES, "use_alibi_sqrt": True},
    "alibi_sqrt_bidirectional": {"alibi_slopes": SLOPES, "use_alibi_sqrt": True, "causal": False},
    "ranges": {"ranges": {1: [(2, 20), (33, 36)], 3: [(70, 80)]}},
    "ranges_window": {"ranges": {1: [(2, 30)], 3: [(20, 82)]}, "sliding_window": 6},
    "prefix": {"prefix_lens": (3, 20, 0, 37, 3), "sliding_window": 6},
    "prefix_of_whole_tiles": {"prefix_lens": (16, 32, 0, 48, 0), "sliding_window": 18},
    "prefix_ranges": {
        "prefix_lens": (3, 7, 0, 37, 3),
        "ranges": {1: [(2, 30)]},
        "sliding_window": 6,
    },
    "prefix_without_a_window": {"prefix_lens": (3, 20, 0, 37, 3)},
    "negative_scale": {"scale": -0.3},
    "no_scale_at_all": {"scale": 0.0},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_each_feature_is_what_the_oracle_says(features: dict[str, Any]) -> None:
    problem = make_problem(**RAGGED, **features)
    launch_attention(problem.operands, problem.variant, config=SMALL)
    problem.check()


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 3), (8, 2), (7, 1), (71, 1)], ids=lambda n: str(n)
)
def test_any_group_of_heads_shares_its_kv_head(heads: int, kv_heads: int) -> None:
    """71 rows of one token are more than a tile of 32: the group is cut into three."""
    problem = make_problem((2, 21), (30, 21), heads=heads, kv_heads=kv_heads, head_size=16)
    launch_attention(problem.operands, problem.variant, config=SMALL)
    problem.check()


@pytest.mark.parametrize("page", [1, 5, 16, 32, 48, 128, None])
def test_any_page_size(page: int | None) -> None:
    """Smaller than a tile, larger, no multiple, a single token; and no pages at all."""
    lens = (9, 37, 50) if page is None else (40, 37, 83)
    problem = make_problem((9, 37, 50), lens, page=page, causal=page is not None)
    launch_attention(problem.operands, problem.variant, config=SMALL)
    problem.check()


@pytest.mark.parametrize(
    ("head_size", "head_size_v"), [(8, 8), (40, 40), (80, 24), (64, 128), (192, 128), (512, 512)]
)
def test_any_multiple_of_8_is_a_head_size(head_size: int, head_size_v: int) -> None:
    problem = make_problem((3, 18), (35, 18), head_size=head_size, head_size_v=head_size_v)
    launch_attention(problem.operands, problem.variant)
    problem.check()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_dtype_over_a_cache_of_any_dtype(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    problem = make_problem(
        (5, 33), (150, 33), dtype=dtype, cache_dtype=cache_dtype, sliding_window=70
    )
    launch_attention(problem.operands, problem.variant)
    problem.check()


@pytest.mark.parametrize("poison", [math.inf, 1e30, 0.0])
def test_what_nobody_sees_changes_no_bit(poison: float) -> None:
    """Slots past a length, keys left of every window, pages of nobody: NaN in one run."""
    results = []
    for value in (math.nan, poison):
        problem = make_problem(**RAGGED, sliding_window=11, poison=value)
        launch_attention(problem.operands, problem.variant, config=SMALL)
        results.append(problem.operands)
    assert torch.equal(results[0].output, results[1].output)
    assert torch.equal(results[0].lse, results[1].lse)


def test_requests_with_fewer_queries_are_left_alone() -> None:
    problem = make_problem(**RAGGED)
    launch_attention(problem.operands, problem.variant, min_query_len=6, config=SMALL)
    problem.check(requests=[1, 2, 3])


def test_more_requests_than_one_search_step_counts() -> None:
    """The search for a tile's request loads 256 of them at a time."""
    num_reqs = 300
    query_lens = [2 if r in (0, 5, 255, 256, 299) else 0 for r in range(num_reqs)]
    kv_lens = [q + r % 4 if q else 0 for r, q in enumerate(query_lens)]
    problem = make_problem(query_lens, kv_lens, heads=1, kv_heads=1, head_size=8, page=4)
    launch_attention(
        problem.operands,
        problem.variant,
        config=KernelConfig(block_m=16, block_n=16, num_warps=4, num_stages=1),
    )
    problem.check()


def test_no_request_is_no_launch() -> None:
    problem = make_problem((1,), (1,))
    o = problem.operands
    empty = type(o)(
        query=o.query[:0],
        stored=o.stored,
        output=o.output[:0],
        lse=o.lse[:0],
        query_start_loc=o.query_start_loc[:1],
        kv_lens=o.kv_lens[:0],
        block_table=o.block_table[:0],
        causal=True,
    )
    launch_attention(empty, problem.variant)
    assert torch.isnan(o.output).all()
