"""PrefixLMs: prompts as a model's processor makes them, with images and types, give transformers'
tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit import LLM, SamplingParams
from attnkit.backends.reference import ReferenceBackend
from attnkit.errors import RequestError
from attnkit.runner.takeover import probe
from attnkit.runner.token_types import TokenTypes

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

IMAGE = 300
"""The token that stands for a quarter of an image."""
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
SEEN = {"gemma3": TokenTypes(bidirectional=1, in_one_range=False),
        "paligemma": TokenTypes(bidirectional=0, in_one_range=True)}  # fmt: skip
"""What each family makes of token types."""


class Rangeless(ReferenceBackend):
    """Does no ranges."""

    @staticmethod
    def get_name() -> str:
        return "rangeless"

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False


def make_model(family: str, **changes: Any) -> Any:
    """Images of 4 tokens; a window of 12 in some layers, which PaliGemma 2 has from Gemma 2."""
    torch.manual_seed(1)
    text = {**tiny_models.BASE, "tie_word_embeddings": False}
    vision = dict(VISION)
    if family == "gemma3":
        text.update(tiny_models.FAMILIES["gemma3_text"], sliding_window=12)
        settings: dict[str, Any] = {"mm_tokens_per_image": 4}
    else:
        text.update(tiny_models.FAMILIES["gemma2"], sliding_window=12, model_type="gemma2")
        vision.update(model_type="siglip_vision_model", projection_dim=48)
        settings = {"projection_dim": 48}
    config = transformers.AutoConfig.for_model(
        family,
        text_config={**text, **changes},
        vision_config=vision,
        image_token_index=IMAGE,
        tie_word_embeddings=False,
        **settings,
    )
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15 if "language_model" in name else 0.3)
    return model


def pixels(seed: int, num_images: int = 1) -> torch.Tensor:
    return torch.randn(num_images, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def some_prompts(family: str, num: int) -> list[dict[str, torch.Tensor]]:
    """As a processor makes them: two images with text around them, or a prefix and what follows it."""
    rng = random.Random(0)

    def text(least: int, most: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randint(least, most))]

    prompts = []
    for _ in range(num):
        if family == "gemma3":
            a, b, c = text(0, 6), text(1, 8), text(1, 3)
            ids = [*a, *[IMAGE] * 4, *b, *[IMAGE] * 4, *c]
            types = [int(token == IMAGE) for token in ids]
        else:
            prefix, suffix = text(1, 4), text(0, 9)
            ids = [*[IMAGE] * 4, *prefix, *suffix]
            types = [0] * (4 + len(prefix)) + [1] * len(suffix)
        prompts.append(
            {
                "input_ids": torch.tensor([ids]),
                "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
                "token_type_ids": torch.tensor([types]),
                "pixel_values": pixels(rng.randrange(999), 2 if family == "gemma3" else 1),
            }
        )
    return prompts


def expected(model: Any, prompt: dict[str, torch.Tensor], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            **prompt, do_sample=False, max_new_tokens=num_tokens, eos_token_id=[], pad_token_id=0
        )
    return out[0, prompt["input_ids"].shape[1] :].tolist()


def generate(llm: LLM, prompts: Any, num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def make_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"block_size": 4, "num_blocks": 90, "debug_poison": True, **settings}
    return LLM(folder, **settings)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", sorted(SEEN))
def test_greedy_tokens_are_those_of_transformers(family, backend, tmp_path):
    """Steps of 9 tokens beside which a range of 8 finds no room, few pages, so that requests lose
    theirs; and once more, over what the cache kept."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    prompts = some_prompts(family, 5)
    right = [expected(model, prompt, 9) for prompt in prompts]
    other = 1 - SEEN[family].bidirectional
    causal = [{**p, "token_type_ids": p["token_type_ids"] * 0 + other} for p in prompts]
    assert sum(expected(model, p, 9) != r for p, r in zip(causal, right, strict=True)) > 2
    llm = make_llm(
        tmp_path, backend=backend, num_blocks=24, max_num_batched_tokens=9, max_num_seqs=3
    )
    for _ in range(2):
        assert generate(llm, prompts, 9) == right
    assert llm.stats.num_used_blocks == 0
    assert llm.stats.num_preemptions > 0
    assert [f.token_types for f in probe(model, 64)] == [SEEN[family]] * 3


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_greedy_tokens_on_slower_backends_are_those_of_transformers(backend, tmp_path):
    pytest.importorskip("triton")
    model = make_model("paligemma", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    prompts = some_prompts("paligemma", 2)
    llm = make_llm(tmp_path, backend=backend, block_size=16)
    assert generate(llm, prompts, 3) == [expected(model, p, 3) for p in prompts]


def test_prompts_share_what_is_before_the_first_range_that_differs(tmp_path):
    model = make_model("gemma3")
    model.save_pretrained(tmp_path)
    start, middle = list(range(40, 56)), list(range(60, 76))
    ids = [*start, *[IMAGE] * 4, *middle, *[IMAGE] * 4, 9]

    def prompt(*seeds: int, **changes: Any) -> dict[str, torch.Tensor]:
        types = [int(token == IMAGE) for token in ids]
        given = {"input_ids": ids, "token_type_ids": types, **changes}
        rows = {name: torch.tensor([row]) for name, row in given.items()}
        return {**rows, "pixel_values": torch.cat([pixels(seed) for seed in seeds])}

    llm = make_llm(tmp_path)
    cached = 0
    for one, num_shared in (
        (prompt(1, 2), 0),
        (prompt(1, 2), 40),
        (prompt(1, 3), 36),
        (prompt(4, 2), 16),
        (prompt(1, 2, token_type_ids=[0] * 15 + [1] + [int(i == IMAGE) for i in ids[16:]]), 12),
    ):
        assert generate(llm, [one], 6) == [expected(model, one, 6)]
        assert llm.stats.num_cached_tokens == cached + num_shared
        cached += num_shared


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path):
    make_model("gemma3").save_pretrained(tmp_path / "gemma3")
    make_model("paligemma").save_pretrained(tmp_path / "paligemma")
    tiny_models.save_model(tmp_path / "llama")
    good = some_prompts("gemma3", 1)[0]
    ids = good["input_ids"][0].tolist()
    no_image = [[5, 6, 7]]
    flat = torch.zeros_like(good["token_type_ids"])
    long = {"input_ids": [5] * 40, "token_type_ids": [0, *[1] * 13, *[0] * 26]}
    llm = make_llm(tmp_path / "gemma3", max_num_batched_tokens=16)
    for prompt, message in (
        ({**good, "token_type_ids": [0, 1]}, r"token_type_ids has 2 entries for \d+ tokens"),
        ({**good, "token_type_ids": [2] * len(ids)}, "token_type_ids has 2 at position 0"),
        ({**good, "token_type_ids": flat}, "image token at position"),
        ({**good, "input_ids": no_image, "token_type_ids": [0, 0, 0], "attention_mask": [1, 1, 1]},
         r"has 0 image tokens \(id 300\), and pixel_values of shape \(2, 3, 16, 16\) make 8"),
        ({**good, "pixel_values": "cat"}, "cannot read pixel_values"),
        ({**good, "pixel_values": torch.zeros(2, 16)}, "cannot read pixel_values"),
        ({"input_ids": ids, "pixel_values": good["pixel_values"]}, "without token_type_ids"),
        ({**good, "attention_mask": [0, *[1] * (len(ids) - 1)]}, "hides tokens"),
        ({**good, "input_ids": [ids, ids]}, "input_ids is not one row"),
        ({**good, "attention_mask": list(good["pixel_values"])}, "attention_mask is not one row"),
        ({**good, "pixels": 1}, "prompt 1 has .*pixels; give what the model's processor makes"),
        (long, r"tokens 1 to 13 see each other .* sliding window of 12"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            llm.generate([[5, 6], prompt])
    assert llm.stats.num_steps == 0
    with pytest.raises(
        RequestError, match=r"0 at positions 0 to 1 and again at 3; .* is one piece"
    ):
        make_llm(tmp_path / "paligemma").generate(
            {"input_ids": [5, 6, 7, 8], "token_type_ids": [0, 0, 1, 0]}
        )
    llama = make_llm(tmp_path / "llama")
    with pytest.raises(RequestError, match="LlamaForCausalLM is no PrefixLM"):
        llama.generate({"input_ids": [5, 6], "token_type_ids": [0, 0]})
    with pytest.raises(RequestError, match="which LlamaForCausalLM is not"):
        llama.generate({"input_ids": [5, 6], "pixel_values": good["pixel_values"]})


def test_a_named_backend_without_ranges_runs_prompts_without_types(tmp_path):
    model = make_model("gemma3")
    model.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, backend=f"{__file__}:Rangeless")
    text = list(range(20, 32))
    plain = {"input_ids": torch.tensor([text])}
    assert generate(llm, [text, plain], 5) == [expected(model, plain, 5)] * 2
    with pytest.raises(RequestError, match=r"which backend .*:Rangeless does not do"):
        llm.generate(some_prompts("gemma3", 1))
