"""The conformance kit on a GPU, spread over processes because most of its time is kernel compilation.

    python benchmarks/verify_gpu.py triton --jobs 14 --json verify.json
    python benchmarks/verify_gpu.py flash_attn --filter=-mixed-bf16

Libraries behind adapters (flash_attn, flashinfer) are those on PYTHONPATH. Prints the report and each
failure; the JSON is the record: device, versions, commit, every check.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

import torch
import triton.compiler

from attnkit.conformance import Outcome, Report, all_checks
from attnkit.conformance.verify import Check, outcome_of, subject_of


@functools.cache
def _checks(backend: str, device: str, wanted: str) -> list[Check]:
    return [c for c in all_checks(subject_of(backend, device)) if wanted in c.name]


def _start_process(locks: str) -> None:
    """Compile each kernel in one process, while others that need it wait to find it in Triton's cache:
    neighbours in the list of checks need the same ones at the same time."""
    torch.set_num_threads(1)
    compile_kernel = triton.compiler.compile

    def compile_once(source: Any, *args: Any, **options: Any) -> Any:
        named = f"{source.hash()} {args} {sorted(options.items(), key=str)}"
        with open(os.path.join(locks, hashlib.sha256(named.encode()).hexdigest()), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_kernel(source, *args, **options)

    # Triton looks it up when a kernel is first launched.
    triton.compiler.compile = compile_once


def _judge(work: tuple[str, str, str, int]) -> Outcome:
    *which, index = work
    return outcome_of(_checks(*which)[index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--filter", default="", help="only checks whose name contains this")
    parser.add_argument("--json")
    parser.add_argument("--commit", default="")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so many")
    args = parser.parse_args()
    started = time.perf_counter()
    which = (args.backend, args.device, args.filter)
    num_checks = len(_checks(*which))
    outcomes: list[Outcome] = []
    locks = os.path.join(tempfile.gettempdir(), "attnkit-compile")
    os.makedirs(locks, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(args.jobs, _start_process, (locks,)) as pool:
        done = pool.imap_unordered(_judge, [(*which, i) for i in range(num_checks)])
        try:
            for _ in range(num_checks):
                left = args.seconds - (time.perf_counter() - started)
                outcomes.append(done.next(timeout=max(0.0, left)))
        except multiprocessing.TimeoutError:
            print(f"stopped after {args.seconds:.0f} s: {len(outcomes)} of {num_checks} checks")
    report = Report(
        backend=args.backend,
        device=torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        outcomes=tuple(sorted(outcomes, key=lambda o: o.name)),
        seconds=time.perf_counter() - started,
    )
    print(report)
    if args.json:
        commit = (
            args.commit
            or subprocess.run(
                ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
            ).stdout.strip()
        )
        record = {
            "commit": commit,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": report.device,
            "backend": report.backend,
            "filter": args.filter,
            "seconds": report.seconds,
            "unfinished": num_checks - len(outcomes),
            "passed": len(report.passed),
            "cases": report.num_cases,
            "failed": [asdict(o) for o in report.failed],
            "refused": sorted(o.name for o in report.refused),
            "checks": sorted(o.name for o in report.passed),
        }
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
    sys.exit(0 if report.ok and len(outcomes) == num_checks else 1)


if __name__ == "__main__":
    main()
