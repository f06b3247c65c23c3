"""A prefix leaves one engine and enters another, with other pages, layouts, backends; bad files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit import LLM, SamplingParams
from attnkit.backends.reference import ReferenceBackend
from attnkit.contract import KVCacheLayout
from attnkit.errors import (
    CacheError,
    ConfigurationError,
    OutOfPages,
    RequestError,
    UnsupportedConfiguration,
)
from attnkit.kvcache.transfer import PrefixContents
from attnkit.runner.kv_file import SafetensorsFile

pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
tiny_models = pytest.importorskip("tiny_models")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [(7 * i) % 250 + 3 for i in range(75)]


class NarrowLayout(ReferenceBackend):
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)


class NoConnector(ReferenceBackend):
    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


class InMemory:
    """A connector of one's own."""

    def __init__(self) -> None:
        self.kept: PrefixContents | None = None

    def save(self, contents: PrefixContents) -> None:
        self.kept = contents

    def load(self, wanted: PrefixContents) -> PrefixContents:
        assert self.kept is not None
        return self.kept


def make_llm(folder: Path, **settings: Any) -> LLM:
    given = {"backend": "reference", "block_size": 4, "num_blocks": 200, "debug_poison": True}
    return LLM(folder, kv_connector=True, **{**given, **settings})


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def saved(request, tmp_path_factory) -> tuple[Path, Path, list[int]]:
    """A model (the second has windows of 9), a file of 80 tokens, and the tokens generated."""
    folder = tiny_models.save_model(tmp_path_factory.mktemp("model"), request.param)
    llm = make_llm(folder)
    tokens = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    file = folder / "prefix.kv"
    # 75 + 8 tokens, the last of which was never fed back: 82 in the cache, 20 whole pages of 4.
    assert llm.save_kv(SafetensorsFile(file), PROMPT + tokens) == 80
    assert llm.stats.num_used_blocks == 0
    return folder, file, tokens


@pytest.mark.parametrize(
    ("settings", "num_loaded", "num_cached"),
    [
        ({}, 80, 72),
        ({"backend": "cpu", "block_size": 16}, 80, 64),
        ({"block_size": 3}, 78, 72),
        ({"backend": NarrowLayout, "block_size": 8}, 80, 72),
    ],
)
def test_another_engine_goes_on_without_computing_it(saved, settings, num_loaded, num_cached):
    folder, file, tokens = saved
    llm = make_llm(folder, **settings)
    assert llm.load_kv(SafetensorsFile(file)) == num_loaded
    before = llm.stats
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.outputs[0].token_ids == tokens
    assert output.num_cached_tokens == num_cached
    computed = llm.stats.num_computed_tokens - before.num_computed_tokens
    assert computed == len(PROMPT) - num_cached + len(tokens) - 1
    assert llm.stats.num_used_blocks == 0
    # What was loaded can be saved again, and loading twice changes nothing.
    assert llm.load_kv(SafetensorsFile(file)) == num_loaded
    again = InMemory()
    assert llm.save_kv(again, PROMPT + tokens) >= num_loaded
    other = make_llm(folder)
    other.load_kv(again)
    assert other.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == tokens


@pytest.mark.parametrize("first_token", [64, 71, 75])
def test_a_window_that_kept_too_little_is_computed_again(tmp_path, first_token):
    """Rows from a token on alone: enough for pages of 4, in part for 16, not one whole page for 64."""
    folder = tiny_models.save_model(tmp_path, "gemma3_text", tokenizer=False)
    llm, kept = make_llm(folder), InMemory()
    tokens = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    llm.save_kv(kept, PROMPT + tokens)
    assert kept.kept is not None
    layers = {
        name: layer
        if llm.engine.model.layers[name].sliding_window is None
        else dataclasses.replace(
            layer, first_token=first_token, rows=layer.rows[first_token - layer.first_token :]
        )
        for name, layer in kept.kept.layers.items()
    }
    kept.kept = dataclasses.replace(kept.kept, layers=layers)
    for block_size in (4, 16, 64):
        other = make_llm(folder, block_size=block_size)
        other.load_kv(kept)
        (output,) = other.generate(PROMPT, GREEDY)
        assert output.outputs[0].token_ids == tokens
        assert output.num_cached_tokens == (72 if block_size == 4 and first_token == 64 else 0)


def test_another_prompt_does_not_find_it(saved):
    folder, file, _ = saved
    llm = make_llm(folder)
    llm.load_kv(SafetensorsFile(file))
    (output,) = llm.generate([PROMPT[0] + 1, *PROMPT[1:]], GREEDY)
    assert output.num_cached_tokens == 0


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(bytes(data))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def _rewrite(file: Path, **metadata: str | None) -> None:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
        kept = {**opened.metadata(), **metadata}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    found = {k: v for k, v in kept.items() if v is not None}
    safetensors_torch.save_file(tensors, file, metadata=found)


def _shift(file: Path) -> None:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
        layers = json.loads(opened.metadata()["layers"])
    next(iter(layers.values()))["first_token"] += 1
    _rewrite(file, layers=json.dumps(layers))


BAD: list[tuple[Any, str]] = [
    (lambda file: file.unlink(), "cannot be read"),
    (lambda file: file.write_text("hello"), "no safetensors file, or damaged"),
    (_cut, "no safetensors file, or damaged"),
    (_flip, "have changed"),
    (
        lambda file: safetensors_torch.save_file({"w": torch.ones(2)}, file),
        "but not one of saved keys",
    ),
    (lambda file: _rewrite(file, model="other"), "another model"),
    (lambda file: _rewrite(file, layers=None), "damaged: KeyError"),
    (lambda file: _rewrite(file, layers="[]"), "damaged: AttributeError"),
    (lambda file: _rewrite(file, layers="{"), "damaged: JSONDecodeError"),
    (lambda file: _rewrite(file, layers="{}"), "other layers"),
    (_shift, "rows from token 1 on"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_file_is_refused_before_anything_is_loaded(tmp_path, spoil, message):
    folder = tiny_models.save_model(tmp_path, tokenizer=False)
    llm = make_llm(folder)
    file = SafetensorsFile(folder / "prefix.kv")
    llm.generate(PROMPT, GREEDY)
    llm.save_kv(file, PROMPT)
    spoil(file.path)
    fresh = make_llm(folder)
    with pytest.raises(CacheError, match=message):
        fresh.load_kv(file)
    assert fresh.engine.manager.pool.num_cached == fresh.stats.num_used_blocks == 0
    assert fresh.generate(PROMPT, GREEDY)[0].num_cached_tokens == 0


def test_the_file_of_another_model_or_dtype_is_refused(saved, tmp_path):
    folder, file, _ = saved
    connector = SafetensorsFile(file)
    with pytest.raises(CacheError, match="values in float32, and the model was loaded in bfloat16"):
        make_llm(folder, dtype="bfloat16").load_kv(connector)
    other = tiny_models.save_model(tmp_path, tokenizer=False, rms_norm_eps=0.5)
    with pytest.raises(CacheError, match="another model"):
        make_llm(other).load_kv(connector)
    llm = make_llm(folder)
    wanted = llm.engine.empty_prefix(llm._checked_fingerprint())
    name, layer = next(iter(wanted.layers.items()))
    for changes in (
        {"kv_cache_dtype": "fp8"},
        {"rows": layer.rows.half()},
        {"scales": ((2.0,), (1.0,))},
    ):
        changed = {**wanted.layers, name: dataclasses.replace(layer, **changes)}
        with pytest.raises(CacheError, match=r"whose own are .*load it with the settings"):
            connector.load(dataclasses.replace(wanted, layers=changed))


def test_what_a_connector_of_ones_own_gives_is_looked_at(saved):
    folder, file, _ = saved
    llm = make_llm(folder)
    wanted = llm.engine.empty_prefix(llm._checked_fingerprint())
    right = SafetensorsFile(file).load(wanted)
    name, layer = next(iter(right.layers.items()))
    short = {**right.layers, name: dataclasses.replace(layer, rows=layer.rows[1:])}

    class Store:
        def __init__(self, contents: Any) -> None:
            self.contents = contents

        def load(self, wanted: Any) -> Any:
            return self.contents

        save = load

    for contents, named in (
        (None, "load of Store gave NoneType"),
        (dataclasses.replace(right, model="another"), "Store holds .* of another model"),
        (dataclasses.replace(right, layers=short), "Store has .* it is damaged"),
    ):
        with pytest.raises(CacheError, match=named):
            llm.load_kv(Store(contents))
    assert llm.engine.manager.pool.num_cached == 0
    assert llm.load_kv(Store(right)) == 80
    for no_path in (None, 3):
        with pytest.raises(ConfigurationError, match="give the path of a file"):
            SafetensorsFile(no_path)


def test_room_and_permission_are_asked_for_first(saved, tmp_path):
    folder, file, tokens = saved
    small = make_llm(folder, num_blocks=8)
    with pytest.raises(OutOfPages):
        small.load_kv(SafetensorsFile(file))
    assert small.stats.num_used_blocks == small.engine.manager.pool.num_cached == 0
    with pytest.raises(UnsupportedConfiguration, match="KV connector"):
        make_llm(folder, backend=NoConnector)
    with pytest.raises(ConfigurationError, match="prefix cache"):
        make_llm(folder, enable_prefix_caching=False)
    plain = LLM(folder, backend=NoConnector, num_blocks=9)
    with pytest.raises(ConfigurationError, match="kv_connector=True"):
        plain.load_kv(SafetensorsFile(file))
    llm = make_llm(folder)
    with pytest.raises(CacheError, match="no whole page"):
        llm.save_kv(SafetensorsFile(file), PROMPT)
    llm.generate(PROMPT, GREEDY)
    for nothing in (None, 3, "file"):
        with pytest.raises(ConfigurationError, match=r"connector .* object with save"):
            llm.save_kv(nothing, PROMPT)
        with pytest.raises(ConfigurationError, match=r"connector .* object with load"):
            llm.load_kv(nothing)
        with pytest.raises(RequestError, match="the prefix is"):
            llm.save_kv(SafetensorsFile(file), nothing)
    with pytest.raises(CacheError, match="cannot be written"):
        llm.save_kv(SafetensorsFile(tmp_path / "nowhere" / "file"), PROMPT + tokens)


def test_the_page_in_the_docs_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "kv-export.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    folder = tiny_models.save_model(tmp_path, max_position_embeddings=1024)
    monkeypatch.chdir(tmp_path)
    exec(
        compile(
            code.replace("LLM(kv", f"LLM({str(folder)!r}, num_blocks=90, kv"),
            "kv-export.md",
            "exec",
        ),
        {},
    )
    said = capsys.readouterr().out
    assert "640 tokens saved" in said
    assert "640 tokens loaded" in said
    assert "640 tokens not computed" in said


def test_the_command_line_saves_and_continues(tmp_path):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from attnkit.cli.app import app

    folder = tiny_models.save_model(tmp_path)
    prompt, file = "a long story " * 8, str(tmp_path / "story.kv")
    common = [prompt, "--model", str(folder), "--raw", "--block-size", "16", "--max-tokens", "8",
              "--ignore-eos", "--json"]  # fmt: skip
    first = CliRunner().invoke(app, ["generate", *common, "--kv-save", file])
    assert first.exit_code == 0, first.output
    assert "tokens saved to" in first.stderr
    second = CliRunner().invoke(app, ["generate", *common, "--kv-load", file])
    assert second.exit_code == 0, second.output
    (before,), (after,) = (json.loads(run.stdout)["outputs"] for run in (first, second))
    assert after["token_ids"] == before["token_ids"]
    assert before["num_cached_tokens"] == 0
    assert after["num_cached_tokens"] == 96  # of 104, in pages of 16
    two = CliRunner().invoke(app, ["generate", "a", "b", "--model", str(folder), "--kv-save", file])
    assert two.exit_code != 0
    assert "keeps one prompt" in str(two.exception)
    missing = str(tmp_path / "nowhere" / "file")
    for option, named in (("--kv-save", "cannot be written"), ("--kv-load", "cannot be read")):
        refused = CliRunner().invoke(app, ["generate", "a", "--model", "no-model", option, missing])
        assert named in str(refused.exception), "before a model is looked for"
    short = ["a", *common[1:], "--kv-save", file, "--max-tokens", "2"]
    refused = CliRunner().invoke(app, ["generate", *short])
    assert "keeps whole pages of 16 tokens" in str(refused.exception)
