"""The kit as a test module, for `pytest --attnkit-backend NAME --pyargs attnkit.conformance.tests`.

In: the backends named on the command line. Out: a test per check (see `plugin`).
"""

from __future__ import annotations

from collections.abc import Callable


def test_backend(attnkit_check: Callable[[], None]) -> None:
    attnkit_check()
