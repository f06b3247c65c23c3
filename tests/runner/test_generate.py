"""`attnkit generate`: where prompts come from, what goes to which stream, exit statuses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from attnkit import LLM, SamplingParams
from attnkit.runner.model import PackedModel

pytest.importorskip("transformers")
pytest.importorskip("typer")
tiny_models = pytest.importorskip("tiny_models")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_models.save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """The installed command's entry point, in this process."""
    from attnkit.cli import main

    def call(*arguments: str, stdin: str = "", model: str | None = None) -> Outcome:
        import io

        argv = ["attnkit", "generate", *arguments, "--backend", "reference"]
        monkeypatch.setattr(sys, "argv", [*argv, "--model", model or str(folder)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code, message = 0, ""
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            message = ended.code if isinstance(ended.code, str) else ""
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err + message)

    return call


@pytest.fixture(scope="module")
def texts(folder) -> dict[str, str]:
    """What the library gives for some prompts, greedily, 10 tokens."""
    llm = LLM(folder, backend="reference")
    params = SamplingParams(temperature=0, max_tokens=10)
    raw = {p: llm.generate(p, params)[0].outputs[0].text for p in ("one", "two", "two\n")}
    chat = llm.chat([{"role": "user", "content": "one"}], params)[0].outputs[0].text
    return {**raw, "chat one": chat}


def test_one_prompt_is_streamed_to_stdout_alone(run, texts):
    got = run("one", "--raw", "--max-tokens", "10")
    assert got.code == 0
    assert got.out == texts["one"] + "\n"
    assert "reference" in got.err
    assert "tokens/s" in got.err


def test_the_chat_template_is_the_default_where_there_is_one(run, texts, tmp_path):
    assert run("one", "--max-tokens", "10").out == texts["chat one"] + "\n"
    assert run("one", "--max-tokens", "10", "--chat").out == texts["chat one"] + "\n"
    tiny_models.save_model(tmp_path, tokenizer=False)
    tokenizer = tiny_models.make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert run("one", "--max-tokens", "10", model=str(tmp_path)).out == texts["one"] + "\n"
    got = run("one", "--chat", model=str(tmp_path))
    assert got.code == 1
    assert "no chat template" in got.err


def test_many_prompts_come_in_order_with_their_prompts(run, texts, tmp_path):
    expected = f"> one\n{texts['one']}\n\n> two\n{texts['two']}\n\n"
    assert run("one", "two", "--raw", "--max-tokens", "10").out == expected
    (tmp_path / "prompts.txt").write_text("one\n\n  \ntwo\n")
    from_file = run("--file", str(tmp_path / "prompts.txt"), "--raw", "--max-tokens", "10")
    assert from_file.out == expected
    from_stdin = run("--file", "-", "--raw", "--max-tokens", "10", stdin="one\ntwo\n")
    assert from_stdin.out == expected


def test_a_dash_is_stdin_as_one_prompt(run, texts):
    got = run("-", "--raw", "--max-tokens", "10", stdin="two\n")
    assert got.out == texts["two\n"] + "\n"


def test_json_is_one_document(run, texts):
    got = run("one", "two", "--raw", "--max-tokens", "10", "--json", "--logprobs", "2")
    document = json.loads(got.out)
    assert [o["text"] for o in document["outputs"]] == [texts["one"], texts["two"]]
    first = document["outputs"][0]
    assert first["prompt"] == "one"
    assert first["finish_reason"] in ("length", "stop")
    assert first["num_prompt_tokens"] == 3
    assert [place[0]["token_id"] for place in first["logprobs"]] == first["token_ids"]
    assert document["backends"] == {"reference": 3}
    alone = json.loads(run("one", "--raw", "--max-tokens", "10", "--json").out)
    assert alone["outputs"][0]["token_ids"] == first["token_ids"]


def test_sampling_options_reach_the_sampler(run):
    options = ["one", "--raw", "--max-tokens", "12", "--temperature", "1.2", "--top-k", "50"]
    first = run(*options, "--seed", "5", "--top-p", "0.9", "--min-p", "0.01").out
    assert run(*options, "--seed", "5", "--top-p", "0.9", "--min-p", "0.01").out == first
    assert run(*options, "--seed", "6", "--top-p", "0.9", "--min-p", "0.01").out != first
    long = run("one", "--raw", "--max-tokens", "10", "--ignore-eos", "--json")
    assert len(json.loads(long.out)["outputs"][0]["token_ids"]) == 10


def test_a_stop_string_ends_the_text(run, texts):
    stop = next(c for c in texts["one"][1:] if c != "\ufffd" and c != texts["one"][0])
    got = run("one", "--raw", "--max-tokens", "10", "--stop", stop, "--stop", "never seen")
    assert got.out == texts["one"].split(stop)[0] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["-", "--file", "-"], "more than once"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["one", "--max-tokens", "0"], "max_tokens 0"),
        (["one", "--temperature", "nan"], "temperature nan"),
        (["one", "--top-p", "2"], "top_p 2"),
        (["one", "--max-tokens", "5000"], "512"),
        (["one", "--dtype", "float8"], "float8"),
        (["one", "--device", "toaster"], "toaster"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_1(run, arguments, message):
    got = run(*arguments)
    assert got.code == 1
    assert got.out == ""
    last = got.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_an_unknown_model_is_one_line(run):
    got = run("one", model="/no/such/model")
    assert got.code == 1
    assert "/no/such/model" in got.err


def test_ctrl_c_prints_what_there_is_and_exits_130(folder):
    """A real process and a real signal, sent once the first step has run."""
    code = f"""
import os, signal, sys
from attnkit.runner.model import PackedModel
forward, calls = PackedModel.forward, []
def counted(*args):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return forward(*args)
PackedModel.forward = counted
sys.argv = ["attnkit", "generate", "one", "--raw", "--ignore-eos",
            "--model", {str(folder)!r}, "--backend", "reference"]
from attnkit.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert_interrupted(Outcome(done.returncode, done.stdout, done.stderr), "3 tokens")


def test_ctrl_c_prints_what_there_is_of_several_prompts(run, monkeypatch):
    """The same signal, in this process."""
    forward, calls = PackedModel.forward, []

    def counted(*args):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(*args)

    monkeypatch.setattr(PackedModel, "forward", counted)
    assert_interrupted(run("one", "two", "--raw", "--ignore-eos"), "6 tokens")


def assert_interrupted(got: Outcome, tokens: str) -> None:
    assert got.code == 128 + signal.SIGINT
    assert "interrupted" in got.err
    assert "Traceback" not in got.err
    assert tokens in got.err
    assert got.out
