"""Sampling parameters: what is allowed, and that a refusal names the value and the way out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnkit.errors import RequestError
from attnkit.runner.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -3, "at least 1"),
        ("max_tokens", 2.5, "at least 1"),
        ("max_tokens", True, "at least 1"),
        ("max_tokens", None, "at least 1"),
        ("temperature", math.nan, "0 for greedy"),
        ("temperature", -0.1, "0 for greedy"),
        ("temperature", math.inf, "0 for greedy"),
        ("temperature", "hot", "0 for greedy"),
        ("temperature", 10**400, "0 for greedy"),
        ("top_p", 0.0, "more than 0 and at most 1"),
        ("top_p", 0, "more than 0 and at most 1"),
        ("top_p", 1.01, "more than 0 and at most 1"),
        ("top_p", math.nan, "more than 0 and at most 1"),
        ("top_k", -2, "or 0 to turn it off"),
        ("top_k", 1.0, "or 0 to turn it off"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("min_p", math.nan, "0 to 1"),
        ("repetition_penalty", 0.0, "more than 0"),
        ("repetition_penalty", -1.0, "more than 0"),
        ("repetition_penalty", math.inf, "more than 0"),
        ("seed", 1.5, "64-bit"),
        ("seed", 2**64, "64 bits"),
        ("seed", -(2**63) - 1, "64-bit"),
        ("stop", [""], "non-empty"),
        ("stop", [3], "non-empty"),
        ("stop", 5, "a list of strings"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("ignore_eos", "no", "True or False"),
        ("stop_token_ids", [-1], ">= 0"),
        ("stop_token_ids", ["a"], ">= 0"),
        ("logprobs", -1, "at least 0"),
        ("logprobs", True, "at least 0"),
        ("n", 0, "give 1"),
        ("n", 2, "give 1"),
    ],
)
def test_a_refusal_names_the_value_and_what_is_allowed(name, value, hint):
    shown = value[0] if isinstance(value, list) else value
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(name)
    assert str(shown) in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    "allowed",
    [
        {},
        {"temperature": 0},
        {"temperature": 1e-9},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 1},
        {"min_p": 1.0},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"logprobs": 0},
        {"stop": None},
        {"stop_token_ids": None},
    ],
)
def test_edges_are_allowed(allowed):
    SamplingParams(**allowed)


def test_stop_is_a_tuple_whatever_was_given():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_numbers_are_pythons_whatever_was_given():
    """numpy's own overflow where Python's do not."""
    given = {"max_tokens": 3, "top_k": 5, "seed": 7, "logprobs": 2}
    params = SamplingParams(
        **{name: np.int64(value) for name, value in given.items()},
        temperature=np.float32(2),
        repetition_penalty=2**70,
        stop_token_ids=np.array([4, 5]),
    )
    assert {name: type(getattr(params, name)) for name in given} == dict.fromkeys(given, int)
    assert (type(params.temperature), params.temperature) == (float, 2)
    assert type(params.repetition_penalty) is float
    assert params.stop_token_ids == (4, 5)


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy
