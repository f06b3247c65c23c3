"""Encoder-decoders: greedy tokens of small random models equal transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit import LLM, SamplingParams
from attnkit.errors import ConfigurationError, ModelError, RequestError
from attnkit.runner.model import PackedModel

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
tiny_models = pytest.importorskip("tiny_models")

SIZES = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "decoder_start_token_id": 257,
    "forced_eos_token_id": None,
}
HEARS = {"max_source_positions": 10, "max_target_positions": 64, "num_mel_bins": 8,
         "max_position_embeddings": None}  # fmt: skip
TEXTS = [list(range(40, 61)), [7], list(range(100, 105)), [9, 300, 9, 301] * 9, [33, 2]]


def save(folder: Path, family: str = "bart", **changes: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    hears = family == "whisper"
    auto = transformers.AutoModelForSpeechSeq2Seq if hears else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_sines = "embed_positions" in name and family in ("pegasus", "marian")
            if parameter.dim() > 1 and not is_sines:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return model


def hear(model: Any, features: torch.Tensor, num_tokens: int, start: list[int]) -> list[int]:
    """The likeliest tokens, one after the other, from the whole model without a cache."""
    ids = list(start)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(start) :]


def recordings(num: int) -> list[torch.Tensor]:
    return [torch.randn(1, 8, 20, generator=torch.Generator().manual_seed(i)) for i in range(num)]


def expected(model: Any, text: list[int], num_tokens: int, start: list[int]) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([text]),
            decoder_input_ids=torch.tensor([start]),
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            do_sample=False,
            num_beams=1,
            max_new_tokens=num_tokens,
            eos_token_id=[],
        )
    return out[0, len(start) :].tolist()


def generate(llm: LLM, prompts: list[Any], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", ["bart", "mbart", "pegasus", "marian"])
def test_greedy_tokens_are_those_of_transformers(family, backend, tmp_path):
    """Requests that begin beside others that decode, pages of 4 of both kinds, poisoned."""
    model = save(tmp_path, family)
    llm = LLM(
        tmp_path,
        backend=backend,
        block_size=4,
        num_blocks=200,
        max_num_batched_tokens=3,
        max_num_seqs=3,
        debug_poison=True,
    )
    got = generate(llm, TEXTS, 9)
    assert got == [expected(model, text, 9, [257]) for text in TEXTS]
    assert len({tuple(tokens) for tokens in got}) > 2
    assert [generate(llm, [text], 9)[0] for text in TEXTS] == got  # One query, many keys.
    assert llm.stats.num_used_blocks == 0
    assert backend in llm.explain()


def test_the_answer_may_have_a_beginning_and_requests_may_lose_their_pages(tmp_path):
    model = save(tmp_path)
    llm = LLM(tmp_path, block_size=4, num_blocks=18, max_num_batched_tokens=4, max_num_seqs=4)
    start = [257, 5, 6, 7, 8, 9]
    prompts = [{"encoder_prompt": text, "decoder_prompt": start} for text in TEXTS]
    assert generate(llm, prompts, 12) == [expected(model, text, 12, start) for text in TEXTS]
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_used_blocks == 0


def test_a_text_begins_the_answer_behind_the_start_token(tmp_path):
    """Without what the tokenizer puts around a text."""
    save(tmp_path)
    tokenizer = tiny_models.make_tokenizer()
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 256), ("<|end|>", 257)]
    )
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path, num_blocks=20)
    (output,) = llm.generate(
        {"encoder_prompt": "ab", "decoder_prompt": "cd<|user|>"}, SamplingParams(max_tokens=1)
    )
    assert output.prompt == "ab"
    assert output.prompt_token_ids == [257, *tokenizer.encode("cd", add_special_tokens=False), 258]


def test_greedy_tokens_on_triton_are_those_of_transformers(tmp_path):
    pytest.importorskip("triton")
    model = save(tmp_path, encoder_layers=1, decoder_layers=1)
    llm = LLM(tmp_path, backend="triton", block_size=16, num_blocks=20)
    assert generate(llm, TEXTS[:2], 4) == [expected(model, t, 4, [257]) for t in TEXTS[:2]]


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_recordings_give_the_tokens_of_transformers(backend, tmp_path):
    """Whisper: its encoder makes 10 vectors of 20 frames, more than a step has tokens."""
    if backend == "triton":
        pytest.importorskip("triton")
    model = save(tmp_path, "whisper", **HEARS)
    slow = {"block_size": 16, "max_num_batched_tokens": 9} if backend == "triton" else {}
    llm = LLM(
        tmp_path,
        backend=backend,
        **{"block_size": 4, "max_num_batched_tokens": 3, **slow},
        num_blocks=60,
        max_num_seqs=3,
        debug_poison=True,
    )
    num_tokens = 3 if slow else 9
    given = recordings(2 if slow else 5)
    start = [257, 30, 31, 32]
    prompts = [{"input_features": f} for f in given]
    prompts[1] = {"input_features": given[1][0].numpy(), "decoder_prompt": start}
    right = [hear(model, f, num_tokens, [257]) for f in given]
    right[1] = hear(model, given[1], num_tokens, start)
    got = generate(llm, prompts, num_tokens)
    assert got == right
    assert len({tuple(tokens) for tokens in got}) == len(given)
    assert llm.stats.num_used_blocks == 0


def test_what_is_no_recording_is_refused(tmp_path):
    save(tmp_path / "whisper", "whisper", **HEARS)
    llm = LLM(tmp_path / "whisper", num_blocks=60)
    shape = r"give .*\(8, 20\)"
    for prompt, message in (
        ([5, 6], "prompt 0 is list; give what the model's processor makes of one recording"),
        ({"encoder_prompt": [5]}, "has encoder_prompt; give .* input_features"),
        ({"input_features": torch.zeros(1, 8, 21)}, shape),
        ({"input_features": torch.zeros(2, 8, 20)}, shape),
        ({"input_features": torch.zeros(8, 20, dtype=torch.long)}, shape),
        ({"input_features": "sound"}, shape),
        (
            {"input_features": None},
            "prompt 0: input_features is None; give what the model's processor",
        ),
        (
            {"input_features": torch.zeros(8, 20), "decoder_prompt": 3},
            "prompt 0: decoder_prompt is int",
        ),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt])
    assert llm.stats.num_steps == 0
    save(tmp_path / "bart")
    with pytest.raises(RequestError, match="has input_features; give encoder_prompt"):
        LLM(tmp_path / "bart", num_blocks=20).generate([{"input_features": torch.zeros(8, 20)}])
    engine = LLM(tmp_path / "bart", num_blocks=20).engine
    with pytest.raises(
        RequestError, match=r"Whisper's models alone, which Bart.* is not; give text"
    ):
        engine.add([5], SamplingParams(), input_features=torch.zeros(8, 20))


def test_what_does_not_fit_is_refused(tmp_path):
    save(tmp_path / "bart")
    llm = LLM(tmp_path / "bart", num_blocks=20)
    for prompt, message in (
        ([], "encoder's prompt has 0 tokens"),
        ([5] * 129, "encoder's prompt has 129 tokens"),
        ([320], "token id 320"),
        ({"prompt": [5]}, "give encoder_prompt"),
        ({"encoder_prompt": None}, "prompt 0: encoder_prompt is NoneType; give a text or a list"),
        ({"encoder_prompt": [5], "decoder_prompt": 7.5}, "prompt 0: decoder_prompt is float"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt])
    with pytest.raises(ConfigurationError, match="compile=True is for decoders"):
        LLM(tmp_path / "bart", compile=True)
    tiny_models.save_model(tmp_path / "llama")
    with pytest.raises(RequestError, match="has encoder_prompt; give what the model's processor"):
        LLM(tmp_path / "llama", num_blocks=9).generate([{"encoder_prompt": [5]}])
    model = save(tmp_path / "bart")
    with pytest.raises(ModelError, match=r"generate with attnkit\.LLM"):
        PackedModel(model)
    assert model.config._attn_implementation == "eager"
