"""pytest: one test per check of the kit, for a backend of one's own.

In: a backend, named in a test module (`test_mine = suite("pkg.mod:MyBackend")`) or on the command
line (`pytest --attnkit-backend ./my_attention.py:MyBackend --pyargs attnkit.conformance.tests`).
Out: a test per claim, law and case that the backend takes; what it refuses is not collected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attnkit.conformance.kit import Check, claimed_checks, subject_of
from attnkit.conformance.subject import NotClaimed
from attnkit.contract import AttentionBackend

if TYPE_CHECKING:
    import pytest


def suite(
    backend: str | type[AttentionBackend],
    *,
    device: torch.device | str = "cpu",
    filter: str | None = None,
) -> Callable[[Check], None]:
    """A test function, parametrised with every check; assign it to a name that starts with `test`.

    Args:
        backend: a class, or a name as `attnkit.select` takes it.
        device: where to run.
        filter: only checks whose name contains this.

    Raises:
        BackendError: at collection, if there is no such backend or it cannot run here.
    """
    import pytest

    checks = _checks(backend, device, filter)

    @pytest.mark.parametrize("check", checks, ids=[check.name for check in checks])
    def test(check: Check) -> None:
        run_check(check)

    return test


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnkit")
    group.addoption(
        "--attnkit-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="judge this backend in tests that take `attnkit_check`: a name, path/to/file.py:Class "
        "or package.module:Class; may be given several times",
    )
    group.addoption(
        "--attnkit-device", default="cpu", metavar="DEVICE", help="where to judge it (default: cpu)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests that take `attnkit_check` one call per check of each backend asked for."""
    if "attnkit_check" not in metafunc.fixturenames:
        return
    calls, names = [], []
    backends: list[str] = metafunc.config.getoption("--attnkit-backend") or []
    device: str = metafunc.config.getoption("--attnkit-device") or "cpu"
    for backend in backends:
        for check in _checks(backend, device, None):
            calls.append(lambda check=check: run_check(check))
            names.append(f"{backend}-{check.name}")
    metafunc.parametrize("attnkit_check", calls, ids=names)


def _checks(
    backend: str | type[AttentionBackend], device: torch.device | str, filter: str | None
) -> list[Check]:
    checks = claimed_checks(subject_of(backend, device))
    return [check for check in checks if filter is None or filter in check.name]


def run_check(check: Check) -> None:
    """A check as the body of a test: what the backend refuses is skipped with its reason."""
    import pytest

    try:
        check.run()
    except NotClaimed as reason:
        pytest.skip(str(reason))
