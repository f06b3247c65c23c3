"""Session: workloads times contenders, each prepared, checked, and only then timed in turns.

In: workloads with the group they belong to, contenders, ceilings. Out: rows, handed over workload by
workload, so that a session that is cut short leaves what it has. A contender that refuses, fails or is
wrong costs its own rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnkit.bench.contender import (
    Contender,
    NotInstalled,
    Prepared,
    Refused,
    foreign_failures,
)
from attnkit.bench.inputs import Inputs
from attnkit.bench.machine import available_bytes, last_level_cache_bytes
from attnkit.bench.record import Row, Status
from attnkit.bench.roofline import Ceilings
from attnkit.bench.timing import (
    Captured,
    Effort,
    Timing,
    capture,
    count_syncs,
    time_cold,
    time_graphs,
    time_host,
    time_host_idle_device,
)
from attnkit.bench.verify import WrongOutput, answer, check
from attnkit.bench.workloads import ATTENTION_KINDS, Workload

_MAX_SETS = 64
_CHECKED_SETS = 2
"""Sets differ in numbers and page ids alone, so two of them show what checking all would."""
_COLD = 4
"""Sets of tensors together exceed the last-level cache this many times, so a set that comes round
again has left it; below half of that the mode is called warm."""
_COPIES = 4
"""Of K and V that a set and its contenders hold in the workload's dtype: pages, pages of a format or a
library's own, rows without pages. How many sets make a cold cache is counted in the format's bytes, and
29 of int8 would hold 14 GB."""

Progress = Callable[[str], None]


@dataclass(slots=True)
class _Entry:
    """A contender on one workload, as far as it came.

    Attributes:
        calls: one per set of tensors; empty if it takes no part.
    """

    contender: Contender
    calls: list[Prepared] = field(default_factory=list)
    status: Status = "ok"
    note: str = ""
    error: float | None = None

    def drop(self, status: Status, note: str) -> None:
        self.calls, self.status, self.note = [], status, " ".join(note.split())[:300]


def run(
    workloads: Sequence[tuple[str, Workload]],
    contenders: Sequence[Contender],
    device: torch.device,
    effort: Effort,
    ceilings: Ceilings | None = None,
    progress: Progress = lambda line: None,
) -> Iterator[list[Row]]:
    """Measure; yields the rows of one workload at a time.

    Args:
        workloads: (group, workload).
        contenders: ours first: rivals share the pages that the first of them laid out.
        device: where.
        effort: how long per contender and mode.
        ceilings: for fractions; None leaves them out.
        progress: called with a line before each step.
    """
    for group, workload in workloads:
        progress(workload.name)
        rows = _measure(group, workload, contenders, device, effort, progress)
        yield with_ratios([_rated(row, workload, ceilings) for row in rows])
        if device.type == "cuda":
            torch.cuda.empty_cache()


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows of one workload, with the rivals' times over ours written into ours."""
    compared = []
    for row in rows:
        if row.is_rival or row.median_us is None:
            compared.append(row)
            continue
        ratios = {
            other.contender: other.median_us / row.median_us
            for other in rows
            if other.is_rival and other.mode == row.mode and other.median_us is not None
        }
        best = min(ratios, key=lambda name: ratios[name]) if ratios else None
        compared.append(replace(row, ratios=ratios, best_rival=best))
    return compared


def _measure(
    group: str,
    workload: Workload,
    contenders: Sequence[Contender],
    device: torch.device,
    effort: Effort,
    progress: Progress,
) -> list[Row]:
    sets, mode = _sets(workload, device)
    entries = [_Entry(contender) for contender in contenders]
    for entry in entries:
        _attempt(entry, lambda entry=entry: _prepare(entry, sets))
    attention = workload.kind in ATTENTION_KINDS
    checked = sets[:_CHECKED_SETS]
    right = [answer(inputs) if attention else None for inputs in checked]
    for entry in entries:
        if entry.calls:
            progress(f"  checking {entry.contender.name}")
            _attempt(entry, lambda entry=entry: _check(entry, checked, right, device))

    rows = [
        _row(group, workload, entry, mode, status=entry.status)
        for entry in entries
        if not entry.calls
    ]
    able = {entry.contender.name: entry for entry in entries if entry.calls}
    if not able:
        return rows
    progress(f"  timing {', '.join(able)}")

    def add(timings: Mapping[str, Timing], mode: str, **more: Mapping[str, Any]) -> None:
        for name, timing in timings.items():
            extra: dict[str, Any] = {key: values[name] for key, values in more.items()}
            rows.append(_row(group, workload, able[name], mode, timing=timing, **extra))

    first = {name: entry.calls[0].run for name, entry in able.items()}
    if workload.kind == "build":
        syncs = {name: count_syncs(call, device) for name, call in first.items()}
        add(time_host_idle_device(first, effort, device), "host", num_syncs=syncs)
    elif device.type != "cuda":
        runs = {name: [call.run for call in entry.calls] for name, entry in able.items()}
        add(time_host(runs, effort), mode)
    else:
        host = time_host_idle_device(first, replace(effort, max_rounds=20), device)
        host_us = {name: timing.median_us for name, timing in host.items()}
        cold = time_cold(first, effort, device)
        add(cold, mode, host_us=host_us)
        if workload.kind != "prefill":
            graphs, lost = _capture(able, {n: t.median_us for n, t in cold.items()})
            add(time_graphs(graphs, effort, device), "graph")
            for name, reason in lost.items():
                entry = replace(able[name], note=reason)
                rows.append(_row(group, workload, entry, "graph", status="refused"))
    return rows


def _sets(workload: Workload, device: torch.device) -> tuple[list[Inputs], str]:
    """Sets of tensors to rotate through, and the mode that makes."""
    if device.type == "cuda" or workload.kind == "build":
        return [Inputs(workload, device)], "host" if workload.kind == "build" else "cold"
    cache = last_level_cache_bytes()
    wanted = -(-_COLD * cache // workload.num_bytes)
    num_values = 2 * sum(workload.seq_lens) * workload.num_kv_heads * workload.head_size
    held = _COPIES * num_values * workload.torch_dtype.itemsize
    available = available_bytes()
    most = _MAX_SETS if available is None else min(available // 2 // held, _MAX_SETS)
    num_sets = max(min(wanted, most), 1)
    mode = "cold" if num_sets * workload.num_bytes >= _COLD * cache / 2 else "warm"
    return [Inputs(workload, device, seed) for seed in range(num_sets)], mode


def _attempt(entry: _Entry, step: Callable[[], None]) -> None:
    """Do a step of a contender; whatever it raises becomes its status."""
    try:
        step()
    except NotInstalled as absent:
        entry.drop("not installed", str(absent))
    except Refused as refusal:
        entry.drop("refused", str(refusal))
    except WrongOutput as wrong:
        entry.drop("wrong", str(wrong))
        entry.error = wrong.error
    except foreign_failures() as failure:
        entry.drop("failed", f"{type(failure).__name__}: {failure}")


def _prepare(entry: _Entry, sets: Sequence[Inputs]) -> None:
    calls = [entry.contender.prepare(inputs) for inputs in sets]
    entry.calls, entry.note = calls, calls[0].note


def _check(
    entry: _Entry, sets: Sequence[Inputs], right: Sequence[Any], device: torch.device
) -> None:
    errors = [check(*each) for each in zip(sets, entry.calls, right, strict=False)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    entry.error = max(errors)


def _capture(
    able: Mapping[str, _Entry], lengths: Mapping[str, float]
) -> tuple[dict[str, Captured], dict[str, str]]:
    """Graphs of the contenders that can be captured, and why the others cannot."""
    graphs, lost = {}, {}
    for name, entry in able.items():
        call = entry.calls[0]
        if not call.capturable:
            lost[name] = "cannot be captured"
            continue
        try:
            graphs[name] = capture(call.run, lengths[name])
        except foreign_failures() as failure:
            lost[name] = " ".join(f"cannot be captured: {failure}".split())[:300]
    return graphs, lost


def _row(
    group: str,
    workload: Workload,
    entry: _Entry,
    mode: str,
    *,
    timing: Timing | None = None,
    status: Status = "ok",
    host_us: float | None = None,
    num_syncs: int | None = None,
) -> Row:
    row = Row(
        group=group,
        workload=workload.name,
        contender=entry.contender.name,
        is_rival=entry.contender.is_rival,
        mode=mode,
        status=status,
        note=entry.note,
        error=entry.error,
        host_us=host_us,
        num_syncs=num_syncs,
    )
    if timing is None:
        return row
    return replace(
        row,
        median_us=timing.median_us,
        p10_us=timing.p10_us,
        p90_us=timing.p90_us,
        num_samples=timing.num_samples,
    )


def _rated(row: Row, workload: Workload, ceilings: Ceilings | None) -> Row:
    """Rates by the workload's counts, and the fraction of the ceiling."""
    if row.median_us is None:
        return row
    floor = None if ceilings is None else ceilings.floor_us(workload)
    seconds = row.median_us * 1e-6
    return replace(
        row,
        tflops=workload.num_flops / seconds * 1e-12 if workload.num_flops else None,
        tbytes_per_s=workload.num_bytes / seconds * 1e-12 if workload.num_bytes else None,
        fraction=None if floor is None else floor / row.median_us,
    )
