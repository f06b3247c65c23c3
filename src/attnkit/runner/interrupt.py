"""Ctrl-C during generation: steps are not torn, and what there was is not lost.

In: nothing. Out: a context that holds the signal back to the end of a step, and the exception that
carries the unfinished outputs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from attnkit.runner.output import RequestOutput


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during generation: everything was stopped and every page given back.

    Attributes:
        outputs: what there was, in the prompts' order; unfinished ones have finish_reason "abort".
    """

    def __init__(self, outputs: list[RequestOutput]) -> None:
        super().__init__()
        self.outputs = outputs


@contextmanager
def interrupts_after() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, so that it cannot tear a step; a second one can.

    Only where Python's own handler is in place and the thread is the one that gets signals.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(number, frame)
        pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
