"""Garbage collection put off while much is made that stays: modules, a model.

In: nothing. Out: a context, which is a decorator too. Python looks for garbage whenever some hundred
objects were made, and through all there are when their number has grown by a quarter: importing torch
and transformers and loading SmolLM2-135M took 5.0 to 5.6 seconds on two cores, 0.8 of them for that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Nothing is collected inside, in no thread. What is there afterwards counts as old, so that it is
    looked through with the next full collection, not at once."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else they would thaw what somebody froze
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
