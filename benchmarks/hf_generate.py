"""transformers' generate with its own sdpa attention and with attnkit's, in turns in one process.

In: a model, contexts and a number of rows. Out: a table of decode steps and of prompts (two workloads
per context), and with --json a record. Every engine continues the same random tokens greedily; the
column of differing tokens compares with sdpa's. "enabled" is attnkit.hf.enable, "by name" is
attn_implementation="attnkit" alone, which takes transformers' cache over into pages.

    python benchmarks/hf_generate.py --json benchmarks/hf-generate-cpu.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import attnkit
from attnkit.bench import machine
from attnkit.bench.record import Record, Row, now, save
from attnkit.bench.session import with_ratios
from attnkit.bench.table import show
from attnkit.bench.timing import Timing
from attnkit.bench.workloads import DTYPES
from attnkit.runner.checkpoint import resolve_checkpoint

Engine = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def _sdpa(model: Any) -> Any:
    model.set_attn_implementation("sdpa")
    yield


@contextmanager
def _by_name(model: Any) -> Any:
    model.set_attn_implementation("attnkit")
    yield
    model.set_attn_implementation("sdpa")


@contextmanager
def _enabled(model: Any) -> Any:
    bridge = attnkit.hf.enable(model)
    yield
    bridge.disable()


ENGINES: dict[str, Engine] = {
    "transformers sdpa": _sdpa,
    "attnkit enabled": _enabled,
    "attnkit by name": _by_name,
}
RIVAL = "transformers sdpa"


def main() -> None:
    """Parse, load, measure, report."""
    options = _parser().parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    started = now()
    model = _load(options)
    rows: list[Row] = []
    workloads: dict[str, dict[str, Any]] = {}
    for context in options.context:
        shape = {"num_rows": options.rows, "context": context, "num_tokens": options.tokens}
        ids = _prompts(model, options.rows, context)
        made = _measure(model, ids, options)
        for row in made:
            workloads[row.workload] = {**shape, "dtype": options.dtype}
        rows += made
    record = Record(
        **machine.origin(model.device, started),
        ceilings=None,
        workloads=workloads,
        rows=tuple(rows),
    )
    if options.json is not None:
        save(record, options.json)
    show(record)


def _load(options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    source = resolve_checkpoint(options.model).source
    dtype = DTYPES[options.dtype]
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.to(options.device).eval()


def _prompts(model: Any, num_rows: int, context: int) -> torch.Tensor:
    """Random tokens; the first 100 ids, where control tokens stand, are left out."""
    size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = (num_rows, context)
    return torch.randint(min(100, size // 2), size, shape, generator=generator).to(model.device)


def _measure(model: Any, ids: torch.Tensor, options: argparse.Namespace) -> list[Row]:
    """Each engine once without counting, then in turns."""
    prompts: dict[str, list[float]] = {name: [] for name in ENGINES}
    steps: dict[str, list[float]] = {name: [] for name in ENGINES}
    tokens: dict[str, torch.Tensor] = {}
    for turn in range(options.rounds + 1):
        for name, engine in ENGINES.items():
            with engine(model):
                tokens[name], times = _generate(model, ids, options.tokens)
            print(f"  {ids.shape[1]} tokens, round {turn}, {name}: {1e3 * times[1]:.1f} ms a step",
                  file=sys.stderr, flush=True)  # fmt: skip
            if turn:
                prompts[name].append(1e6 * times[0])
                steps[name] += [1e6 * t for t in times[1:]]
    base = f"generate B{ids.shape[0]} ctx{ids.shape[1]} {options.dtype}"
    rows = []
    for kind, samples in (("decode step", steps), ("prompt", prompts)):
        group = []
        for name in ENGINES:
            timing = Timing.of(samples[name])
            row = Row(
                group="hf",
                workload=f"{base}, {kind}",
                contender=name,
                is_rival=name == RIVAL,
                mode="wall",
                median_us=timing.median_us,
                p10_us=timing.p10_us,
                p90_us=timing.p90_us,
                num_samples=timing.num_samples,
                tokens_per_s=ids.shape[0] / timing.median_us * 1e6 if kind != "prompt" else None,
            )
            if name != RIVAL:
                different = (tokens[name] != tokens[RIVAL]).float().mean().item()
                row = replace(row, error=different)
            group.append(row)
        rows += with_ratios(group)
    return rows


def _generate(model: Any, ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, list[float]]:
    """The new tokens, and the seconds of the prompt and of each step."""
    from transformers import StoppingCriteria

    marks = [time.perf_counter()]

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if input_ids.device.type == "cuda":
                torch.cuda.synchronize(input_ids.device)
            marks.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        stopping_criteria=[Clock()],
    )
    return out[:, ids.shape[1] :], [b - a for a, b in itertools.pairwise(marks)]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("--model", help="directory, hub id or GGUF file (the default model)")
    made.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    made.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16 (bfloat16)")
    made.add_argument("--context", type=int, nargs="+", default=[512, 4096], help="(512 4096)")
    made.add_argument("--rows", type=int, default=1, help="of the batch (1)")
    made.add_argument("--tokens", type=int, default=32, help="generated after each prompt (32)")
    made.add_argument("--rounds", type=int, default=3, help="that count, after one more (3)")
    made.add_argument("--threads", type=int, help="of torch (all cores)")
    made.add_argument("--json", type=Path, help="write the record here")
    return made


if __name__ == "__main__":
    main()
