"""Huge pages change nothing but where memory lies; what was freed goes back; refusals are no errors."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from attnkit.backends.cpu import pages
from attnkit.backends.cpu.pages import give_back_freed, use_huge_pages, use_huge_pages_later

HUGE = 2 << 20
SMAPS = Path("/proc/self/smaps")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_huge_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE")
    or not SMAPS.exists()
    or not SWITCH.exists()
    or "[never]" in SWITCH.read_text(),
    reason="the system has no huge pages to ask for",
)


@pytest.fixture
def memory() -> mmap.mmap:
    """Four huge pages' worth of memory in small pages, all written."""
    made = mmap.mmap(-1, 4 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(mmap.MADV_NOHUGEPAGE)
    made[:] = bytes(range(256)) * (len(made) // 256)
    return made


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def huge_bytes(address: int) -> int:
    """Of the mappings from the one that has `address` on, as far as they touch."""
    found = end = 0
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(part, 16) for part in words[0].split("-"))
            inside = low <= address < high or (end and low == end)
            end = high if inside else 0
        elif end and words[0] == "AnonHugePages:":
            found += int(words[1]) << 10
    return found


@needs_huge_pages
def test_memory_moves_to_huge_pages_with_what_it_holds(memory: mmap.mmap) -> None:
    before, address = bytes(memory), address_of(memory)
    first = -(-address // HUGE) * HUGE
    assert huge_bytes(address) == 0
    use_huge_pages([(first, 2 * HUGE)])
    if huge_bytes(address) == 0:
        pytest.skip("the system had no huge page left to give")
    assert huge_bytes(address) >= 2 * HUGE
    assert bytes(memory) == before


def test_later_means_in_a_thread_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(pages, "use_huge_pages", calls.append)
    pieces = [(HUGE, HUGE)]
    timer = use_huge_pages_later(iter(pieces))
    assert timer.daemon
    assert not calls
    timer.cancel()
    monkeypatch.setattr(pages, "_LATER_S", 0.0)
    use_huge_pages_later(iter(pieces)).join(timeout=10)
    assert calls == [pieces]


def test_advice_covers_whole_pages_once_and_leaves_small_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        pages, "_library_function", lambda *_: lambda *arguments: calls.append(arguments)
    )
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    # Two neighbours of one page, one that reaches into the next, one that is too small.
    use_huge_pages(
        [(HUGE, 1 << 16), (HUGE + (1 << 16), 1 << 16), (2 * HUGE - 1, 1 << 16), (9 * HUGE, 4096)]
    )
    assert calls == [
        (page * HUGE, HUGE, advice) for page in (1, 2) for advice in (14, pages._COLLAPSE)
    ]


def test_a_system_that_refuses_or_has_no_such_call_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing is mapped at the first huge page of an address space: the call fails, and that is all.
    use_huge_pages([(0, HUGE)])
    monkeypatch.setattr(pages, "_library_function", lambda *_: None)
    use_huge_pages([(HUGE, HUGE)])
    give_back_freed()


def test_a_function_the_c_library_does_not_have_is_none() -> None:
    assert pages._library_function("attnkit_has_no_such_function") is None


@pytest.mark.skipif(
    pages._library_function("malloc_trim", ctypes.c_size_t) is None,
    reason="the C library keeps nothing to give back",
)
def test_freed_memory_goes_back_to_the_system() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    size, count = 64 << 10, 1024  # smaller than what malloc maps apart
    pieces = [library.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    kept = pieces.pop()  # nothing at the end of the heap can be taken off without more ado
    for piece in pieces:
        library.free(piece)
    held = _own_bytes()
    give_back_freed()
    assert held - _own_bytes() > size * count // 2
    library.free(kept)


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
