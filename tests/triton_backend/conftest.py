"""Skips the folder's kernels where Triton is missing: they are Python until it compiles them."""

import pytest

pytest.importorskip("triton", reason="triton is an extra: pip install attnkit[test]")
