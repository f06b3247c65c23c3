"""A request's bits alone and among others, in models whose layers were asked for batch invariance.

The attention is ours, and so is the promise. The rest of a model is torch's, whose products on a CPU
have other last bits for one row than for several, so these models multiply row by row and have
activations that do not round.
"""

from __future__ import annotations

import pytest
import torch

from attnkit import LLM, SamplingParams
from attnkit.errors import UnsupportedConfiguration
from attnkit.runner.hook import ModelLatentLayer
from attnkit.runner.linear import replace_linears

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

PROMPTS = [[7], list(range(1, 40)), [9, 8, 7, 200, 31], list(range(60, 140)), [4, 4]]
EVERY = tiny_models.BASE["vocab_size"]


class RowByRow(torch.nn.Module):
    """A linear layer whose rows do not know of each other."""

    def __init__(self, linear: torch.nn.Linear, _: str) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(row) for row in x.split(1, dim=-2)], dim=-2)


def make_llm(folder, **settings) -> LLM:
    llm = LLM(folder, use_batch_invariant=True, block_size=4, num_blocks=300, **settings)
    replace_linears(llm.engine.model.model, RowByRow)
    return llm


def answers(llm: LLM, prompts: list[list[int]]):
    """Tokens of each prompt, and at each of them the log probabilities of the whole vocabulary."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=EVERY)
    made = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(one.token_ids, one.logprobs) for one in made]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_are_the_same_alone_and_in_a_batch(family, backend, tmp_path):
    relu = {"hidden_act": "relu", "hidden_activation": "relu"}  # By whichever name they have it.
    tiny_models.make_model(family, num_hidden_layers=2, **relu).save_pretrained(tmp_path)
    llm = make_llm(tmp_path, backend=backend, enable_prefix_caching=False)
    together = answers(llm, PROMPTS)
    assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == together
    assert answers(llm, PROMPTS[::-1]) == together[::-1]


def test_latents_are_expanded_for_a_backend_that_promises_it(tmp_path):
    tiny_models.make_model("deepseek_v3", num_hidden_layers=1).save_pretrained(tmp_path)
    llm = make_llm(tmp_path)
    assert set(llm.backends) == {"cpu"}
    assert not any(isinstance(x, ModelLatentLayer) for x in llm.engine.model.layers.values())
    with pytest.raises(UnsupportedConfiguration, match=r"cpu_mla does not do batch invariance"):
        make_llm(tmp_path, backend="cpu_mla")


def test_layers_that_choose_keys_say_that_nobody_promises_it(tmp_path):
    if "deepseek_v32" not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers has no deepseek_v32")
    latents = {**tiny_models.FAMILIES["deepseek_v3"], "index_n_heads": 4, "index_topk": 12}
    tiny_models.make_model("deepseek_v32", **latents).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedConfiguration, match=r"cpu_mla_sparse: .*batch invariance"):
        make_llm(tmp_path)


def test_a_backend_that_does_not_promise_it_is_refused_before_weights_are_loaded(tmp_path):
    with pytest.raises(UnsupportedConfiguration, match=r"flex does not do batch invariance"):
        LLM(tmp_path / "not there", backend="flex", use_batch_invariant=True)
