"""verify: judge a backend and say what passed, what failed and what it refuses.

In: a backend class or name, and a device. Out: a frozen `Report`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.conformance.kit import Outcome, all_checks, outcome_of, subject_of
from attnkit.conformance.processes import judge
from attnkit.contract import AttentionBackend
from attnkit.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The judgement on a backend.

    Attributes:
        backend: its name.
        device: where it ran.
        outcomes: of every check, in order.
        seconds: it took.
    """

    backend: str
    device: str
    outcomes: tuple[Outcome, ...]
    seconds: float

    def _with(self, status: str) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.status == status)

    @property
    def passed(self) -> tuple[Outcome, ...]:
        """Checks that passed."""
        return self._with("passed")

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Checks that failed, each with what was wrong."""
        return self._with("failed")

    @property
    def refused(self) -> tuple[Outcome, ...]:
        """Cases and laws the backend refuses, each with its reason."""
        return self._with("refused")

    @property
    def unjudged(self) -> tuple[Outcome, ...]:
        """Claims the kit cannot judge."""
        return self._with("unjudged")

    @property
    def num_cases(self) -> int:
        """Cases that ran and passed."""
        return sum(o.name.startswith("case:") for o in self.passed)

    @property
    def ok(self) -> bool:
        """Nothing failed and something passed; of the cases too, if any were asked for, since a
        backend that refuses everything is not right."""
        asked_cases = any(o.name.startswith("case:") for o in self.outcomes)
        return not self.failed and bool(self.passed) and (self.num_cases > 0 or not asked_cases)

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values, for JSON."""
        summary = {"ok": self.ok, "num_cases": self.num_cases}
        return {**summary, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        word = "right" if self.ok else "WRONG" if self.failed else "not judged, since no case ran"
        lines = [
            f"{self.backend} on {self.device}: {word}. "
            f"{len(self.passed)} checks passed ({self.num_cases} cases), {len(self.failed)} failed, "
            f"{len(self.refused)} refused, {len(self.unjudged)} unjudged, in {self.seconds:.1f} s"
        ]
        lines += [f"  failed {o.name}: {o.message}" for o in self.failed]
        lines += [f"  unjudged {o.name}: {o.message}" for o in self.unjudged]
        return "\n".join(lines)


def verify(
    backend: str | type[AttentionBackend],
    *,
    device: torch.device | str = "cpu",
    filter: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    jobs: int = 1,
) -> Report:
    """Judge a backend on everything it claims.

    Args:
        backend: a class, or a name as `attnkit.select` takes it (`path/to/file.py:Class` too).
        device: where to run.
        filter: only checks whose name contains this.
        progress: called before each check with how many are done, how many there are, and its name; with
            several jobs after each.
        jobs: processes to run checks in. More than one needs a backend by name, and a script of its own
            that starts this has `if __name__ == "__main__":` around it, as Python's processes ask for.

    Raises:
        BackendError: there is no such backend, or it cannot run on this machine.
        ConfigurationError: there is no such device, no check has such a name, or `jobs` is below 1, or
            above it with a class.
    """
    if jobs < 1 or (jobs > 1 and not isinstance(backend, str)):
        raise ConfigurationError(
            f"jobs={jobs} with {backend!r}: jobs is at least 1, and more than one take the backend by "
            "name ('cpu', 'path/to/file.py:Class' or 'package.module:Class'), since each process has to "
            "find it"
        )
    subject = subject_of(backend, device)
    started = time.perf_counter()
    every = all_checks(subject)
    places = {c.name: i for i, c in enumerate(every) if filter is None or filter in c.name}
    if not places:
        raise ConfigurationError(
            f"no check of {subject.name} has {filter!r} in its name; names are such as "
            f"{', '.join(c.name for c in every[:: len(every) // 3])}"
        )
    outcomes = []
    if jobs > 1 and isinstance(backend, str):
        for outcome in judge(backend, str(device), places, jobs):
            outcomes.append(outcome)
            if progress is not None:
                progress(len(outcomes), len(places), outcome.name)
        outcomes.sort(key=lambda outcome: places[outcome.name])
    else:
        for done, (name, place) in enumerate(places.items()):
            if progress is not None:
                progress(done, len(places), name)
            outcomes.append(outcome_of(every[place]))
    return Report(
        backend=subject.name,
        device=str(subject.device),
        outcomes=tuple(outcomes),
        seconds=time.perf_counter() - started,
    )
