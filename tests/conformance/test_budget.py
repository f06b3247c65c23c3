"""The budget: wide enough for float32 accumulation in any order, too narrow for a wrong bit of maths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnkit.conformance.budget import budget_for
from attnkit.conformance.oracle import Meaning, attend


def budget_and_answer(dtype: torch.dtype, kv_len: int, gain: float = 1.0):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        (torch.randn(n, 2, 32, generator=generator) * g).to(dtype)
        for n, g in ((5, gain), (kv_len, 1.0), (kv_len, 1.0))
    )
    meaning = Meaning(scale=32**-0.5)
    answer = attend(*(x.double().numpy() for x in (q, k, v)), meaning)
    return budget_for(q, k, v, meaning, answer), answer


@pytest.mark.parametrize("kv_len", [5, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_allows_one_rounding_of_the_right_answer(dtype: torch.dtype, kv_len: int) -> None:
    budget, answer = budget_and_answer(dtype, kv_len)
    rounded = torch.from_numpy(answer.out).to(dtype).double().numpy()
    assert (np.abs(rounded - answer.out) <= budget.out).all()
    assert (np.abs(answer.lse.astype(np.float32) - answer.lse) <= budget.lse).all()


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 0.15)]
)
def test_it_is_a_small_share_of_the_output(dtype: torch.dtype, share: float) -> None:
    budget, answer = budget_and_answer(dtype, 64)
    assert budget.out.max() < share * np.abs(answer.out).max()


def test_the_lse_budget_cannot_hide_another_base() -> None:
    budget, answer = budget_and_answer(torch.bfloat16, 64)
    assert (np.abs(answer.lse / np.log(2) - answer.lse) > 10 * budget.lse).all()


def test_it_grows_with_the_scores_in_float32() -> None:
    """exp turns an absolute error of a score, which grows with the score, into a relative one."""
    small, _ = budget_and_answer(torch.float32, 64)
    large, _ = budget_and_answer(torch.float32, 64, gain=50.0)
    assert large.out.max() > 3 * small.out.max()
    assert large.out.max() < 1e-3
