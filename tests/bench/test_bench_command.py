"""The command: from arguments to tables, record and plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnkit.bench import __main__ as command
from attnkit.bench import session
from attnkit.bench.roofline import Ceilings, measure
from attnkit.errors import AttnkitError

SHAPE = "heads=4/2,d=16,page=16,dtype=float32"


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Small ceilings and a small cache: the command's own are for real machines."""

    def small(device: torch.device, dtypes) -> Ceilings:
        return measure(device, dtypes, num_bytes=1 << 16, size=32)

    monkeypatch.setattr(command, "measure_ceilings", small)
    monkeypatch.setattr(session, "last_level_cache_bytes", lambda: 16 << 10)


def test_a_record_says_what_was_measured_and_where(tmp_path: Path, capsys) -> None:
    path = tmp_path / "record.json"
    status = command.main(
        [
            *("decode", "build", "--quick", "--device", "cpu", "--backend", "reference"),
            *("--against", "sdpa,vllm-cpu,fa3", "--json", str(path)),
            *("--shape", f"decode:batch=2,ctx=37,{SHAPE}", "--shape", f"build:requests=3,{SHAPE}"),
        ]
    )
    assert status == 0
    record = json.loads(path.read_text())
    rows = {(r["workload"].split()[0], r["contender"]): r for r in record["rows"]}
    assert rows["decode", "reference"]["status"] == "ok"
    assert rows["decode", "sdpa"]["is_rival"]
    assert rows["decode", "fa3"]["status"] == "not installed"
    assert rows["decode", "reference"]["best_rival"] == "sdpa"
    assert rows["decode", "reference"]["fraction"] > 0
    assert rows["build", "reference"]["mode"] == "host"
    (name,) = [n for n in record["workloads"] if n.startswith("decode")]
    assert record["workloads"][name]["seq_lens"] == [37, 37]
    assert record["machine"]["torch"] == torch.__version__
    assert record["machine"]["threads"] == torch.get_num_threads()
    assert set(record["source"]) == {"version", "commit", "dirty"}
    assert record["ceilings"]["read_bytes_per_s"] > 0
    out = capsys.readouterr().out
    assert "decode B2 ctx37 4/2 D16 page16 fp32" in out
    assert "not installed: fa3" in out

    assert command.main(["show", str(path)]) == 0
    assert capsys.readouterr().out == out
    assert command.main(["compare", str(path), str(path)]) == 0
    assert "1.000" in capsys.readouterr().out


def test_the_record_is_written_after_each_workload(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "record.json"
    real, calls = session._measure, []

    def dies_at_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(session, "_measure", dies_at_the_second)
    shapes = [x for n in (1, 2) for x in ("--shape", f"batch={n},ctx=20,{SHAPE}")]
    with pytest.raises(KeyboardInterrupt):
        command.main(
            [
                *("decode", "--quick", "--device", "cpu", "--backend", "reference"),
                *("--against", "none", "--json", str(path), *shapes),
            ]
        )
    assert len(json.loads(path.read_text())["rows"]) == 1


def test_one_of_ours_that_is_wrong_fails_the_command(tmp_path: Path, capsys) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from attnkit.backends.reference import ReferenceBackend, ReferenceImpl\n"
        "class Impl(ReferenceImpl):\n"
        "    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):\n"
        "        super().forward(layer, query, key, value, kv_cache, attn_metadata, output)\n"
        "        return output.mul_(1.5)\n"
        "class Wrong(ReferenceBackend):\n"
        "    @staticmethod\n"
        "    def get_impl_cls():\n"
        "        return Impl\n"
    )
    status = command.main(
        [
            *("decode", "--quick", "--device", "cpu", "--against", "none"),
            *("--backend", f"{wrong}:Wrong", "--shape", f"batch=1,ctx=20,{SHAPE}"),
        ]
    )
    assert status == 1
    assert "wrong: relative error" in capsys.readouterr().out


def test_list_names_the_workloads_of_a_preset(capsys) -> None:
    assert command.main(["list", "--preset", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "decode           decode B64 ctx4096 32/8 D128 page16 bf16" in lines
    assert command.main(["list", "decode", "--preset", "h200", "--only", "ctx8192"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense", "--preset", "cpu"], "no group nonsense; use all, e2e, decode"),
        (["decode", "--shape", "foo:batch=1"], "--shape foo:batch=1 is for 'foo', which is not"),
        (["decode", "--shape", "prefill:batch=1"], "is for 'prefill', which is not measured"),
        (
            ["decode", "--shape", "batch=1", "--preset", "cpu"],
            "--preset has no effect on decode with",
        ),
        (["decode", "--model", "x"], "--model has no effect on decode; leave it out"),
        (["e2e", "--layout", "HND"], "--layout has no effect on e2e; leave it out"),
        (
            ["decode", "--commit", "abc"],
            "--commit has no effect on decode without --json or --plot",
        ),
        (["compare", "a", "b", "--quick"], "--quick has no effect on compare a b; leave it out"),
        (["show", "a", "--backend", "cpu"], "--backend has no effect on show a; leave it out"),
        (["list", "--json", "a"], "--json has no effect on list; leave it out"),
        (["decode", "--preset", "tpu"], "preset 'tpu'"),
        (["nonsense", "--shape", "batch=1"], "--shape needs a kind"),
        (["list", "--preset", "cpu", "--only", "zzz"], "no workload's name contains 'zzz'"),
        (["decode", "--threads", "100000"], "--threads 100000 is not allowed"),
        (["decode", "--against", "fa9"], "no rival is called fa9"),
        (["decode", "--backend", "nobody"], "no backend is called 'nobody'"),
        (["decode", "--layout", "XYZ"], "layout 'XYZ'"),
        (["compare", "one.json"], "compare takes 2 record file(s), but 1 were given"),
        (["show", "absent.json"], "cannot read absent.json"),
        (["e2e", "--shape", "e2e:prompts=x"], "shape of e2e has no 'prompts=x'"),
    ],
)
def test_bad_arguments_are_explained(arguments: list[str], complaint: str, capsys) -> None:
    reads = arguments[0] in ("compare", "show")
    assert command.main([*arguments, *([] if reads else ["--device", "cpu"])]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_device_that_is_not_there_is_named(capsys) -> None:
    for name, complaint in (
        ("cuda", "torch sees no CUDA device"),
        ("x", "device 'x' is not known"),
    ):
        assert command.main(["decode", "--device", name]) == 1
        assert complaint in capsys.readouterr().err


def test_no_arguments_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main([])
    assert stopped.value.code == 2


def test_the_module_runs_without_typer_rich_and_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('typer', 'rich', 'matplotlib'):\n    sys.modules[name] = None\n"
    )
    source = Path(command.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "attnkit.bench", "list", "--preset", "cpu"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "decode B8 ctx4096" in done.stdout


def test_attnkit_bench_is_the_same_command(capsys) -> None:
    pytest.importorskip("typer", reason="the command attnkit needs typer")
    from attnkit.cli.app import app

    with pytest.raises(SystemExit) as stopped:
        app(["bench", "list", "--preset", "cpu", "--only", "ctx16384"])
    assert stopped.value.code == 0
    assert "B8 ctx16384 32/8 D128" in capsys.readouterr().out


def test_errors_of_the_bench_are_attnkits() -> None:
    from attnkit.bench.contender import NotInstalled, Refused
    from attnkit.bench.verify import WrongOutput

    assert issubclass(NotInstalled, Refused)
    assert issubclass(Refused, AttnkitError)
    assert issubclass(WrongOutput, AttnkitError)
