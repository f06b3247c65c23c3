"""Contender: anything that can be measured on a workload, ours or a rival's.

In: `prepare(inputs)` does whatever may be done once per batch: copies, plans, compilation. Out: a
`Prepared` call that is timed and checked. What cannot take part raises `Refused` with a reason, what
is not there `NotInstalled`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from attnkit.bench.inputs import Inputs
from attnkit.errors import AttnkitError


class Refused(AttnkitError):
    """The contender does not do this workload; the message says why."""


class NotInstalled(Refused):
    """The contender's library, or the device it needs, is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A contender ready to run a workload.

    Attributes:
        run: the timed call. Attention: returns the output, (num_tokens, num_heads, head_size) or a
            shape that reshapes to it. Write: returns the pages it wrote, in the logical shape. Build:
            returns the plan.
        note: what it runs on: layout, whose pages, which kernel.
        capturable: it may be replayed as a CUDA graph.
    """

    run: Callable[[], Any]
    note: str = ""
    capturable: bool = True


class Contender(Protocol):
    """What the session asks of ours and of rivals alike."""

    @property
    def name(self) -> str:
        """What it is called in tables and records."""
        ...

    @property
    def is_rival(self) -> bool:
        """Not ours: the others' speed is set against it."""
        ...

    def prepare(self, inputs: Inputs) -> Prepared:
        """Get ready outside the timed part.

        Raises:
            Refused: it does not do this workload.
        """
        ...


def foreign_failures() -> tuple[type[Exception], ...]:
    """What somebody else's kernel may raise: it becomes the row's note, and the session goes on."""
    kinds: list[type[Exception]] = [
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        AttnkitError,
        subprocess.SubprocessError,
    ]
    if "triton" in sys.modules:
        from triton.errors import TritonError

        kinds.append(TritonError)
    return tuple(kinds)
