"""Weights in codes on a CPU: perplexity and tokens a second beside those of the checkpoint's own.

In: a model, a text (docs/semantics.md). Out: a table, and with --json a record: per format the
perplexity over windows of the text, tokens a second of one stream and of 16 prompts, tokens of prompts
a second (four windows in one step), in turns in one process, and the bytes of the linear layers'
weights.

    python benchmarks/weights_cpu.py --threads 2 --json benchmarks/weights-cpu.json
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import time
from pathlib import Path

import torch

from attnkit import LLM, SamplingParams
from attnkit.bench import machine
from attnkit.bench.e2e import TextWorkload, encode_prompts
from attnkit.bench.record import now, write
from attnkit.runner.checkpoint import resolve_checkpoint
from attnkit.runner.linear import pack_linears
from attnkit.runner.loading import load_model, load_tokenizer
from attnkit.runner.weights import WEIGHTS, quantize_linears

TEXT = Path(__file__).parents[1] / "docs" / "semantics.md"
WINDOW = 512


def main() -> None:
    """Measure every format, print, keep."""
    options = _parser().parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    started, text = now(), options.text.read_text()
    formats = [None, *(options.weights or WEIGHTS)]
    rows = [
        {"weights": weights or options.dtype, **perplexity(options, text, weights)}
        for weights in formats
    ]
    llms = [
        LLM(
            options.model,
            dtype=options.dtype,
            device="cpu",
            weights=weights,
            compile=options.compile,
            enable_prefix_caching=False,
            num_blocks=64,
        )
        for weights in formats
    ]
    prompts = encode_prompts(llms[0], TextWorkload())
    for num_prompts in (1, 16):
        rates = measure(llms, prompts[:num_prompts], options.tokens, options.rounds)
        for row, rate in zip(rows, rates, strict=True):
            row[f"tokens_per_s_of_{num_prompts}"] = rate
    windows = torch.tensor(llms[0].tokenizer.encode(text)).split(WINDOW)[:4]
    rates = measure(llms, [window.tolist() for window in windows], 1, options.rounds)
    for row, rate in zip(rows, rates, strict=True):
        row["prompt_tokens_per_s"] = rate * WINDOW
    for row in rows:
        print(row)
    if options.json is not None:
        record = {
            **machine.origin(torch.device("cpu"), started),
            "text": {
                "file": options.text.name,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "window": WINDOW,
            },
            "compile": options.compile,
            "rows": rows,
        }
        write(record, options.json)


def perplexity(options: argparse.Namespace, text: str, weights: str | None) -> dict:
    """Of the tokens of `text` in windows, each but a window's first, in transformers' own model."""
    checkpoint = resolve_checkpoint(options.model)
    model, _ = load_model(checkpoint, options.dtype, torch.device("cpu"))
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    num_bytes = sum(m.weight.nbytes for m in linears)
    if weights is not None:
        quantize_linears(model, weights)
        num_bytes = sum(
            t.nbytes if not t.is_mkldnn else t.numel() * t.element_size()
            for m in model.modules()
            if hasattr(m, "codes")
            for t in [m.codes, *m.buffers()]
        )
    pack_linears(model)
    ids = torch.tensor(load_tokenizer(checkpoint).encode(text))[: options.text_tokens]
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in ids.split(WINDOW):
            logits = model.eval()(input_ids=window[None], use_cache=False).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    return {
        "perplexity": math.exp(total / count),
        "num_tokens": count,
        "linear_weight_bytes": num_bytes,
    }


def measure(llms: list[LLM], prompts: list[list[int]], num_tokens: int, rounds: int) -> list[float]:
    """Median tokens a second of each, in turns; the first round does not count."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    seconds: list[list[float]] = [[] for _ in llms]
    for turn in range(rounds + 1):
        for llm, taken in zip(llms, seconds, strict=True):
            start = time.perf_counter()
            llm.generate(prompts, params)
            if turn:
                taken.append(time.perf_counter() - start)
    return [len(prompts) * num_tokens / statistics.median(taken) for taken in seconds]


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("--model", help="directory, hub id or GGUF file (the default model)")
    made.add_argument(
        "--dtype", default="bfloat16", help="of activations, and what is compared with"
    )
    made.add_argument("--weights", action="append", choices=WEIGHTS, help="several times (all)")
    made.add_argument("--text", type=Path, default=TEXT, help="a file (docs/semantics.md)")
    made.add_argument("--text-tokens", type=int, default=4096, help="of it, from the first (4096)")
    made.add_argument("--tokens", type=int, default=64, help="generated for each prompt (64)")
    made.add_argument("--rounds", type=int, default=3, help="that count (3)")
    made.add_argument("--compile", action="store_true", help="under torch.compile")
    made.add_argument("--threads", type=int, help="of torch (all cores)")
    made.add_argument("--json", type=Path, help="write the record here")
    return made


if __name__ == "__main__":
    main()
