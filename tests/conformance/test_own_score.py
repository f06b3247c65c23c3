"""A variant that the contract has no word for is judged by what its backend says that it means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnkit.conformance import verify

ROOT = Path(__file__).parents[2]


@pytest.fixture
def variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that docs/add-a-score.md tells its reader to write, beside that of add-a-backend.md."""
    for name, page in (("my_attention", "add-a-backend"), ("my_variant", "add-a-score")):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        (tmp_path / f"{name}.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "my_variant.py"


def test_the_documented_variant_passes_the_kit(variant: Path) -> None:
    report = verify(f"{variant}:Fading")
    assert report.ok, str(report)
    assert report.num_cases > 80


def test_without_its_meaning_it_is_wrong_and_with_another_too(variant: Path) -> None:
    text = variant.read_text()
    for change in (("own_score", "meaning"), ("- 0.5 * numpy", "+ 0.5 * numpy")):
        other = variant.with_name(f"other_{len(change[0])}.py")
        other.write_text(text.replace(*change))
        report = verify(f"{other}:Fading", filter="plain-extend")
        assert len(report.failed) == 1
