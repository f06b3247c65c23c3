"""The conformance kit spread over processes: on a GPU most of its time is compilation of kernels.

In: a backend's name, a device and the places of some checks in `all_checks`. Out: their outcomes, as
they come. Each process finds the backend and makes the checks for itself, since neither can be sent.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from attnkit.conformance.kit import Check, Outcome, all_checks, outcome_of, subject_of


def judge(backend: str, device: str, places: Mapping[str, int], jobs: int) -> Iterator[Outcome]:
    """Run checks in `jobs` processes.

    Args:
        backend: a name that every process can resolve.
        device: where to run.
        places: of the checks in `all_checks`, by name.
        jobs: processes.

    Yields:
        outcomes, in the order in which they are done. Checks that were not over when a process died are
        failed.

    Raises:
        BackendError: the processes know no such backend.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    with tempfile.TemporaryDirectory(prefix="attnkit-verify-") as locks:
        pool = ProcessPoolExecutor(
            min(jobs, len(places)),
            multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(threads, locks),
        )
        with pool:
            names = {pool.submit(_judge, backend, device, i): name for name, i in places.items()}
            for future in as_completed(names):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    message = (
                        "a process that judged died, and this check was not over; run it alone, without "
                        "`jobs`"
                    )
                    yield Outcome(name=names[future], status="failed", message=message)


@functools.cache
def _checks(backend: str, device: str) -> tuple[Check, ...]:
    return all_checks(subject_of(backend, device))


def _judge(backend: str, device: str, place: int) -> Outcome:
    return outcome_of(_checks(backend, device)[place])


def _start(threads: int, locks: str) -> None:
    torch.set_num_threads(threads)
    if importlib.util.find_spec("triton") is not None:
        _compile_once(locks)


def _compile_once(locks: str) -> None:
    """Compile each kernel in one process, while others that need it wait to find it in Triton's cache:
    neighbours among the checks need the same ones at the same time. On an H200 machine with 16 cores the
    kit of hopper_mla took 60 s so, and 270 s before."""
    import fcntl

    import triton.compiler

    compile_kernel = triton.compiler.compile

    def compile_alone(source: Any, *args: Any, **options: Any) -> Any:
        named = f"{source.hash()} {args} {sorted(options.items(), key=str)}"
        with open(os.path.join(locks, hashlib.sha256(named.encode()).hexdigest()), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_kernel(source, *args, **options)

    # Triton looks it up when a kernel is first launched.
    triton.compiler.compile = compile_alone
