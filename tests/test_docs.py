"""Docs that state facts of the code are generated, and not stale; examples in them run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit.bench.presets import PRESETS, preset
from attnkit.environment import ENVIRONMENT

ROOT = Path(__file__).parents[1]


def test_generated_docs_are_fresh() -> None:
    # In a process of its own: under the interpreter, Triton says of itself that it runs on a CPU.
    code = "import json; from attnkit.cli.docs import generated_docs as g; print(json.dumps(g()))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    for name, text in json.loads(run.stdout).items():
        assert (ROOT / "docs" / name).read_text() == text, f"docs/{name}: run `make docs`"


def test_figures_are_those_of_the_records() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "measured.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_environment_variable_is_documented() -> None:
    read = {
        variable
        for file in (ROOT / "src").rglob("*.py")
        for variable in re.findall(r'"(ATTNKIT_[A-Z_]+)"', file.read_text())
    }
    assert read == set(ENVIRONMENT)


def _python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def test_the_readme_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNKIT_BACKEND", raising=False)
    for page in ("README.md", "docs/layers.md"):
        blocks = _python_blocks(ROOT / page)
        assert blocks
        for block in blocks:
            exec(compile(block, page, "exec"), {"__name__": "readme"})


def test_every_group_of_the_bench_is_in_its_page() -> None:
    page = (ROOT / "docs" / "bench.md").read_text()
    groups = {group for name in PRESETS for group in preset(name)}
    assert not [g for g in groups if f"`{g}`" not in page and f"| {g} |" not in page]


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
