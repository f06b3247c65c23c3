"""The kit in several processes: the same outcomes in the same order, and nothing lost when one dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnkit.conformance import verify
from attnkit.conformance.twin import TwinBackend
from attnkit.errors import ConfigurationError

DIES = """
import os
from attnkit.conformance.twin import TwinBackend, TwinImpl

class MortalImpl(TwinImpl):
    def forward(self, *args, **kwargs):
        os._exit(1)

class Mortal(TwinBackend):
    @staticmethod
    def get_impl_cls():
        return MortalImpl
"""


def test_two_processes_say_what_one_says() -> None:
    calls: list[tuple[int, int, str]] = []
    alone = verify("reference", filter="plain-decode")
    spread = verify(
        "reference", filter="plain-decode", jobs=2, progress=lambda *call: calls.append(call)
    )
    assert spread.outcomes == alone.outcomes
    assert [done for done, _, _ in calls] == [1, 2, 3]
    assert sorted(name for _, _, name in calls) == sorted(o.name for o in alone.outcomes)


def test_a_process_that_dies_fails_what_was_not_over(tmp_path: Path) -> None:
    path = tmp_path / "mortal.py"
    path.write_text(DIES)
    report = verify(f"{path}:Mortal", filter="plain-decode", jobs=2)
    assert len(report.failed) == 3
    assert all("a process that judged died" in o.message for o in report.failed)


@pytest.mark.parametrize(("backend", "jobs"), [(TwinBackend, 2), ("reference", 0)])
def test_jobs_that_cannot_be_are_named(backend: object, jobs: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"jobs={jobs} with .*by name"):
        verify(backend, jobs=jobs)  # type: ignore[arg-type]
