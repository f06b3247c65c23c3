"""The oracle against answers that can be worked out by hand, and against torch's own attention."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from attnkit.conformance.oracle import Meaning, attend, merge, visible

RNG = np.random.default_rng(7)


def counting(q_len: int, kv_len: int, meaning: Meaning) -> tuple[np.ndarray, np.ndarray]:
    """Equal scores, value j at key j: the output is the mean of the visible key indices."""
    q = np.zeros((q_len, 1, 4))
    k = RNG.standard_normal((kv_len, 1, 4))
    v = np.arange(kv_len, dtype=float)[:, None, None]
    answer = attend(q, k, v, meaning)
    return answer.out[:, 0, 0], answer.lse[:, 0]


def test_a_causal_query_sees_itself_and_what_is_before_it() -> None:
    out, lse = counting(3, 10, Meaning(scale=1.0))
    assert out == pytest.approx([3.5, 4.0, 4.5])
    assert lse == pytest.approx(np.log([8, 9, 10]))


def test_a_window_counts_the_query_itself() -> None:
    out, lse = counting(3, 10, Meaning(scale=1.0, window=4))
    assert out == pytest.approx([5.5, 6.5, 7.5])
    assert lse == pytest.approx(np.log([4, 4, 4]))


def test_a_window_without_causality_is_two_sided() -> None:
    out, lse = counting(10, 10, Meaning(scale=1.0, causal=False, window=3))
    assert out == pytest.approx([1, 1.5, 2, 3, 4, 5, 6, 7, 7.5, 8])
    assert lse == pytest.approx(np.log([3, 4, 5, 5, 5, 5, 5, 5, 4, 3]))


def test_a_row_without_keys_is_zero_with_lse_minus_infinity() -> None:
    out, lse = counting(5, 3, Meaning(scale=1.0))
    assert out == pytest.approx([0, 0, 0, 0.5, 1])
    assert np.isneginf(lse[:2]).all()
    assert lse[2:] == pytest.approx(np.log([1, 2, 3]))


def test_queries_in_a_range_see_all_of_it_and_whatever_they_saw_before() -> None:
    out, lse = counting(8, 8, Meaning(scale=1.0, window=2, ranges=[(1, 3), (6, 6)]))
    assert out == pytest.approx([0, 1.5, 2, 2, 3.5, 4.5, 5.5, 6.5])
    assert lse == pytest.approx(np.log([1, 4, 3, 3, 2, 2, 2, 2]))


def test_a_window_does_not_hide_the_prefix_from_what_comes_later() -> None:
    out, lse = counting(7, 7, Meaning(scale=1.0, window=2, prefix=3))
    assert out == pytest.approx([0, 0.5, 1, 1.5, 2, 2.4, 2.8])
    assert lse == pytest.approx(np.log([1, 2, 3, 4, 5, 5, 5]))


def test_a_sink_is_a_logit_without_a_value() -> None:
    meaning = Meaning(scale=1.0, sinks=[math.log(2)])
    answer = attend(np.zeros((1, 1, 1)), np.ones((2, 1, 1)), np.array([[[1.0]], [[0.0]]]), meaning)
    assert answer.out[0, 0, 0] == pytest.approx(1 / 4)
    assert answer.lse[0, 0] == pytest.approx(math.log(4))


def test_a_sink_alone_is_the_whole_denominator() -> None:
    meaning = Meaning(scale=1.0, sinks=[0.5])
    answer = attend(np.zeros((1, 1, 1)), np.ones((0, 1, 1)), np.ones((0, 1, 1)), meaning)
    assert answer.out[0, 0, 0] == 0
    assert answer.lse[0, 0] == 0.5


def test_the_cap_comes_after_the_scale_and_before_alibi() -> None:
    q, k = np.full((1, 1, 1), 3.0), np.array([[[1.0]], [[2.0]]])
    meaning = Meaning(scale=0.5, soft_cap=2.0, alibi_slopes=[0.25])
    answer = attend(q, k, np.ones((2, 1, 1)), meaning)
    scores = [2 * math.tanh(1.5 / 2) - 0.25, 2 * math.tanh(3.0 / 2)]
    assert answer.lse[0, 0] == pytest.approx(math.log(sum(math.exp(s) for s in scores)))


def test_square_root_alibi_is_zero_for_keys_after_the_query() -> None:
    meaning = Meaning(scale=1.0, causal=False, alibi_slopes=[2.0], alibi_sqrt=True)
    answer = attend(
        np.zeros((1, 1, 1)), np.zeros((3, 1, 1)), np.ones((3, 1, 1)), meaning, first_query=1
    )
    assert answer.lse[0, 0] == pytest.approx(math.log(math.exp(-2) + 2))


def test_query_heads_share_kv_heads_in_runs() -> None:
    v = np.arange(3.0)[None, :, None] * np.ones((4, 1, 2))
    answer = attend(np.zeros((1, 6, 2)), np.zeros((4, 3, 2)), v, Meaning(scale=1.0))
    assert answer.out[0, :, 0] == pytest.approx([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_it_agrees_with_torch(causal: bool, window: int | None) -> None:
    q, k, v = (
        torch.from_numpy(RNG.standard_normal((n, h, 8))) for n, h in ((7, 6), (11, 2), (11, 2))
    )
    meaning = Meaning(scale=0.3, causal=causal, window=window)
    mask = torch.from_numpy(visible(np.arange(4, 11), np.arange(11), meaning))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scale=0.3, enable_gqa=True
    )
    got = attend(q.numpy(), k.numpy(), v.numpy(), meaning)
    assert got.out == pytest.approx(want.transpose(0, 1).numpy(), abs=1e-12)


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    q, k, v = (RNG.standard_normal((n, 2, 4)) for n in (3, 9, 9))
    meaning = Meaning(scale=0.5, causal=False, alibi_slopes=[0.5, 0.1], sinks=[1.0, -math.inf])
    rest = dataclasses.replace(meaning, sinks=None)
    whole = attend(q, k, v, meaning, first_query=6)
    parts = [attend(q, k[:0], v[:0], rest, first_query=6)]
    parts += [attend(q, k[:4], v[:4], meaning, first_query=6)]
    parts += [attend(q, k[4:], v[4:], rest, first_query=6, first_key=4)]
    out, lse = merge([p.out for p in parts], [p.lse for p in parts])
    assert out == pytest.approx(whole.out, abs=1e-14)
    assert lse == pytest.approx(whole.lse, abs=1e-14)


def test_merging_empty_parts_stays_empty() -> None:
    out, lse = merge([np.zeros((1, 1, 2))] * 2, [np.full((1, 1), -np.inf)] * 2)
    assert not out.any()
    assert np.isneginf(lse).all()
