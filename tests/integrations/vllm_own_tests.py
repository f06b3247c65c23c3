"""vLLM's own attention tests on attnkit's backends: `make test-vllm-own` runs it.

In: the Python of an environment that has vLLM for a CPU, attnkit and pytest, and a checkout of vLLM's
source of the same version, whose tests/v1/attention runs against that installed vLLM. Out: per file what
passed, failed and was skipped, with the reasons; with --json the list, and exit status 1 where our
backend failed.

    python tests/integrations/vllm_own_tests.py .venv-vllm-0.32.0/bin/python vllm --json list.json

vLLM's numerical test (test_attention_backends.py) has a list of backends for CUDA; vllm_own_plugin.py,
which pytest loads there, lets it test ours instead, in all of its cases. Nothing is fetched: the models
that it names are known by their configurations.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

SUBJECT = "test_attention_backends"
"""The file whose backends are exchanged for ours."""

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": _LLAMA,
    "Qwen/Qwen3-0.6B": {
        **_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
    },
    "microsoft/Phi-tiny-MoE-instruct": {
        **_LLAMA, "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe",
        "intermediate_size": 448, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "sliding_window": 2047, "max_position_embeddings": 4096,
    },
    "google/embeddinggemma-300m": {
        **_LLAMA, "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 24, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "max_position_embeddings": 2048, "use_bidirectional_attention": True,
    },
}  # fmt: skip
"""Shapes of the models that the tests name."""


def main() -> None:
    """Run, list, report."""
    options = _parser().parse_args()
    checkout = options.checkout.resolve()
    folder = checkout / "tests" / "v1" / "attention"
    names = options.files or sorted(path.name for path in folder.glob("test_*.py"))
    if not (folder / f"{SUBJECT}.py").exists():
        sys.exit(f"{checkout} is no checkout of vLLM: it has no tests/v1/attention/{SUBJECT}.py")
    with tempfile.TemporaryDirectory() as place:
        # Beside `tests` must be no `vllm`, or the checkout's would hide the installed one.
        Path(place, "tests").symlink_to(checkout / "tests")
        _write_hub(Path(place, "hub"))
        results = _run(options, place, names)
    listed = {
        "vllm": _version(options.python),
        "backend": options.backend,
        "files": {name: _counts(results, name) for name in names},
        "failed": _reasons(results, "failed"),
        "skipped": _reasons(results, "skipped"),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(listed, indent=1) + "\n")
    for name, counts in listed["files"].items():
        print(f"{name:55} {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")
    for name, reasons in listed["failed"].items():
        for reason, count in reasons.items():
            print(f"{name}: {count} failed: {reason}")
    if not results or SUBJECT in listed["failed"]:
        sys.exit(f"attnkit's {options.backend} does not pass vLLM's test of backends")


def _run(options: argparse.Namespace, place: str, names: list[str]) -> list[dict[str, str]]:
    report = Path(place, "report.xml")
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ATTNKIT_VLLM")}
    command = [
        *(options.python, "-m", "pytest", "-q", "--tb=line", f"--junitxml={report}"),
        *("-c", os.devnull, "--rootdir", place, "--noconftest", "-p", "no:cacheprovider"),
        *("-p", "vllm_own_plugin", "--continue-on-collection-errors"),
        *(f"tests/v1/attention/{name}" for name in names),
    ]
    subprocess.run(
        [*command, "-k", options.k] if options.k else command,
        cwd=place,
        env={
            **inherited,
            "PYTHONPATH": str(Path(__file__).parent),
            "ATTNKIT_VLLM": options.backend,
            "VLLM_TARGET_DEVICE": "cpu",
            "HF_HUB_CACHE": f"{place}/hub",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        },
        check=False,
    )
    if not report.exists():
        sys.exit("pytest ended before it wrote a report; see above")
    return [_result(case) for case in ET.parse(report).iter("testcase")]


def _result(case: ET.Element) -> dict[str, str]:
    test = f"{case.get('classname', '')}.{case.get('name', '')}".removeprefix("tests.v1.attention.")
    for outcome, tag in (("failed", "failure"), ("failed", "error"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return {"test": test.strip("."), "outcome": outcome, "reason": _reason(found)}
    return {"test": test, "outcome": "passed", "reason": ""}


def _reason(found: ET.Element) -> str:
    """What pytest marks as the error, or else its message; without paths of this machine."""
    lines = (found.text or "").splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    said = marked or (found.get("message") or "no reason given").splitlines()
    return re.sub(r"\(?/[^\s:]+\)?", "...", " ".join(said[:2]))[:200]


def _file(result: dict[str, str]) -> str:
    return re.split(r"[.\[]", result["test"].removeprefix("tests.v1.attention."))[0]


def _counts(results: list[dict[str, str]], name: str) -> dict[str, int]:
    return dict(Counter(r["outcome"] for r in results if f"{_file(r)}.py" == name))


def _reasons(results: list[dict[str, str]], outcome: str) -> dict[str, dict[str, int]]:
    """File -> reason -> how many tests."""
    found: dict[str, dict[str, int]] = {}
    for result in results:
        if result["outcome"] == outcome:
            reasons = found.setdefault(_file(result), {})
            reasons[result["reason"]] = reasons.get(result["reason"], 0) + 1
    return found


def _write_hub(hub: Path) -> None:
    """The models as a cache of the hub holds them, with their configurations alone."""
    for name, config in MODELS.items():
        model = hub / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("0")


def _version(python: Path) -> str:
    code = "import vllm; print(vllm.__version__)"
    return subprocess.check_output([python, "-c", code], text=True).split()[-1]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("python", type=Path, help="Python with vLLM, attnkit and pytest")
    made.add_argument("checkout", type=Path, help="vLLM's source, of the same version")
    made.add_argument("files", nargs="*", help="of tests/v1/attention (all)")
    made.add_argument("--backend", default="cpu", help="of attnkit (cpu)")
    made.add_argument("-k", help="as pytest's")
    made.add_argument("--json", type=Path, help="write the list here")
    return made


if __name__ == "__main__":
    main()
