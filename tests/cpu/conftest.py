"""Both paths of the cpu backend as fixtures: the native library and the torch path."""

from __future__ import annotations

import pytest

from attnkit.backends.cpu import backend, native
from attnkit.conformance.subject import Subject

PATHS = ("native", "torch")


@pytest.fixture(params=PATHS)
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The cpu backend, judged on one of its paths."""
    return on_path(request.param, monkeypatch)


@pytest.fixture
def native_subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    return on_path("native", monkeypatch)


@pytest.fixture
def torch_subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    return on_path("torch", monkeypatch)


def on_path(path: str, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """Layers made from the subject run on `path`."""
    if path == "torch":
        monkeypatch.setattr(backend, "native_kernels", lambda: None)
    elif native.native_kernels() is None:
        pytest.skip(f"no native library here: {native.native_status()}")
    return Subject.of("cpu")
