"""The budget: wide enough for float32 accumulation in any order, too narrow for a wrong bit of maths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnkit.conformance.budget import budget_for
from attnkit.conformance.mla.sequence import LatentSequence
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


def test_values_out_of_latents_may_be_added_up_one_by_one() -> None:
    """As a library's float32 product may, where there is nothing else to round: one key."""
    meaning, worst = Meaning(scale=48**-0.5), 0.0
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(*n, generator=g) for n in ((1, 4, 48), (1, 1, 128), (1, 1, 16)))
        weight = torch.randn(4, 64, 128, generator=g) * 128**-0.5
        sequence = LatentSequence(q=q, k=k, v=v, meaning=meaning, weight=weight)
        answer, budget = sequence.expected()
        w_uk, w_uv = weight.double().split([32, 32], dim=1)
        key = torch.cat(
            [
                torch.einsum("tl,hpl->thp", k[:, 0].double(), w_uk),
                v.double().expand(-1, 4, -1),
            ],
            -1,
        )
        scores = torch.einsum("qhd,thd->qht", q.double(), key) * meaning.scale
        attended = (scores.softmax(-1) @ k[:, 0].double()).float()
        out = torch.zeros(1, 4, 32)
        for column in range(128):
            out += attended[..., column, None] * w_uv[..., column].float()
        error = np.abs(out.double().numpy() - answer.out)
        worst = max(worst, float((error / budget.out).max()))
        assert (np.abs(answer.out * (1 + 2.0**-16) - answer.out) > budget.out).any()
    assert 0.4 < worst < 1
