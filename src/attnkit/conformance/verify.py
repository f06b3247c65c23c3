"""verify: judge a backend and say what passed, what failed and what it refuses.

In: a backend class or name, and a device. Out: a frozen `Report`. The same checks, one by one, are
what `suite` turns into tests of a test module.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnkit.conformance.case import Case
from attnkit.conformance.cases import all_cases
from attnkit.conformance.checks import Margin, check_case
from attnkit.conformance.claims import all_claims, check_claim
from attnkit.conformance.laws import LAWS
from attnkit.conformance.mla.cases import all_mla_cases
from attnkit.conformance.mla.claims import all_mla_claims
from attnkit.conformance.mla.laws import MLA_LAWS
from attnkit.conformance.mla.subject import MLASubject
from attnkit.conformance.subject import LawBroken, NotClaimed, Subject
from attnkit.contract import AttentionBackend
from attnkit.errors import ConfigurationError
from attnkit.selection import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to judge.

    Attributes:
        name: `case:...`, `law:...` or `claim:...`; unique.
        run: judges; raises `LawBroken` or `NotClaimed`, returns a case's margin.
    """

    name: str
    run: Callable[[], Margin | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one check.

    Attributes:
        name: of the check.
        status: "passed", "failed", "refused" (the backend says it does not do this) or "unjudged"
            (it says it does, and the kit has no case for it).
        message: what was wrong, or the backend's reason; empty for "passed".
        margin: of a passed case.
    """

    name: str
    status: str
    message: str = ""
    margin: Margin | None = None


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
    checks = [c for c in every if filter is None or filter in c.name]
    if not checks:
        raise ConfigurationError(
            f"no check of {subject.name} has {filter!r} in its name; names are such as "
            f"{', '.join(c.name for c in every[:: len(every) // 3])}"
        )
    outcomes = []
    if jobs > 1 and isinstance(backend, str):
        from attnkit.conformance.processes import judge  # It runs what is defined here.

        names = {c.name for c in checks}
        chosen = [(i, c.name) for i, c in enumerate(every) if c.name in names]
        for outcome in judge(backend, str(device), chosen, jobs):
            outcomes.append(outcome)
            if progress is not None:
                progress(len(outcomes), len(checks), outcome.name)
        order = {name: i for i, name in chosen}
        outcomes.sort(key=lambda outcome: order[outcome.name])
    else:
        for done, check in enumerate(checks):
            if progress is not None:
                progress(done, len(checks), check.name)
            outcomes.append(outcome_of(check))
    return Report(
        backend=subject.name,
        device=str(subject.device),
        outcomes=tuple(outcomes),
        seconds=time.perf_counter() - started,
    )


def subject_of(
    backend: str | type[AttentionBackend], device: torch.device | str = "cpu"
) -> Subject:
    """The backend under judgement: an `MLASubject` if it reads latents.

    Raises:
        BackendError: there is no such backend, or it cannot run on this machine.
    """
    found = resolve(backend) if isinstance(backend, str) else backend
    return (MLASubject if found.is_mla() else Subject).of(backend, device)


def cases_of(subject: Subject) -> Sequence[Case]:
    """The table of cases for such a backend."""
    if isinstance(subject, MLASubject):
        return all_mla_cases(subject.basis())
    return all_cases(subject.basis())


def all_checks(subject: Subject) -> tuple[Check, ...]:
    """Claims first (they are quick and explain the rest), then laws, then cases."""
    cases = cases_of(subject)
    if isinstance(subject, MLASubject):
        claims, laws = all_mla_claims(subject.basis()), MLA_LAWS
    else:
        claims, laws = all_claims(subject.basis()), LAWS
    return (
        *(
            Check(
                name=f"claim:{claim.name}",
                run=lambda claim=claim: check_claim(subject, claim, cases),
            )
            for claim in claims
        ),
        *(
            Check(name=f"law:{name}", run=lambda law=law: law(subject))
            for name, law in laws.items()
        ),
        *(
            Check(name=f"case:{case.name}", run=lambda case=case: check_case(subject, case))
            for case in cases
        ),
    )


def claimed_checks(subject: Subject) -> tuple[Check, ...]:
    """The checks without the cases that the backend refuses."""
    refused = set()
    for case in cases_of(subject):
        try:
            subject.layer(case)
        except NotClaimed:
            refused.add(f"case:{case.name}")
    return tuple(check for check in all_checks(subject) if check.name not in refused)


def outcome_of(check: Check) -> Outcome:
    """Run one check and say what became of it; whatever the judged backend raises is a failure."""
    try:
        margin = check.run()
    except LawBroken as broken:
        return Outcome(name=check.name, status="failed", message=str(broken))
    except NotClaimed as reason:
        status = "unjudged" if check.name.startswith("claim:") else "refused"
        return Outcome(name=check.name, status=status, message=str(reason))
    except Exception as crash:  # noqa: BLE001
        # The judged code is not ours and may raise anything; a crash is one failed check, and the
        # report goes on.
        where = traceback.extract_tb(crash.__traceback__)[-1]
        message = f"{type(crash).__name__}: {crash} ({where.filename}:{where.lineno})"
        return Outcome(name=check.name, status="failed", message=message)
    return Outcome(name=check.name, status="passed", margin=margin)
