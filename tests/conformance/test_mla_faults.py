"""The judge of latents can fail: each seeded mistake is caught by the check that is about it, which
the twin without the mistake passes."""

from __future__ import annotations

import functools

import pytest

from attnkit.conformance.faults.fault import Fault
from attnkit.conformance.kit import Check, all_checks, cases_of, outcome_of, subject_of
from attnkit.conformance.mla.faults import MLA_FAULTS
from attnkit.conformance.mla.twin import SparseTwinMLABackend, TwinMLABackend
from attnkit.contract import AttentionBackend


@functools.cache
def checks(backend: type[AttentionBackend]) -> dict[str, Check]:
    return {check.name: check for check in all_checks(subject_of(backend))}


@pytest.mark.parametrize("fault", MLA_FAULTS.values(), ids=MLA_FAULTS)
def test_each_mistake_is_caught_by_its_check(fault: Fault) -> None:
    outcome = outcome_of(checks(fault.backend)[fault.caught_by])
    assert outcome.status == "failed", outcome
    right = SparseTwinMLABackend if fault.backend.is_sparse() else TwinMLABackend
    checks(right)[fault.caught_by].run()


def test_there_are_enough_cases() -> None:
    assert len(cases_of(subject_of(TwinMLABackend))) >= 250
