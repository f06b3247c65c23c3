"""The tables of figures in README.md and docs/measured.md, made from the records beside this file.

    python benchmarks/measured.py            # writes the tables into both pages
    python benchmarks/measured.py --check    # exit status 1 if a page says something else

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A cell is the median of the first of a
table's records that has it, so what a record has of a case is shown together.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "measured.md")

PROMPT_RECORDS = ("prefill-h200", "attention-h200", "prefill-gqa-h200")
DECODE_RECORDS = ("decode-h200", "attention-h200")
CHUNK_RECORDS = ("chunk-mixed-h200",)

PROMPTS = (
    "B16 S1024 16/16 D128",
    "B4 S4096 16/16 D128",
    "B1 S16384 16/16 D128",
    "B1 S16384 32/32 D64",
    "B1 S16384 8/8 D256",
    "B4 S4096 32/8 D128",
)
DECODES = (
    "B1 ctx1024 32/8 D128",
    "B1 ctx32768 32/8 D128",
    "B8 ctx8192 32/8 D128",
    "B64 ctx4096 32/8 D128",
    "B256 ctx1024 32/8 D128",
    "B128 ctx8192 64/8 D128",
    "B64 ctx4096 32/32 D128",
    "B64 ctx4096 32/8 D64",
)
MIXED = "1x2048 after 8192 + 63x1 ctx4096 32/8 D128"
RIVALS = {
    "FlashAttention-3, paged": "fa3",
    "FlashInfer": "flashinfer",
    "vLLM's Triton": "vllm-triton",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Median of a contender in a case and mode, and what it comes to where the record says so."""

    us: float
    tflops: float | None = None
    fraction: float | None = None

    def __str__(self) -> str:
        return f"{_digits(self.us)} us" if self.us < 999.5 else f"{_digits(self.us / 1e3)} ms"

    @property
    def with_rate(self) -> str:
        """And TFLOP/s."""
        return f"{self} ({self.tflops:.0f} TFLOP/s)" if self.tflops else str(self)

    @property
    def with_fraction(self) -> str:
        """And of the read ceiling."""
        return f"{self} ({self.fraction:.0%})".replace("%", " %") if self.fraction else str(self)


def _digits(x: float) -> str:
    return f"{x:#.3g}".rstrip(".")


@functools.cache
def _record(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text())


@functools.cache
def _samples(name: str) -> dict[tuple[str, str, str], Sample]:
    """By case, contender and mode, of a record of `attnkit bench` or of `hopper_mla.py`."""
    record, found = _record(name), {}
    for row in record.get("rows") or [r for run in record["runs"] for r in run["rows"]]:
        if row.get("median_us"):
            key = (row["workload"], row["contender"], row["mode"])
            sample = Sample(us=row["median_us"], tflops=row["tflops"], fraction=row["fraction"])
        elif row.get("ms"):
            key = (row["case"], row["who"], "graph" if row.get("graph") else "cold")
            sample = Sample(us=row["ms"] * 1e3, tflops=row.get("tflops"))
        else:
            continue
        found.setdefault(key, sample)
    return found


def _find(records: Sequence[str], case: str, who: str, mode: str) -> Sample | None:
    key = (case, who, mode)
    return next((_samples(r)[key] for r in records if key in _samples(r)), None)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [["" if cell is None else str(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _ours(sample: Sample | None, how: Callable[[Sample], str]) -> str | None:
    return None if sample is None else how(sample)


def _over(rival: Sample | None, ours: Sample | None) -> str | None:
    return None if rival is None or ours is None else f"{rival.us / ours.us:.2f}"


def _prompts(page: int, rivals: dict[str, str], *, triton: bool = True) -> str:
    rows = []
    for case in PROMPTS:
        name = f"prefill {case} page{page} bf16"
        find = functools.partial(_find, PROMPT_RECORDS, name, mode="cold")
        mine = _ours(find("hopper"), lambda s: s.with_rate)
        portable = [find("triton")] if triton else []
        rows.append([case, mine, *(find(r) for r in rivals.values()), *portable])
    return _table(["prompts", "hopper", *rivals, *(["triton"] if triton else [])], rows)


def _decode_cases() -> list[tuple[str, str]]:
    cases = [(case, f"decode {case} page16 bf16") for case in DECODES]
    return [*cases, *((f"{case}, float8 cache", f"{name} fp8 cache") for case, name in cases[3:5])]


def _decodes(mode: str) -> str:
    rows = []
    for case, name in _decode_cases():
        find = functools.partial(_find, DECODE_RECORDS, name, mode=mode)
        mine = _ours(find("hopper"), lambda s: s.with_fraction)
        rows.append([case, mine, *(find(r) for r in RIVALS.values()), find("triton")])
    return _table(["decodes", "hopper", *RIVALS, "triton"], rows)


def _chunks() -> str:
    rows = []
    for num in (16, 17, 32, 64, 128, 256, 512, 1024):
        name = f"prefill B1 S{num} ctx{32768 - num} 32/8 D128 page16 bf16"
        find = functools.partial(_find, CHUNK_RECORDS, name, mode="cold")
        rows.append([f"{num} queries, the last of 32,768", find("hopper"), find("fa3")])
    for num in (1, 2, 4, 8):
        name = f"verify Q{num} B64 ctx4096 32/8 D128 page16 bf16"
        find = functools.partial(_find, CHUNK_RECORDS, name, mode="cold")
        rows.append([f"64 times {num}, the last of 4,096", find("hopper"), find("fa3")])
    find = functools.partial(_find, CHUNK_RECORDS, f"mixed {MIXED} page16 bf16", mode="cold")
    rows.append(["2,048 after 8,192 and 63 decodes at 4,096", find("hopper"), find("fa3")])
    return _table(["32/8 heads, D128", "hopper", "FlashAttention-3, paged"], rows)


def _float8() -> str:
    rows = []
    for case in DECODES[1:]:
        find = functools.partial(_find, ("decode-h200",), who="hopper", mode="graph")
        numbers = find(f"decode {case} page16 bf16")
        codes = find(f"decode {case} page16 bf16 fp8 cache")
        rows.append([case, numbers, codes, _over(numbers, codes)])
    return _table(["in graphs", "bfloat16", "float8 cache", "times as fast"], rows)


def _latents(record: str, cases: Sequence[str], who: dict[str, str], mode: str = "cold") -> str:
    rows = []
    for case in cases:
        found = [_find((record,), case, name, mode) for name in who.values()]
        # Latents that are read for few heads bind memory: their products say nothing.
        first = _ours(found[0], lambda s: s.with_rate)
        rows.append([case, first, *found[1:]])
    return _table([f"{mode}", *who], rows)


def _generations() -> str:
    rows = []
    for row in _record("e2e-h200")["rows"]:
        if row["workload"].startswith("e2e"):
            rows.append([row["contender"], f"{row['tokens_per_s']:,.0f}"])
    return _table(["64 prompts of 1,024 tokens, 256 more each", "tokens a second"], rows)


def _kits() -> str:
    rows = []
    for path in sorted(HERE.glob("verify-*-h200.json")):
        kit = json.loads(path.read_text())
        part = f"part `{kit['filter']}`" if kit["filter"] else "whole"
        counts = [kit["passed"], kit["cases"], len(kit["failed"]), len(kit["refused"])]
        counts = [f"{n:,}" for n in counts]
        rows.append([kit["backend"], part, *counts, kit["commit"][:7], f"`benchmarks/{path.name}`"])
    head = ["backend", "kit", "checks passed", "cases of these", "failed", "refused", "commit", ""]
    return _table(head, rows)


def _short() -> str:
    cases = [
        (f"prefill {PROMPTS[2]}", f"prefill {PROMPTS[2]}", PROMPT_RECORDS),
        (f"prefill {PROMPTS[5]}", f"prefill {PROMPTS[5]}", PROMPT_RECORDS),
        (f"decode {DECODES[3]}", f"decode {DECODES[3]}", DECODE_RECORDS),
        ("the same over a float8 cache", f"decode {DECODES[3]} fp8 cache", DECODE_RECORDS),
        (f"decode {DECODES[0]}", f"decode {DECODES[0]}", DECODE_RECORDS),
        ("2,048 queries after 8,192 and 63 decodes at 4,096", f"mixed {MIXED}", CHUNK_RECORDS),
    ]
    rows = []
    for case, name, records in cases:
        name = re.sub("( fp8 cache)?$", r" page16 bf16\1", name, count=1)
        found = [_find(records, name, who, "cold") for who in ("hopper", *RIVALS.values())]
        rows.append([case, *found])
    return _table(["case", "hopper", *RIVALS], rows)


MLA = {
    "hopper_mla": "hopper_mla",
    "FlashMLA": "FlashMLA",
    "FlashInfer": "FlashInfer",
    "vLLM's Triton": "vLLM Triton",
    "triton_mla": "triton_mla",
}
LATENTS = (
    "B64 ctx8192 H128",
    "B128 ctx4096 H128",
    "B64 ctx8192 H16",
    "B1 ctx32768 H128",
    "B64 ctx8192 H128 q2",
    "B64 ctx8192 H64",
    "B64 ctx8192 H32",
    "B64 ctx8192 H8",
)
EXPANDED = ("B1 S8192 H128", "B1 S8192 H16", "B1 S32768 H16", "B8 S1024 H128")
CHOSEN = tuple(f"chosen 2048 of ctx65536 {b}" for b in ("B1 H128", "B8 H128", "B8 H16"))
CODED = ("B64 ctx8192 H16 fp8", "B64 ctx8192 H32 fp8", "B64 ctx8192 H64 fp8")

TABLES: dict[str, Callable[[], str]] = {
    "short": _short,
    "prompts": lambda: _prompts(
        16, {**RIVALS, "contiguous FlashAttention-3": "fa3-dense", "contiguous cuDNN": "sdpa-cudnn"}
    ),
    "prompts-page128": lambda: _prompts(
        128,
        {
            "FlashAttention-3, paged": "fa3",
            "contiguous FlashAttention-3": "fa3-dense",
            "contiguous cuDNN": "sdpa-cudnn",
        },
        triton=False,
    ),
    "decodes": lambda: _decodes("cold"),
    "decodes-graph": lambda: _decodes("graph"),
    "chunks": _chunks,
    "float8": _float8,
    "latents": lambda: _latents("mla-h200", LATENTS, MLA),
    "latents-graph": lambda: _latents("mla-h200", LATENTS, MLA, "graph"),
    "expanded": lambda: _latents(
        "mla-prompts-h200",
        [f"prompts {case}" for case in EXPANDED],
        {
            "hopper": "hopper prefill",
            "FlashAttention-3": "FlashAttention-3",
            "FlashInfer": "FlashInfer",
            "triton": "triton prefill",
        },
    ),
    "chosen": lambda: _latents(
        "mla-chosen-h200",
        CHOSEN,
        {
            "hopper_mla_sparse": "hopper_mla_sparse",
            "triton_mla_sparse": "triton_mla_sparse",
            "hopper_mla, all keys": "hopper_mla",
        },
    ),
    "generations": _generations,
    "kits": _kits,
}


def with_tables(page: str) -> str:
    """The page with every table made anew.

    Raises:
        KeyError: there is no table of that name.
    """
    block = re.compile(r"(<!-- table: (\S+) -->\n).*?\n(<!-- end -->)", re.DOTALL)
    return block.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", page)


def main() -> None:
    check = "--check" in sys.argv
    stale = [path for path in PAGES if with_tables(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.name}: {'stale; run `make docs`' if check else 'written'}")
        if not check:
            path.write_text(with_tables(path.read_text()))
    sys.exit(1 if stale and check else 0)


if __name__ == "__main__":
    main()
