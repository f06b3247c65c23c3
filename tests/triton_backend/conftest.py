"""Skips the folder's kernels where Triton is missing: they are Python until it compiles them. What they
compute can be asked of a GPU (`pytest -m gpu`), where they are compiled."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is an extra: pip install attnkit[test]")

_ELSEWHERE = ("test_triton_compile.py", "test_triton_plan.py")
"""Tests of what is compiled without a GPU, and of numbers that no kernel makes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.parent == folder and item.path.name not in _ELSEWHERE:
            item.add_marker(pytest.mark.gpu)
