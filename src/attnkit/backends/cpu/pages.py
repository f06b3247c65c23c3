"""Huge pages for memory that is read from end to end in every step.

In: where it lies. Out: nothing but speed. Without them a processor waits for the translation of
addresses: in huge pages the weights of SmolLM2-135M, compiled, gave 1.1 (16 prompts) to 1.4 (one) times
the tokens on two cores of a noisy host.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable

_COLLAPSE = 25  # Linux's MADV_COLLAPSE, which Python 3.11 has no name for.
_HUGE = 2 << 20
_LEAST = 32 << 10
"""Bytes of a piece that it is worth a call for."""


def use_huge_pages(pieces: Iterable[tuple[int, int]]) -> None:
    """Ask the system to put memory into huge pages, now and from now on. Systems may not.

    Args:
        pieces: (address, bytes) of tensors that stay. Pages that they share with others move along:
            what they hold stays as it is.
    """
    madvise = _madvise()
    if madvise is None:
        return
    spans = {
        page
        for address, num_bytes in pieces
        if num_bytes >= _LEAST
        for page in range(address // _HUGE, (address + num_bytes - 1) // _HUGE + 1)
    }
    for page in sorted(spans):
        # Refused where not all of the page is mapped: then it stays as it is.
        for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
            madvise(page * _HUGE, _HUGE, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's madvise; None where there are no huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
