"""The judge can fail: each seeded mistake is caught by the check that is about it, which the twin
without the mistake passes."""

from __future__ import annotations

import functools

import pytest

from attnkit.conformance.faults import FAULTS, Fault
from attnkit.conformance.faults.captured import CAPTURED_FAULTS, CapturedTwinBackend
from attnkit.conformance.faults.coded import CODED_FAULTS, CodedTwinBackend
from attnkit.conformance.kit import Check, all_checks
from attnkit.conformance.subject import LawBroken, Subject
from attnkit.conformance.twin import TwinBackend


@functools.cache
def checks(backend: type[TwinBackend]) -> dict[str, Check]:
    return {check.name: check for check in all_checks(Subject.of(backend))}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_mistake_is_caught_by_its_check(fault: Fault) -> None:
    with pytest.raises(LawBroken):
        checks(fault.backend)[fault.caught_by].run()
    checks(TwinBackend)[fault.caught_by].run()


@pytest.mark.parametrize("fault", CODED_FAULTS.values(), ids=CODED_FAULTS)
def test_each_mistake_over_codes_is_caught_by_its_check(fault: Fault) -> None:
    with pytest.raises(LawBroken):
        checks(fault.backend)[fault.caught_by].run()
    checks(CodedTwinBackend)[fault.caught_by].run()


@pytest.mark.parametrize("fault", CAPTURED_FAULTS.values(), ids=CAPTURED_FAULTS)
def test_each_mistake_with_graphs_is_caught_by_its_law(fault: Fault) -> None:
    with pytest.raises(LawBroken):
        checks(fault.backend)[fault.caught_by].run()
    checks(CapturedTwinBackend)[fault.caught_by].run()


def test_there_are_enough_kinds_of_mistakes() -> None:
    assert len(FAULTS) >= 60
    assert {fault.caught_by.split(":")[0] for fault in FAULTS.values()} == {"case", "law", "claim"}
