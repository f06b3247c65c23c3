"""Wrong backends, each with one mistake that real ones have made: the kit must catch every one.

In: nothing. Out: tables, name -> the wrong backend and the check that has to catch it. A judge that
cannot fail judges nothing; `tests/conformance/test_faults.py` shows that this one does, and that
the `twin` without a mistake passes the same check.

    fault        a mistake, and tables of them
    visibility   what a query sees
    scores       scores, softmax, LSE
    pages        pages that are read and written
    outputs      what a forward leaves behind
    plans        plans, batches, claims
    coded        quantised caches
    captured     graphs
"""

from attnkit.conformance.faults.captured import CAPTURED_FAULTS
from attnkit.conformance.faults.coded import CODED_FAULTS
from attnkit.conformance.faults.fault import Fault
from attnkit.conformance.faults.outputs import OUTPUT_FAULTS
from attnkit.conformance.faults.pages import PAGE_FAULTS
from attnkit.conformance.faults.plans import PLAN_FAULTS
from attnkit.conformance.faults.scores import SCORE_FAULTS
from attnkit.conformance.faults.visibility import VISIBILITY_FAULTS

FAULTS: dict[str, Fault] = {
    **VISIBILITY_FAULTS,
    **SCORE_FAULTS,
    **PAGE_FAULTS,
    **OUTPUT_FAULTS,
    **PLAN_FAULTS,
}
"""Those of the plain `twin`."""

__all__ = ["CAPTURED_FAULTS", "CODED_FAULTS", "FAULTS", "Fault"]
