"""End to end: engines in turns, counted, compared token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from attnkit.bench.e2e import (
    AttnkitEngine,
    TextWorkload,
    TransformersEngine,
    encode_prompts,
    measure,
)
from attnkit.bench.prompts import PROMPTS
from attnkit.errors import ConfigurationError

LOG: list[str] = []


class Stub:
    note = "stub"

    def __init__(self, name: str, *, rival: bool, tokens: Sequence[int], extra: int = 0) -> None:
        self.name, self.is_rival, self.tokens, self.extra = name, rival, tokens, extra

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        LOG.append(self.name)
        return [[*self.tokens[:num_tokens], *[9] * self.extra] for _ in prompts]


def test_engines_take_turns_and_the_first_round_does_not_count() -> None:
    LOG.clear()
    engines = [
        Stub("ours", rival=False, tokens=[1, 2, 3, 4]),
        Stub("hf", rival=True, tokens=[1, 2, 3, 5]),
    ]
    rows = measure(engines, [[7], [8]], TextWorkload(num_prompts=2, num_tokens=4), rounds=3)
    assert LOG == ["ours", "hf"] * 4
    ours, theirs = rows
    assert ours.num_samples == theirs.num_samples == 3
    assert ours.error == 0.25
    assert theirs.error is None
    assert ours.median_us is not None
    assert ours.tokens_per_s == pytest.approx(8 / ours.median_us * 1e6)
    assert set(ours.ratios) == {"hf"}


def test_an_engine_that_generates_another_number_of_tokens_is_not_compared() -> None:
    engine = Stub("chatty", rival=True, tokens=[1, 2], extra=1)
    with pytest.raises(
        ConfigurationError, match=r"chatty returned 1 outputs of \[3\] tokens, not 1 of 2"
    ):
        measure([engine], [[7]], TextWorkload(num_prompts=1, num_tokens=2), rounds=1)


def test_a_shape_is_read_as_written() -> None:
    got = TextWorkload.parse("prompts=40,tokens=3,dtype=float32,prompt_tokens=5")
    assert got == TextWorkload(num_prompts=40, num_tokens=3, dtype="float32", num_prompt_tokens=5)
    assert got.name == "e2e 40 prompts of 5 x 3 tokens float32"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prompts=33", "at most 32"),
        ("prompts=0", "num_prompts 0"),
        ("tokens=0", "num_tokens 0"),
        ("dtype=int8", "'int8'"),
        ("batch=3", "no 'batch=3'"),
    ],
)
def test_a_bad_shape_says_what_is_allowed(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        TextWorkload.parse(text)


def test_prompts_differ_from_one_another() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == 32


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random two-layer model with small heads, and no tokenizer."""
    transformers = pytest.importorskip("transformers", reason="runs models through transformers")
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_attnkit_and_transformers_generate_the_same_tokens(model: Path) -> None:
    workload = TextWorkload(num_prompts=3, num_prompt_tokens=9, num_tokens=6, dtype="float32")
    ours = AttnkitEngine(model, workload.dtype, "reference")
    prompts = encode_prompts(ours.llm, workload)
    assert [len(p) for p in prompts] == [9, 9, 9]
    prompts[1] = prompts[1][:5]  # so that transformers has to pad
    rows = measure(
        [ours, TransformersEngine.load(model, workload.dtype)], prompts, workload, rounds=1
    )
    assert rows[0].error == 0.0
    assert rows[0].note == "backend reference"
    assert rows[1].tokens_per_s is not None
