"""One line tests a third party's backend, and the backend of the docs passes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit.conformance import verify

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def documented_backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that docs/add-a-backend.md tells its reader to write."""
    page = (ROOT / "docs" / "add-a-backend.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    path = tmp_path_factory.mktemp("third_party") / "my_attention.py"
    path.write_text(block)
    return path


def run_pytest(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_the_documented_backend_passes_the_kit(documented_backend: Path) -> None:
    report = verify(f"{documented_backend}:MyBackend")
    assert report.ok, str(report)
    assert report.num_cases > 100
    assert any("sink" in outcome.message for outcome in report.refused)


def test_it_is_about_forty_lines(documented_backend: Path) -> None:
    code = [line for line in documented_backend.read_text().splitlines() if line.strip()]
    assert len(code) <= 50


def test_one_line_in_a_test_module(documented_backend: Path) -> None:
    module = documented_backend.parent / "test_mine.py"
    module.write_text(
        "from attnkit.conformance import suite\n\n"
        'test_mine = suite("./my_attention.py:MyBackend", filter="length_")\n'
    )
    done = run_pytest(str(module), cwd=documented_backend.parent)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 10


def test_a_wrong_backend_fails_in_a_test_module(documented_backend: Path) -> None:
    wrong = documented_backend.read_text().replace(
        "key_position <= query_position", "key_position < query_position"
    )
    directory = documented_backend.parent
    (directory / "wrong_attention.py").write_text(wrong)
    module = directory / "test_wrong.py"
    module.write_text(
        "from attnkit.conformance import suite\n\n"
        'test_wrong = suite("./wrong_attention.py:MyBackend", filter="plain-prefill-fp32")\n'
    )
    done = run_pytest(str(module), cwd=directory)
    assert done.returncode == 1
    assert "values are wrong" in done.stdout


def test_the_command_line_option_judges_a_file(documented_backend: Path) -> None:
    done = run_pytest(
        "--attnkit-backend=./my_attention.py:MyBackend",
        "--pyargs",
        "attnkit.conformance.tests",
        "-k",
        "plain or length_1",
        cwd=documented_backend.parent,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 10
