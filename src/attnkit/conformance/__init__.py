"""The judge: is an attention backend right? Shipped, so that third parties run it too.

    case      one layer and one batch, as data
    cases     the table of them
    inputs    tensors for a case: `sequences` of tokens, scattered `pages`, and the `step`
    oracle    the right answer in float64, without pages
    budget    how far from it a right backend may be
    subject   the backend under judgement, reached as users reach it
    checks    judge one case
    laws      what needs two runs to be seen
    claims    what the class says of itself
    verify    all of it: a report
    plugin    all of it: pytest
    faults    wrong backends, each of which the kit must catch

`verify("my_attention.py:MyBackend")` gives a `Report`; `test_mine = suite("my_attention.py:MyBackend")`
in a test module gives one test per check.
"""

from attnkit.conformance.case import Basis, Case
from attnkit.conformance.cases import all_cases
from attnkit.conformance.checks import Margin, check_case
from attnkit.conformance.kit import Check, Outcome, all_checks
from attnkit.conformance.plugin import suite
from attnkit.conformance.subject import LawBroken, NotClaimed, Subject
from attnkit.conformance.verify import Report, verify

__all__ = [
    "Basis",
    "Case",
    "Check",
    "LawBroken",
    "Margin",
    "NotClaimed",
    "Outcome",
    "Report",
    "Subject",
    "all_cases",
    "all_checks",
    "check_case",
    "suite",
    "verify",
]
