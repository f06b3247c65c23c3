"""Steps launched before the tokens of the one before are known: same tokens, and no page is kept."""

from __future__ import annotations

from typing import Any

import pytest

from attnkit import SamplingParams
from attnkit.runner.engine import Engine
from attnkit.runner.entry import Entry
from attnkit.runner.model import PackedModel
from attnkit.runner.sampler import Draw
from attnkit.runner.scheduler import Scheduler

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

PROMPTS = [list(range(40, 61)), [7], list(range(100, 105)), [3, 1]]


@pytest.fixture(scope="module")
def packed() -> PackedModel:
    return PackedModel(
        tiny_models.make_model(), backend="reference", block_size=4, max_model_len=64
    )


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was chosen ahead."""
    rows: list[int] = []
    choose = Scheduler.schedule_ahead

    def noted(scheduler: Scheduler) -> Any:
        output = choose(scheduler)
        if output is not None:
            rows.append(len(output.scheduled))
        return output

    monkeypatch.setattr(Scheduler, "schedule_ahead", noted)
    return rows


def make_engine(packed: PackedModel, **changes: Any) -> Engine:
    settings = {"num_blocks": 80, "max_num_seqs": 4, "max_num_batched_tokens": 64, "poison": True}
    return Engine(packed, **{**settings, "runs_ahead": True, **changes})


def run(engine: Engine, *params: SamplingParams) -> list[Entry]:
    entries = [engine.add(p, s) for p, s in zip(PROMPTS, params, strict=False)]
    while not all(entry.request.is_finished for entry in entries):
        engine.step()
    assert engine.stats.num_used_blocks == 0
    assert not engine.scheduler.has_work
    return entries


def tokens(entries: list[Entry]) -> list[list[int]]:
    return [entry.request.output_token_ids for entry in entries]


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)


@pytest.fixture(scope="module")
def expected(packed: PackedModel) -> list[list[int]]:
    engine = make_engine(packed, runs_ahead=False)
    return tokens(run(engine, *[greedy(20)] * 4))


def test_requests_that_reach_their_length_have_no_row_too_many(
    packed: PackedModel, expected: list[list[int]], ahead: list[int]
) -> None:
    lengths = (12, 3, 7, 1)
    engine = make_engine(packed)
    got = tokens(run(engine, *map(greedy, lengths)))
    assert got == [e[:n] for e, n in zip(expected, lengths, strict=True)]
    assert ahead == [3, 3, *[2] * 4, *[1] * 5]
    assert engine.stats.num_generated_tokens == sum(lengths)


def test_requests_that_end_by_a_token_are_passed_over(
    packed: PackedModel, expected: list[list[int]], ahead: list[int]
) -> None:
    stops = [expected[0][6], expected[1][2]]
    ends = [row.index(token) + 1 for row, token in zip(expected[:2], stops, strict=True)]
    engine = make_engine(packed)
    params = [greedy(20, stop_token_ids=[token]) for token in stops]
    got = run(engine, *params, greedy(20))
    assert tokens(got) == [expected[0][: ends[0]], expected[1][: ends[1]], expected[2]]
    assert [entry.finish_reason for entry in got] == ["stop", "stop", "length"]
    assert max(ahead) == 3
    # What was computed of them is found again, and right.
    again = run(engine, *params, greedy(20))
    assert tokens(again) == tokens(got)
    assert again[0].request.num_cached_tokens >= 20


def test_random_tokens_and_logprobs_are_those_of_waiting_steps(packed: PackedModel) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=1, max_tokens=9),
        SamplingParams(temperature=1.1, seed=2, max_tokens=12, logprobs=2),
        greedy(10, logprobs=3),
        SamplingParams(temperature=0.7, top_k=5, seed=3, max_tokens=5),
    ]
    waiting = run(make_engine(packed, runs_ahead=False), *params)
    flying = run(make_engine(packed), *params)
    assert tokens(flying) == tokens(waiting)
    assert [e.logprobs for e in flying] == [e.logprobs for e in waiting]


def test_a_penalty_waits_for_the_tokens_it_counts(packed: PackedModel, ahead: list[int]) -> None:
    params = [greedy(9), greedy(9, repetition_penalty=1.8)]
    waiting = tokens(run(make_engine(packed, runs_ahead=False), *params))
    assert tokens(run(make_engine(packed), *params)) == waiting
    assert ahead == []


def test_a_request_that_could_be_admitted_is_not_kept_waiting(
    packed: PackedModel, expected: list[list[int]], ahead: list[int]
) -> None:
    engine = make_engine(packed, max_num_seqs=2)
    assert tokens(run(engine, *[greedy(6)] * 4)) == [e[:6] for e in expected]
    # While both places are taken, steps run ahead of those that wait.
    assert set(ahead) == {2}


def test_aborted_in_flight_gives_its_pages_back(
    packed: PackedModel, expected: list[list[int]]
) -> None:
    engine = make_engine(packed)
    entries = [engine.add(p, greedy(20)) for p in PROMPTS[:3]]
    for _ in range(4):
        engine.step()
    engine.abort(entries[:1])
    engine.step()
    engine.abort(entries[1:2])
    while not entries[2].request.is_finished:
        engine.step()
    assert entries[2].request.output_token_ids == expected[2]
    assert entries[0].request.output_token_ids == expected[0][:4]
    assert engine.stats.num_used_blocks == 0
    entries = [engine.add(p, greedy(20)) for p in PROMPTS[:3]]
    for _ in range(3):
        engine.step()
    engine.abort(entries)
    assert engine.stats.num_used_blocks == 0
    assert not engine.scheduler.has_work
    assert tokens(run(engine, *[greedy(20)] * 4)) == expected


@pytest.mark.parametrize("where", ["read", "__init__"])
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_torn_step_gives_its_random_numbers_back(
    packed: PackedModel, runs_ahead: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose tokens do not come down takes the one after it along; both draw again."""
    params = [
        SamplingParams(temperature=1.0, seed=s, max_tokens=9, ignore_eos=True) for s in (3, 4)
    ]
    right = tokens(run(make_engine(packed), *params))
    work, calls = getattr(Draw, where), []

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) in (3, 4):
            raise RuntimeError("the device is gone")
        return work(*args)

    monkeypatch.setattr(Draw, where, failing)
    engine = make_engine(packed, runs_ahead=runs_ahead)
    entries = [engine.add(p, s) for p, s in zip(PROMPTS, params, strict=False)]
    num_torn = 0
    while not all(entry.request.is_finished for entry in entries):
        try:
            engine.step()
        except RuntimeError:
            num_torn += 1
    assert num_torn == 2
    assert tokens(entries) == right


def test_a_step_ahead_that_fails_loses_no_token(
    packed: PackedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(packed)
    entries = [engine.add(p, greedy(20)) for p in PROMPTS]
    work, calls = packed.run, []

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return work(*args)

    monkeypatch.setattr(packed, "run", failing)
    engine.step()
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert [entry.request.num_output_tokens for entry in entries] == [4] * 4
    while not all(entry.request.is_finished for entry in entries):
        engine.step()
    assert tokens(entries) == expected
    assert engine.stats.num_used_blocks == 0


def test_blocks_that_run_out_end_the_running_ahead(
    packed: PackedModel, expected: list[list[int]], ahead: list[int]
) -> None:
    engine = make_engine(packed, num_blocks=18)
    assert tokens(run(engine, *[greedy(20)] * 4)) == expected
    assert engine.stats.num_preemptions > 0
    assert ahead
