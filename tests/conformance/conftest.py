"""Fixtures for replays of public bug reports: backends, layers, inputs and judged runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from attnkit.conformance.case import Case
from attnkit.conformance.checks import run_and_judge
from attnkit.conformance.inputs import Inputs
from attnkit.conformance.sequences import Tokens
from attnkit.conformance.subject import NotClaimed, Result, Subject
from attnkit.layer import Attention


@pytest.fixture(
    params=[
        "reference",
        "cpu",
        pytest.param("triton", marks=pytest.mark.gpu),
    ]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every backend that can run in this process."""
    on_gpu = request.param == "triton" and torch.cuda.is_available()
    return Subject.of(request.param, "cuda" if on_gpu else "cpu")


@pytest.fixture
def layer_of(subject: Subject) -> Callable[..., Attention]:
    """The layer of a case; a backend that refuses it has answered the report."""

    def make(case: Case, **changes: object) -> Attention:
        try:
            return subject.layer(case, **changes)
        except NotClaimed as refusal:
            pytest.skip(f"refused, which is an answer: {refusal}")

    return make


@pytest.fixture
def inputs_of(
    subject: Subject, layer_of: Callable[..., Attention]
) -> Callable[..., tuple[Attention, Inputs]]:
    """Layer and inputs of a case, with given or random tokens."""

    def make(
        case: Case,
        tokens: Sequence[Tokens] | None = None,
        *,
        poison: float = float("nan"),
        page_seed: int = 0,
    ) -> tuple[Attention, Inputs]:
        layer = layer_of(case)
        return layer, subject.inputs(layer, case, poison=poison, page_seed=page_seed, tokens=tokens)

    return make


@pytest.fixture
def replay(
    subject: Subject, inputs_of: Callable[..., tuple[Attention, Inputs]]
) -> Callable[..., Result]:
    """Run a case on given tokens, judged by the oracle; the result on the CPU."""

    def run(case: Case, tokens: Sequence[Tokens] | None = None, **how: float) -> Result:
        layer, inputs = inputs_of(case, tokens, **how)
        result, _ = run_and_judge(subject, layer, inputs)
        return Result(out=result.out.cpu(), lse=None if result.lse is None else result.lse.cpu())

    return run
