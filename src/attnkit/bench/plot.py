"""Plot: a record as one picture that a person can read.

In: a record with ceilings. Out: a PNG. Left, the roofline: FLOP/s over FLOPs a byte, both logarithmic,
under the measured bandwidth and matrix rates; workloads carry numbers. Right, the same workloads by
name, with the fraction of the ceiling that each contender reaches.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnkit.bench.record import Record, Row
from attnkit.bench.roofline import Ceilings
from attnkit.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (
    "#c62828", "#ef6c00", "#6a1b9a", "#00838f",
    "#1565c0", "#2e7d32", "#6d4c41", "#37474f", "#ad1457", "#9e9d24", "#0097a7", "#5c6bc0",
)  # fmt: skip
_NEAR = 1.25
"""Workloads whose FLOPs a byte differ by less than this factor share one label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row on the picture.

    Attributes:
        number: of its workload, from 1.
        intensity: FLOPs a byte.
        tflops: reached.
        fraction: of the ceiling that binds.
    """

    number: int
    workload: str
    contender: str
    is_rival: bool
    mode: str
    intensity: float
    tflops: float
    fraction: float


def require_matplotlib() -> None:
    """Raise `ConfigurationError` if there is nothing to draw with; asked before hours of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "a plot needs matplotlib, which is not installed; pip install 'attnkit[bench]', or save "
            "the record with --json and draw it elsewhere: attnkit bench show RECORD --plot FILE"
        )


def points(record: Record) -> list[Point]:
    """The rows that have a place under a roof: those with FLOPs, bytes and a time."""
    numbers: dict[str, int] = {}
    found = []
    for row in record.rows:
        facts = record.workloads.get(row.workload)
        if facts is None or not row.tflops or not row.fraction:
            continue
        found.append(
            Point(
                number=numbers.setdefault(row.workload, len(numbers) + 1),
                workload=row.workload,
                contender=row.contender,
                is_rival=row.is_rival,
                mode=row.mode,
                intensity=facts["num_flops"] / facts["num_bytes"],
                tflops=row.tflops,
                fraction=row.fraction,
            )
        )
    return found


def draw(record: Record, path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigurationError: matplotlib is missing, or the record has nothing to draw.
    """
    require_matplotlib()
    found = points(record)
    if record.ceilings is None or not found:
        raise ConfigurationError(
            "this record has no attention rows with ceilings, so there is nothing to plot; measure "
            "prefill, decode, verify or mixed"
        )
    from matplotlib.figure import Figure

    names = {p.number: p.workload for p in found}
    styles = _styles(record.rows)
    height = max(5.5, 1.6 + 0.34 * len(names))
    figure = Figure(figsize=(16, height), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
    _draw_roof(left, record.ceilings, found, styles)
    _draw_fractions(right, found, names, styles)
    figure.legend(loc="outside lower center", ncols=8, fontsize=9, frameon=False)
    machine = record.machine.get("gpu") or record.machine.get("cpu")
    commit = str(record.source.get("commit") or "no commit")[:10]
    commit += ", changed since" if record.source.get("dirty") else ""
    version = record.source.get("version")
    figure.suptitle(f"{machine}, attnkit {version} ({commit}), {record.started[:10]}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Contender -> marker and colour; ours are stars, rivals are dots."""
    order = dict.fromkeys(r.contender for r in sorted(rows, key=lambda r: r.is_rival))
    rivals = {row.contender for row in rows if row.is_rival}
    return {
        name: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": "o" if name in rivals else "*",
            "size": 34 if name in rivals else 110,
            "zorder": 3 if name in rivals else 4,
        }
        for i, name in enumerate(order)
    }


def _scatter(axes: Axes, x: float, y: float, point: Point, style: dict[str, Any]) -> None:
    """Filled: cold. Hollow: replayed as a graph, or warm."""
    axes.scatter(
        [x],
        [y],
        s=style["size"],
        marker=style["marker"],
        facecolors=style["color"] if point.mode == "cold" else "none",
        edgecolors=style["color"],
        linewidths=1.2,
        zorder=style["zorder"],
    )


def _draw_roof(
    axes: Axes, ceilings: Ceilings, found: Sequence[Point], styles: dict[str, dict[str, Any]]
) -> None:
    bandwidth = ceilings.read_bytes_per_s * 1e-12
    roofs = {name: rate * 1e-12 for name, rate in ceilings.matmul_flops_per_s.items()}
    top = max(roofs.values())
    low = min(min(p.intensity for p in found) / 2.5, top / bandwidth / 4)
    high = max(max(p.intensity for p in found) * 2.5, top / bandwidth * 4)
    knee = top / bandwidth
    axes.plot([low, knee], [low * bandwidth, top], color="black", linewidth=1.4)
    axes.annotate(
        f"read {bandwidth:.3g} TB/s" if bandwidth >= 0.5 else f"read {bandwidth * 1e3:.3g} GB/s",
        (math.sqrt(low * knee), math.sqrt(low * knee) * bandwidth),
        xytext=(-6, 6),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    for name, roof in roofs.items():
        axes.plot([roof / bandwidth, high], [roof, roof], color="black", linewidth=1.4)
        axes.annotate(
            f"matrix product {name} {roof:.3g} TFLOP/s",
            (high, roof),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
    for point in found:
        _scatter(axes, point.intensity, point.tflops, point, styles[point.contender])
    for numbers, x in _clusters(found):
        axes.axvline(x, color="#bbbbbb", linewidth=0.6, linestyle=":", zorder=1)
        axes.annotate(
            f"[{_ranges(numbers)}]",
            (x, 0.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3, 4),
            textcoords="offset points",
            va="bottom",
            rotation=90,
            fontsize=8,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    reached = [p.tflops for p in found]
    # A point above its roof says that the ceiling was measured in a bad moment: it must be seen.
    axes.set_ylim(min(min(reached) / 6, low * bandwidth), max(top, *reached) * 2)
    axes.set_xlabel("FLOPs a byte (floor counts)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("roofline, workloads by number", fontsize=10)
    axes.grid(visible=True, which="major", color="#eeeeee")


def _draw_fractions(
    axes: Axes,
    found: Sequence[Point],
    names: dict[int, str],
    styles: dict[str, dict[str, Any]],
) -> None:
    for point in found:
        _scatter(axes, point.fraction * 100, point.number, point, styles[point.contender])
    best = max(p.fraction for p in found) * 100
    axes.axvline(100, color="black", linewidth=1.4)
    axes.set_xlim(0, max(105.0, best * 1.08))
    axes.set_ylim(len(names) + 0.6, 0.4)
    axes.set_yticks(
        list(names), [f"{name}  [{number}]" for number, name in names.items()], fontsize=8
    )
    axes.set_xlabel("% of the ceiling that binds (bandwidth or matrix rate)")
    axes.set_title("filled: cold caches; hollow: graph replay or warm", fontsize=10)
    axes.grid(visible=True, axis="both", color="#eeeeee")
    axes.set_axisbelow(True)
    present = {p.contender for p in found}
    for name, style in styles.items():
        if name in present:
            axes.scatter(
                [], [], s=style["size"], marker=style["marker"], color=style["color"], label=name
            )


def _clusters(found: Sequence[Point]) -> list[tuple[list[int], float]]:
    """Numbers of the workloads that stand at (nearly) the same place of the x axis, and the place."""
    places = sorted({(p.intensity, p.number) for p in found})
    clusters: list[list[tuple[float, int]]] = []
    for place in places:
        if clusters and place[0] <= clusters[-1][0][0] * _NEAR:
            clusters[-1].append(place)
        else:
            clusters.append([place])
    return [
        (sorted(number for _, number in cluster), math.sqrt(cluster[0][0] * cluster[-1][0]))
        for cluster in clusters
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] as "1-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
