"""Decode steps as graphs, on a CPU: the simulator refuses what a device would, and replays only what was
launched when a graph was captured, so equal tokens mean that the runner keeps to the rules."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from attnkit import LLM, SamplingParams
from attnkit.backends.reference import ReferenceBackend
from attnkit.conformance.faults.captured import CAPTURED_FAULTS, CapturedTwinBackend
from attnkit.conformance.simulator import GraphSimulator
from attnkit.conformance.subject import LawBroken
from attnkit.errors import ConfigurationError, ModelError
from attnkit.runner.engine import Engine
from attnkit.runner.graphs import CudaRecorder, capture_sizes, choose_recorder
from attnkit.runner.model import PackedModel

pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

PROMPTS = [list(range(40, 61)), [7], list(range(100, 105)), list(range(200, 209)), [3, 1]]
LENGTHS = (12, 9, 4, 7, 1)


def generate(model: Any, **settings: Any) -> tuple[Engine, list[list[int]]]:
    """Prompts in chunks of at most 8 tokens, which end one after the other."""
    packed = PackedModel(
        model,
        backend=settings.pop("backend", CapturedTwinBackend),
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=8,
        capture_sizes=capture_sizes(8),
    )
    engine = Engine(
        packed,
        num_blocks=80,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        poison=True,
        **settings,
    )
    entries = [
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
        for prompt, n in zip(PROMPTS, LENGTHS, strict=True)
    ]
    while not all(entry.request.is_finished for entry in entries):
        engine.step()
    packed.release()
    return engine, [entry.request.output_token_ids for entry in entries]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("llama4_text", {"attention_chunk_size": None}),  # scales queries by positions of the step
    ],
)
def test_replayed_steps_give_the_tokens_of_eager_ones(family: str, changes: dict[str, Any]) -> None:
    model = tiny_models.make_model(family, **changes)
    _, expected = generate(model, backend="reference")
    assert [len(tokens) for tokens in expected] == list(LENGTHS)
    engine, tokens = generate(model, recorder=GraphSimulator())
    assert tokens == expected
    assert engine.graphs is not None
    # Four requests decode at once when the last prompt is through, and then they end.
    assert set(engine.graphs.sizes) >= {1, 2, 4}
    # Builders size what they keep by it.
    for layer in engine.model.layers.values():
        sizes = layer.vllm_config.compilation_config.cudagraph_capture_sizes
        assert sizes == (1, 2, 4, 8)


def test_steps_that_run_ahead_replay_too() -> None:
    model = tiny_models.make_model()
    _, expected = generate(model, backend="reference")
    engine, tokens = generate(model, recorder=GraphSimulator(), runs_ahead=True)
    assert tokens == expected
    assert engine.graphs is not None
    assert set(engine.graphs.sizes) >= {1, 2, 4}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_give_the_tokens_of_eager_steps() -> None:
    model = tiny_models.make_model("gemma2").cuda()
    _, expected = generate(model, backend="triton", runs_ahead=False)
    recorder = CudaRecorder(torch.device("cuda"))
    engine, tokens = generate(model, backend="triton", recorder=recorder, graphs_required=True)
    assert tokens == expected
    assert engine.graphs is not None
    assert set(engine.graphs.sizes) >= {1, 2, 4}


def test_a_plan_that_moves_is_caught_in_the_runner() -> None:
    backend = CAPTURED_FAULTS["plans in fresh tensors"].backend
    with pytest.raises(LawBroken, match="block_table_tensor was read by the captured work"):
        generate(tiny_models.make_model(), backend=backend, recorder=GraphSimulator())


def test_a_model_that_asks_the_device_runs_without_graphs_and_says_so_once() -> None:
    model = tiny_models.make_model()
    asked = model.model.norm.register_forward_hook(
        lambda _, args, out: out * float(out[0, 0, 0] > -9)
    )
    _, expected = generate(model, backend="reference")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine, tokens = generate(model, recorder=GraphSimulator())
    assert tokens == expected
    assert engine.graphs is not None
    assert engine.graphs.sizes == ()
    (warning,) = [str(w.message) for w in said if w.category is RuntimeWarning]
    assert "cannot be captured as a graph" in warning
    assert "value of a tensor" in warning
    with pytest.raises(ModelError, match="leave cuda_graphs out"):
        generate(model, recorder=GraphSimulator(), graphs_required=True)
    asked.remove()


def test_why_there_are_no_graphs(tmp_path) -> None:
    model = tiny_models.make_model()
    packed = PackedModel(model, backend=ReferenceBackend, block_size=4)
    reason = "reference says AttentionCGSupport.NEVER, and runs model.layers.0.self_attn and 2 more"
    assert packed.capture_refusal is not None
    assert reason in packed.capture_refusal
    packed.device = torch.device("cuda")  # Nothing runs.
    recorder, line = choose_recorder(packed, None)
    assert recorder is None
    assert reason in line
    assert choose_recorder(packed, False) == (None, "cuda graphs: off, as asked")
    with pytest.raises(ConfigurationError, match=reason):
        choose_recorder(packed, True)
    folder = tiny_models.save_model(tmp_path, tokenizer=False)
    with pytest.raises(ConfigurationError, match="the model would run on cpu"):
        LLM(folder, device="cpu", cuda_graphs=True)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 100, 256, 1000])
def test_sizes_fit_every_step_with_little_padding(most: int) -> None:
    sizes = capture_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert len(sizes) <= 35
    for num_rows in range(1, most + 1):
        size = next(s for s in sizes if s >= num_rows)
        assert size - num_rows < max(8, size / 3)
