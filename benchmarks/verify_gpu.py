"""The conformance kit on a GPU, as a record.

    python benchmarks/verify_gpu.py triton --jobs 16 --json verify.json
    python benchmarks/verify_gpu.py flash_attn --filter=-mixed-bf16

Libraries behind adapters (flash_attn, flashinfer) are those on PYTHONPATH. Prints the report and each
failure; the JSON is the record: device, versions, commit, every check.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from attnkit.bench.record import write
from attnkit.conformance import verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--filter", help="only checks whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    report = verify(args.backend, device="cuda", filter=args.filter, jobs=args.jobs)
    print(report)
    if args.json:
        head = ["git", "rev-parse", "HEAD"]
        run = subprocess.run(head, capture_output=True, text=True, check=False)
        record = {
            "commit": args.commit or run.stdout.strip(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": torch.cuda.get_device_name(),
            "backend": report.backend,
            "filter": args.filter,
            "seconds": report.seconds,
            "passed": len(report.passed),
            "cases": report.num_cases,
            "failed": [asdict(o) for o in report.failed],
            "refused": sorted(o.name for o in report.refused),
            "checks": sorted(o.name for o in report.passed),
        }
        write(record, args.json)
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
