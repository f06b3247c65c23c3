"""The kit: every check of a backend, one by one, and what becomes of each.

In: a backend class or name, and a device. Out: checks that can be run in any order, and their outcomes.
`verify` makes a report of them, `suite` the tests of a module.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from attnkit.conformance.names import check_names
from attnkit.conformance.subject import LawBroken, NotClaimed, Subject
from attnkit.contract import AttentionBackend
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
        Check(name="claim:names of the contract", run=lambda: check_names(subject.backend)),
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
