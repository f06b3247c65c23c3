"""A fresh process on a CPU: seconds to its first token, and the most memory it takes.

In: a model whose files, compiled code and Python's bytecode are in their caches (a first start that does
not count sees to that). Out: a table, and with --json a record. Each start is a process of its own, as a
user's script is: imports, the model, a prompt's first token, then 16 prompts x 32 tokens. The clock
starts before the process does. transformers' own `generate` does the same.

The default model's checkpoint is float32. Rows with "stored": "bfloat16" are of a copy in bfloat16, as
most models are published: what runs as it is stored is not converted, and what is not packed stays in
its file.

    python benchmarks/start_cpu.py --json benchmarks/start-cpu.json

Memory: what the process holds of its own (anonymous pages), sampled by the parent, beside weights and
pages of the cache as they lie; and the largest resident set, which also counts pages of files that the
system may drop: libraries, the checkpoint while it is read, and float32 weights, which stay in its file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]
NUM_PROMPTS, NUM_TOKENS = 16, 32
NUM_BLOCKS = 1 + NUM_PROMPTS * 2
"""Pages of 64 tokens: what the prompts and their answers need."""
SAMPLE_S = 0.004


def main() -> None:
    """Start every contender in turns, print, keep."""
    options = _parser().parse_args()
    if options.child is not None:
        _live(json.loads(options.child))
        return
    from attnkit.bench import machine
    from attnkit.bench.record import now

    started = now()
    stored = {"dtype": "bfloat16", "stored": "bfloat16"}
    contenders: list[dict[str, Any]] = [
        *({"who": "attnkit", "dtype": dtype} for dtype in options.dtype or ["bfloat16", "float32"]),
        {"who": "attnkit", "dtype": "bfloat16", "weights": "int4"},
        {"who": "transformers", "dtype": "bfloat16"},
        {"who": "attnkit", **stored},
        {"who": "transformers", **stored},
    ]
    lives: list[list[dict[str, float]]] = [[] for _ in contenders]
    with tempfile.TemporaryDirectory() as copy:
        _store(options.model, copy)
        for turn in range(options.rounds + 1):
            for contender, those in zip(contenders, lives, strict=True):
                life = _watch(
                    {**contender, "model": copy if "stored" in contender else options.model}
                )
                print(turn, contender, life, file=sys.stderr, flush=True)
                if turn:
                    those.append(life)
    rows = [
        {**contender, **_summary(those)} for contender, those in zip(contenders, lives, strict=True)
    ]
    for row in rows:
        print(row)
    if options.json is not None:
        import torch

        from attnkit.bench.record import write

        record = {
            **machine.origin(torch.device("cpu"), started),
            "prompts": NUM_PROMPTS,
            "tokens": NUM_TOKENS,
            "rows": rows,
        }
        write(record, options.json)


def _store(model: str | None, folder: str) -> None:
    """Write a model's checkpoint and tokenizer in bfloat16."""
    import torch
    import transformers

    from attnkit.runner.checkpoint import resolve_checkpoint

    path = resolve_checkpoint(model).path
    transformers.AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    loaded.save_pretrained(folder)


def _watch(contender: dict[str, Any]) -> dict[str, float]:
    """Start one process and follow it to its end. Bytes and seconds."""
    # An installed package has its bytecode; a checkout keeps what the first start makes.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", json.dumps(contender)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    own = [0]

    def sample() -> None:
        while child.poll() is None:
            own[0] = max(own[0], _status(child.pid).get("RssAnon", 0))
            time.sleep(SAMPLE_S)

    sampler = threading.Thread(target=sample)
    sampler.start()
    assert child.stdout is not None
    loaded = first = 0.0
    facts: dict[str, float] = {}
    for line in child.stdout:
        if line == "loaded\n":
            loaded = time.perf_counter() - start
        elif line == "first token\n":
            first = time.perf_counter() - start
        elif line.startswith("{"):
            facts = json.loads(line)
    sampler.join()
    if child.wait() or not facts:
        sys.exit(f"{contender} ended with status {child.returncode}; see above")
    return {
        "imports_s": facts.pop("imports_s"),
        "loaded_s": loaded,
        "first_token_s": first,
        "own_bytes": own[0],
        **facts,
    }


def _live(contender: dict[str, Any]) -> None:
    """The child: import, load, one token, then text."""
    start = time.perf_counter()
    if contender["who"] == "attnkit":
        import attnkit

        imports = time.perf_counter() - start
        llm = attnkit.LLM(
            contender["model"],
            dtype=contender["dtype"],
            weights=contender.get("weights"),
            device="cpu",
            num_blocks=NUM_BLOCKS,
            enable_prefix_caching=False,
        )
        params = [
            attnkit.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
            for n in (1, NUM_TOKENS)
        ]
        print("loaded", flush=True)
        llm.chat(PROMPT, params[0])
        print("first token", flush=True)
        llm.chat([PROMPT] * NUM_PROMPTS, params[1])
        model, pool = llm.engine.model.model, llm.engine.cache.num_bytes
    else:
        import torch
        import transformers

        from attnkit.runner.checkpoint import resolve_checkpoint

        imports = time.perf_counter() - start
        path = resolve_checkpoint(contender["model"]).path
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, contender["dtype"])
        )
        print("loaded", flush=True)
        with torch.inference_mode():
            for prompts, tokens in ((1, 1), (NUM_PROMPTS, NUM_TOKENS)):
                inputs = tokenizer.apply_chat_template(
                    [PROMPT] * prompts,
                    add_generation_prompt=True,
                    return_dict=True,
                    return_tensors="pt",
                )
                model.generate(
                    **inputs,
                    do_sample=False,
                    min_new_tokens=tokens,
                    max_new_tokens=tokens,
                    pad_token_id=0,
                )
                if tokens == 1:
                    print("first token", flush=True)
        pool = 0
    facts = {
        "imports_s": imports,
        "peak_rss_bytes": _status("self")["VmHWM"],
        "weight_bytes": _weight_bytes(model),
        "pool_bytes": pool,
    }
    print(json.dumps(facts), flush=True)


def _weight_bytes(model: Any) -> int:
    """Of parameters and buffers as they lie, each once."""
    import torch

    mkldnn = torch.ops.mkldnn
    return sum(
        mkldnn._nbytes(t) if t.is_mkldnn else t.nbytes
        for t in (*model.parameters(), *model.buffers())
    )


def _status(pid: int | str) -> dict[str, int]:
    """Sizes in a process's status, in bytes; none where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0][:-1]: int(words[1]) << 10 for words in fields if words[-1] == "kB"}


def _summary(lives: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, with the least and the most of what varies; and memory beside the bar's terms."""
    made: dict[str, Any] = {"starts": len(lives)}
    for key in lives[0]:
        values = sorted(life[key] for life in lives)
        made[key] = statistics.median(values)
        if values[0] != values[-1]:
            made[f"{key}_range"] = [values[0], values[-1]]
    made["own_bytes_beyond"] = made["own_bytes"] - made["weight_bytes"] - made["pool_bytes"]
    return made


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("--model", help="directory, hub id or GGUF file (the default model)")
    made.add_argument("--dtype", action="append", help="several times (bfloat16 and float32)")
    made.add_argument(
        "--rounds", type=int, default=3, help="that count, after one that does not (3)"
    )
    made.add_argument("--json", type=Path, help="write the record here")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    main()
