"""The sampler against plain definitions, and the independence of a row from its batch mates."""

import math

import numpy as np
import pytest
import torch

from attnkit.runner.sampler import SamplingState, draw
from attnkit.runner.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 613


def state(default_seed=0, prompt=(1, 2), vocab=VOCAB, **params) -> SamplingState:
    return SamplingState(SamplingParams(**params), prompt, vocab, [default_seed], CPU)


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def draws(logits: torch.Tensor, num_draws: int, **params) -> np.ndarray:
    """Frequencies of the tokens over many draws from one row."""
    states = [state(seed=s, vocab=logits.shape[1], **params) for s in range(num_draws)]
    tokens = [s.token_id for s in draw(logits.expand(num_draws, -1), states).read()]
    return np.bincount(np.array(tokens), minlength=logits.shape[1]) / num_draws


def rand_logits(num_rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_argmax(dtype):
    logits = rand_logits(9).to(dtype)
    tokens = [s.token_id for s in draw(logits, [state(temperature=0)] * 9).read()]
    assert tokens == logits.max(-1).indices.tolist()


def test_no_rows_need_no_logits():
    assert draw(torch.empty(0, VOCAB), []).read() == []


def test_temperature_scales_the_distribution():
    probabilities = [0.1, 0.2, 0.7]
    for temperature in (0.5, 1.0, 3.0):
        scaled = np.array(probabilities) ** (1 / temperature)
        expected = scaled / scaled.sum()
        seen = draws(logits_of(probabilities), 4000, temperature=temperature)
        # Five standard deviations of a binomial share of 4000.
        assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected / 4000))


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, [3]),
        ({"top_k": 2}, [3, 1]),
        ({"top_k": -1}, [3, 1, 0, 2, 4]),
        ({"top_k": 99}, [3, 1, 0, 2, 4]),
        ({"top_p": 0.39}, [3]),
        ({"top_p": 0.41}, [3, 1]),
        ({"top_p": 0.69}, [3, 1]),
        ({"top_p": 0.71}, [3, 1, 0]),
        ({"top_p": 1e-9}, [3]),
        ({"min_p": 0.6}, [3, 1]),
        ({"min_p": 0.49}, [3, 1, 0]),
        ({"min_p": 1.0}, [3]),
        # 0.4 and 0.3 are left after top-k, 4/7 and 3/7 of what is left.
        ({"top_k": 2, "top_p": 0.56}, [3]),
        ({"top_k": 2, "top_p": 0.58}, [3, 1]),
        ({"top_k": 3, "min_p": 0.6}, [3, 1]),
        ({"top_p": 0.95, "min_p": 0.6}, [3, 1]),
    ],
)
def test_what_the_cuts_leave_is_drawn_in_proportion(params, allowed):
    probabilities = np.array([0.2, 0.3, 0.06, 0.4, 0.04])
    expected = np.zeros(5)
    expected[allowed] = probabilities[allowed] / probabilities[allowed].sum()
    seen = draws(logits_of(probabilities.tolist()), 2000, temperature=1.0, **params)
    assert set(np.flatnonzero(seen)) == set(allowed)
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected / 2000) + 1e-12)


def test_cuts_agree_with_transformers_processors():
    transformers = pytest.importorskip("transformers")
    logits = rand_logits(1, vocab=3000)
    for k, p, floor, temperature in [(50, 0.9, 0.0, 0.7), (0, 0.95, 0.02, 1.3), (7, 1.0, 0.1, 1.0)]:
        chain = [transformers.TemperatureLogitsWarper(temperature)]
        if k:
            chain.append(transformers.TopKLogitsWarper(k))
        if p < 1:
            chain.append(transformers.TopPLogitsWarper(p))
        if floor:
            chain.append(transformers.MinPLogitsWarper(floor))
        scores = logits
        for processor in chain:
            scores = processor(None, scores)
        allowed = set(torch.isfinite(scores[0]).nonzero().flatten().tolist())
        params = {"temperature": temperature, "top_k": k, "top_p": p, "min_p": floor}
        seen = draws(logits, 3000, **params)
        assert set(np.flatnonzero(seen)) <= allowed
        expected = scores.softmax(-1)[0].numpy()
        assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected / 3000) + 1e-3)


def test_a_nucleus_wider_than_the_first_look_is_whole():
    """Flat logits: 90 % of the mass needs 90 % of the vocabulary, far more than is sorted at first."""
    vocab = 5000
    logits = (torch.arange(vocab) * 1e-6)[None]
    seen = draws(logits, 3000, top_p=0.9)
    kept = np.flatnonzero(seen)
    assert kept.min() >= vocab * 0.1 - 2
    assert kept.min() <= vocab * 0.1 + 30


def test_ties_at_a_cut_are_all_kept():
    seen = draws(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), 300, top_k=2)
    assert set(np.flatnonzero(seen)) == {1, 2, 3}
    seen = draws(torch.tensor([[2.0, 2.0, 2.0, -9.0]]), 300, top_p=0.5)
    assert set(np.flatnonzero(seen)) == {0, 1, 2}


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 64), -math.inf)
    logits[0, [5, 40]] = torch.tensor([0.0, 1.0])
    for params in ({}, {"top_p": 0.999999}, {"top_k": 30}, {"min_p": 1e-9}):
        assert set(np.flatnonzero(draws(logits, 200, **params))) <= {5, 40}


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = rand_logits(20)
    states = [state(seed=s, temperature=temperature) for s in range(20)]
    tokens = [s.token_id for s in draw(logits, states).read()]
    assert tokens == logits.argmax(-1).tolist()


def test_a_huge_temperature_is_uniform():
    seen = draws(torch.tensor([[0.0, 5.0, 50.0]]), 3000, temperature=1e30)
    assert np.all(np.abs(seen - 1 / 3) < 0.05)


PARAMS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 300, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8, "top_p": 0.99},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 2.0, "logprobs": 0, "top_p": 0.5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch_mates(dtype):
    """Each request alone, and among all others in two orders: the same tokens and log probabilities,
    to the bit, over steps. bfloat16 logits are full of ties."""
    steps = [rand_logits(len(PARAMS), vocab=4000, seed=s).to(dtype) for s in range(6)]

    def run(rows: list[int]) -> dict[int, list]:
        states = {r: state(seed=99 + r, vocab=4000, **PARAMS[r]) for r in rows}
        outcome: dict[int, list] = {r: [] for r in rows}
        for logits in steps:
            for r, sampled in zip(
                rows, draw(logits[rows], [states[r] for r in rows]).read(), strict=True
            ):
                outcome[r].append(sampled)
        return outcome

    everyone = list(range(len(PARAMS)))
    alone = {r: run([r])[r] for r in everyone}
    assert run(everyone) == alone
    assert run(everyone[::-1]) == alone
    for r in everyone:
        pair = run([r, (r + 3) % len(PARAMS)])
        assert pair[r] == alone[r]


def test_a_seed_repeats_and_another_seed_differs():
    def run(**params) -> list[int | None]:
        one = state(temperature=1.0, **params)
        return [draw(rand_logits(1, seed=s), [one]).read()[0].token_id for s in range(20)]

    assert run(seed=7) == run(seed=7)
    assert run(seed=7) != run(seed=8)
    assert run() == run()
    assert run() != run(default_seed=1)
    assert run(default_seed=1, seed=7) == run(seed=7)
    assert run(seed=-3) == run(seed=-3)
    assert run(seed=2**63 + 5) != run(seed=5)


def test_repetition_penalty_counts_prompt_and_output():
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.8]])
    one = state(prompt=[0], vocab=4, temperature=0, repetition_penalty=1.2)
    # 2.0 / 1.2 < 1.9, then 1.9 / 1.2 < 1.8, then 2.0 / 1.2 is the largest left.
    assert [draw(logits, [one]).read()[0].token_id for _ in range(4)] == [1, 3, 0, 0]
    negative = torch.tensor([[-1.0, -1.1]])
    one = state(prompt=[0], vocab=2, temperature=0, repetition_penalty=1.2)
    assert draw(negative, [one]).read()[0].token_id == 1  # -1.0 * 1.2 < -1.1


def test_repetition_penalty_is_transformers():
    transformers = pytest.importorskip("transformers")
    logits = rand_logits(1)
    prompt = [3, 3, 17, 200]
    expected = transformers.RepetitionPenaltyLogitsProcessor(2.5)(torch.tensor([prompt]), logits)
    one = state(prompt=prompt, temperature=0, repetition_penalty=2.5)
    assert draw(logits, [one]).read()[0].token_id == int(expected.argmax())


def test_logprobs_are_those_of_the_model():
    logits = rand_logits(3)
    states = [
        state(temperature=0, logprobs=4),
        state(temperature=3.0, logprobs=2, repetition_penalty=1.5, seed=5),
        state(temperature=0),
    ]
    expected = logits.double().log_softmax(-1)
    rows = draw(logits, states).read()
    assert rows[2].logprobs is None
    for row, wanted in ((0, 4), (1, 2)):
        found = rows[row].logprobs
        token = rows[row].token_id
        assert found is not None
        assert token in found
        order = expected[row].argsort(descending=True).tolist()
        assert [t for t in found if t in order[:wanted]] == order[:wanted]
        assert len(found) == wanted + (token not in order[:wanted])
        for token_id, entry in found.items():
            assert entry.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
            assert entry.rank == order.index(token_id) + 1


def test_logprobs_0_is_the_chosen_token_alone_and_more_than_the_vocabulary_is_all():
    logits = rand_logits(2, vocab=5)
    states = [state(vocab=5, logprobs=0, seed=4), state(vocab=5, logprobs=50, seed=4)]
    one, everything = draw(logits, states).read()
    assert list(one.logprobs or ()) == [one.token_id]
    assert sorted(everything.logprobs or ()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", PARAMS)
def test_logits_that_are_not_finite_give_no_token_and_hurt_nobody_else(bad, params):
    logits = rand_logits(3)
    good = draw(logits, [state(seed=r, **params) for r in range(3)]).read()
    logits[1, 77] = bad
    rows = draw(logits, [state(seed=r, **params) for r in range(3)]).read()
    assert rows[1].token_id is None
    assert (rows[0], rows[2]) == (good[0], good[2])


def test_logits_are_left_as_they_were():
    logits = rand_logits(len(PARAMS))
    before = logits.clone()
    draw(logits, [state(**params) for params in PARAMS]).read()
    assert torch.equal(logits, before)
