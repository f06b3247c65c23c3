"""Tables: a session's rows and two records' difference, as a person reads them.

In: rows or changes. Out: text, through rich where it is installed, else plain columns. Rivals that
were not there or refused are named once below, not once a row.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from attnkit.bench.record import Change, Record, Row, standings
from attnkit.bench.roofline import Ceilings

Table = tuple[str, list[str], list[list[str]]]
"""Title, headings, cells."""

_LEFT = 3
"""Columns of words; the rest are numbers and stand to the right."""


def show(record: Record) -> None:
    """Print a record on stdout."""
    if record.ceilings is not None:
        print(ceilings_line(record.ceilings))
    for table in tables(record):
        _print(table)
    for line in absences(record.rows):
        print(line)


def show_comparison(changes: Sequence[Change]) -> None:
    """Print a comparison on stdout."""
    cells = [
        [
            change.workload,
            change.contender,
            change.mode,
            _time(change.before),
            _time(change.after),
            f"{change.ratio:.3f}",
            "" if change.distinct else "within the spread",
        ]
        for change in changes
    ]
    headings = ["workload", "contender", "mode", "first", "second", "speed-up", ""]
    _print(("", headings, cells))


def ceilings_line(ceilings: Ceilings) -> str:
    """The measured ceilings in one line."""
    matmul = ", ".join(
        f"{name} {rate * 1e-12:.3g} TFLOP/s" for name, rate in ceilings.matmul_flops_per_s.items()
    )
    return (
        f"ceilings: read {_rate(ceilings.read_bytes_per_s)}, copy {_rate(ceilings.copy_bytes_per_s)}, "
        f"matrix product {matmul}"
    )


def tables(record: Record) -> list[Table]:
    """One per group, and the standings."""
    found = []
    for group in dict.fromkeys(row.group for row in record.rows):
        rows = [row for row in record.rows if row.group == group and _shown(row)]
        if rows:
            found.append(_group_table(group, rows))
    stands = [
        [
            s.group,
            s.contender,
            f"{s.rival} ({s.mode})",
            f"{s.mean:.2f}x",
            f"{s.least:.2f}x",
            str(s.num_workloads),
        ]
        for s in standings(record.rows)
    ]
    if stands:
        headings = ["group", "ours", "against", "geometric mean", "least", "workloads"]
        found.append(("rival's time over ours; above 1 ours is faster", headings, stands))
    return found


def absences(rows: Sequence[Row]) -> list[str]:
    """Which rivals were not there, by reason. What the others refused stands in the record."""
    missing: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.is_rival and row.status == "not installed":
            missing.setdefault(row.note, {})[row.contender] = None
    return [f"not installed: {', '.join(names)} ({reason})" for reason, names in missing.items()]


def _shown(row: Row) -> bool:
    return not (row.is_rival and row.status in ("refused", "not installed"))


def _group_table(group: str, rows: Sequence[Row]) -> Table:
    headings = ["workload", "contender", "mode", "time", "p10-p90"]
    columns = {
        "host": any(r.host_us is not None for r in rows),
        "syncs": any(r.num_syncs is not None for r in rows),
        "TFLOP/s": any(r.tflops for r in rows),
        "bytes/s": any(r.tbytes_per_s for r in rows),
        "tokens/s": any(r.tokens_per_s for r in rows),
        "of ceiling": any(r.fraction for r in rows),
        "vs best": any(r.ratios for r in rows),
        "error": any(r.error is not None for r in rows),
    }
    headings += [name for name, used in columns.items() if used] + ["note"]
    cells = []
    last = ""
    for row in rows:
        optional = {
            "host": _time(row.host_us),
            "syncs": "" if row.num_syncs is None else str(row.num_syncs),
            "TFLOP/s": _number(row.tflops, "{:.3g}"),
            "bytes/s": "" if not row.tbytes_per_s else _rate(row.tbytes_per_s * 1e12),
            "tokens/s": _number(row.tokens_per_s, "{:.1f}"),
            "of ceiling": _number(row.fraction, "{:.1%}"),
            "vs best": "" if row.ratio is None else f"{row.ratio:.2f}x {row.best_rival}",
            "error": _number(row.error, "{:.1e}"),
        }
        spread = ""
        if row.p10_us is not None and row.p90_us is not None:
            spread = f"{_time(row.p10_us)}-{_time(row.p90_us)}"
        note = row.note if row.status == "ok" else f"{row.status}: {row.note}"
        cells.append(
            [
                row.workload if row.workload != last else "",
                row.contender,
                row.mode,
                _time(row.median_us),
                spread,
                *(optional[name] for name, used in columns.items() if used),
                note,
            ]
        )
        last = row.workload
    return group, headings, cells


def _print(table: Table) -> None:
    title, headings, cells = table
    if importlib.util.find_spec("rich") is not None and sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table as RichTable

        rich_table = RichTable(title=title or None, title_justify="left", header_style="bold")
        for i, heading in enumerate(headings):
            justify = "left" if i < _LEFT or i == len(headings) - 1 else "right"
            rich_table.add_column(heading, justify=justify, overflow="fold")
        for row in cells:
            rich_table.add_row(*row)
        Console().print(rich_table)
        return
    print(plain(table))


def plain(table: Table) -> str:
    """A table as lines of text, columns two spaces apart."""
    title, headings, cells = table
    widths = [max(len(row[i]) for row in [headings, *cells]) for i in range(len(headings))]
    lines = [title] if title else []
    for row in [headings, *cells]:
        parts = [
            cell.ljust(width) if i < _LEFT or i == len(row) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines) + "\n"


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return ""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.4g} {unit}"
    return f"{microseconds:.4g} us"


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e12:
        return f"{bytes_per_s * 1e-12:.3f} TB/s"
    return f"{bytes_per_s * 1e-9:.3g} GB/s"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
