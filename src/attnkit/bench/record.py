"""Record: what a session measured and where, as JSON that a claim can cite.

In: rows of a session and the machine's description. Out: a file, written whole or not at all, read
back by `load`, and two records set side by side by `compare`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from attnkit.bench.roofline import Ceilings, geometric_mean
from attnkit.errors import ConfigurationError

SCHEMA = 1

Status = Literal["ok", "refused", "not installed", "wrong", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender on one workload in one mode.

    Attributes:
        group: the table it stands in.
        workload: name of the workload.
        contender: name of the contender.
        is_rival: not ours.
        mode: cold, warm, graph or host (see `timing`); wall end to end.
        status: "ok", or why there is no time.
        note: what it ran on, or the reason.
        median_us, p10_us, p90_us: of one call.
        num_samples: behind them.
        host_us: median the host spends launching a call, where that is not the time itself.
        num_syncs: times the call waited for the device; None where nobody counted.
        tflops, tbytes_per_s: rates by the counts of the workload.
        tokens_per_s: of text, end to end.
        fraction: of the measured ceiling that binds.
        error: relative, against float64. End to end: share of tokens that differ from the rival's.
        ratios: of ours: rival -> its time over ours; above 1 we are faster.
        best_rival: the fastest of them.
    """

    group: str
    workload: str
    contender: str
    is_rival: bool
    mode: str
    status: Status = "ok"
    note: str = ""
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    num_samples: int = 0
    host_us: float | None = None
    num_syncs: int | None = None
    tflops: float | None = None
    tbytes_per_s: float | None = None
    tokens_per_s: float | None = None
    fraction: float | None = None
    error: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    best_rival: str | None = None

    @property
    def ratio(self) -> float | None:
        """The best rival's time over ours; None for rivals and where none ran."""
        return None if self.best_rival is None else self.ratios[self.best_rival]

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two rows of two records comparable."""
        return self.workload, self.contender, self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A session.

    Attributes:
        machine: from `machine.describe`.
        source: from `machine.source`.
        command: how it was started.
        started: UTC, ISO 8601.
        ceilings: measured in the same process; None where nothing was compared with them.
        workloads: name -> its fields, bytes and FLOPs.
        rows: in the order they were measured.
    """

    machine: Mapping[str, Any]
    source: Mapping[str, Any]
    command: str
    started: str
    ceilings: Ceilings | None
    workloads: Mapping[str, Mapping[str, Any]]
    rows: Sequence[Row]


def now() -> str:
    """The time as a record writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def save(record: Record, path: Path) -> None:
    """Write a record, as `write` does."""
    write({"schema": SCHEMA, **asdict(record)}, path)


def write(content: Mapping[str, Any], path: Path) -> None:
    """Write what a session found as JSON, and the folders above it; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        ConfigurationError: the file is not there, or is not a record of this schema.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}; give a record") from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path} is not JSON ({error}); give a record") from error
    found = content.pop("schema", None) if isinstance(content, dict) else None
    if found != SCHEMA:
        raise ConfigurationError(
            f"{path} is not a bench record of schema {SCHEMA} (found {found}); make one with --json"
        )
    known = {f.name for f in fields(Row)}
    ceilings = content["ceilings"]
    return Record(
        **{
            **content,
            "ceilings": None if ceilings is None else Ceilings(**ceilings),
            "rows": tuple(
                Row(**{k: v for k, v in row.items() if k in known}) for row in content["rows"]
            ),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row in two records.

    Attributes:
        before, after: median microseconds.
        ratio: before over after; above 1 it became faster.
        distinct: the spreads (p10 to p90) do not overlap.
    """

    workload: str
    contender: str
    mode: str
    before: float
    after: float
    ratio: float
    distinct: bool


def compare(first: Record, second: Record) -> list[Change]:
    """Rows that both records have with a time, in the order of the first."""
    later = {row.key: row for row in second.rows}
    changes = []
    for old in first.rows:
        new = later.get(old.key)
        if new is None or old.median_us is None or new.median_us is None:
            continue
        assert old.p10_us is not None
        assert old.p90_us is not None
        assert new.p10_us is not None
        assert new.p90_us is not None
        changes.append(
            Change(
                workload=old.workload,
                contender=old.contender,
                mode=old.mode,
                before=old.median_us,
                after=new.median_us,
                ratio=old.median_us / new.median_us,
                distinct=old.p10_us > new.p90_us or new.p10_us > old.p90_us,
            )
        )
    return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One of ours against one rival over a group.

    Attributes:
        mean: geometric mean of the rival's time over ours.
        least: the smallest of them.
        num_workloads: both ran.
    """

    group: str
    contender: str
    mode: str
    rival: str
    mean: float
    least: float
    num_workloads: int


def standings(rows: Sequence[Row]) -> list[Standing]:
    """How each of ours stands against each rival, by group and mode, strongest rival first."""
    ratios: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        for rival, ratio in row.ratios.items():
            ratios.setdefault((row.group, row.contender, row.mode, rival), []).append(ratio)
    found = [
        Standing(
            group=group,
            contender=contender,
            mode=mode,
            rival=rival,
            mean=geometric_mean(values),
            least=min(values),
            num_workloads=len(values),
        )
        for (group, contender, mode, rival), values in ratios.items()
    ]
    return sorted(found, key=lambda s: (s.group, s.contender, s.mode, s.mean))
