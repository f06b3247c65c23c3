"""A pause of garbage collection ends as it began, and leaves nothing uncollected for good."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from attnkit.garbage import collection_paused


class Knot:
    """Garbage that only a collection finds, once nobody else knows it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if enabled else gc.disable)()


def test_nothing_is_collected_inside() -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_ends_with_an_error_too_and_decorates() -> None:
    @collection_paused()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled()


def test_who_had_switched_it_off_finds_it_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_what_became_garbage_inside_is_collected_later() -> None:
    with collection_paused():
        found = weakref.ref(Knot())
        kept = Knot()
    assert gc.get_freeze_count() == 0
    gc.collect(0)
    assert found() is not None  # it counts as old
    gc.collect()
    assert found() is None
    assert kept.itself is kept


def test_what_was_frozen_stays_frozen() -> None:
    script = """
import gc
from attnkit.garbage import collection_paused
gc.freeze()
frozen = gc.get_freeze_count()
with collection_paused():
    pass
assert gc.get_freeze_count() == frozen > 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
