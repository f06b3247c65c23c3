"""Records: written whole, read back equal, compared; tables and the plot made of them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import attnkit
from attnkit.bench import machine, plot
from attnkit.bench.record import Record, Row, compare, load, now, save, standings, write
from attnkit.bench.roofline import Ceilings
from attnkit.bench.session import with_ratios
from attnkit.bench.table import absences, plain, show, tables
from attnkit.bench.workloads import LayerShape, decode, prefill
from attnkit.errors import ConfigurationError

LAYER = LayerShape(num_heads=4, num_kv_heads=2, head_size=16)
WORKLOADS = [decode(2, 33, LAYER), decode(4, 100, LAYER), prefill(1, 64, LAYER)]


def test_a_command_names_no_folder_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    called = ["/away/me/e2e.py", "--json", "/away/out/x.json", "--python", "bin/python", "decode"]
    monkeypatch.setattr(sys, "argv", called)
    assert machine.command() == "e2e.py --json x.json --python bin/python decode"


def timed(
    workload: str, contender: str, us: float, *, rival: bool = False, mode: str = "cold"
) -> Row:
    return Row(
        group=workload.split()[0],
        workload=workload,
        contender=contender,
        is_rival=rival,
        mode=mode,
        note="some pages",
        median_us=us,
        p10_us=us * 0.9,
        p90_us=us * 1.1,
        num_samples=9,
        tflops=100 / us,
        tbytes_per_s=1 / us,
        fraction=0.5,
        error=1e-3,
    )


def made() -> Record:
    rows: list[Row] = []
    for i, workload in enumerate(WORKLOADS):
        rows += with_ratios(
            [
                timed(workload.name, "ours", 10.0 + i),
                timed(workload.name, "rival", 20.0, rival=True),
                replace(
                    timed(workload.name, "gone", 1.0, rival=True),
                    median_us=None,
                    tflops=None,
                    status="not installed",
                    note="gone is not installed",
                ),
            ]
        )
    facts = {
        w.name: {**asdict(w), "num_bytes": w.num_bytes, "num_flops": w.num_flops} for w in WORKLOADS
    }
    return Record(
        machine={"device": "cpu", "cpu": "a processor"},
        source={"version": "0.1", "commit": "abcdef" * 7, "dirty": False},
        command="bench decode",
        started="2026-01-02T03:04:05+00:00",
        ceilings=Ceilings(
            read_bytes_per_s=3e10, copy_bytes_per_s=2e10, matmul_flops_per_s={"bfloat16": 4e11}
        ),
        workloads=facts,
        rows=tuple(rows),
    )


def test_an_exported_tree_inside_another_repository_has_no_history_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "another project"]):
        subprocess.run([*git, *command], check=True)
    for root in (tmp_path, tmp_path / "exported"):
        package = root / "src" / "attnkit" / "__init__.py"
        package.parent.mkdir(parents=True)
        package.touch()
    monkeypatch.setattr(attnkit, "__file__", str(package))
    assert machine.source("abc") == {"version": attnkit.__version__, "commit": "abc", "dirty": None}
    monkeypatch.setattr(attnkit, "__file__", str(tmp_path / "src" / "attnkit" / "__init__.py"))
    assert machine.source("abc")["dirty"]
    assert len(machine.source("abc")["commit"]) == 40


def test_a_record_begins_with_where_its_numbers_come_from() -> None:
    origin = machine.origin(torch.device("cpu"), now())
    assert list(origin) == ["machine", "source", "command", "started"]
    assert origin["machine"] == machine.describe(torch.device("cpu"))


def test_what_is_written_replaces_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    write({"rows": [1, 2]}, path)
    with pytest.raises(TypeError):
        write({"rows": object()}, path)
    assert json.loads(path.read_text()) == {"rows": [1, 2]}
    assert os.listdir(path.parent) == [path.name]


def test_a_record_is_read_back_as_it_was(tmp_path: Path) -> None:
    record = made()
    save(record, tmp_path / "deep" / "record.json")
    again = load(tmp_path / "deep" / "record.json")
    assert again.rows == record.rows
    assert again.ceilings == record.ceilings
    assert again.machine == record.machine
    assert json.dumps(again.workloads) == json.dumps(record.workloads)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["record.json"]


def test_a_record_without_ceilings_is_read_back(tmp_path: Path) -> None:
    save(replace(made(), ceilings=None), tmp_path / "r.json")
    assert load(tmp_path / "r.json").ceilings is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "is not JSON"), ("[]", "not a bench record"), ('{"schema": 99}', r"found 99")],
)
def test_what_is_no_record_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigurationError, match=complaint):
        load(tmp_path / "r.json")
    with pytest.raises(ConfigurationError, match=r"cannot read .*absent\.json"):
        load(tmp_path / "absent.json")


def test_comparison_takes_common_rows_and_knows_noise() -> None:
    first = made()
    slower = replace(first.rows[0], median_us=20.0, p10_us=19.0, p90_us=21.0)
    nearly = replace(first.rows[1], median_us=21.0)
    other = replace(first, rows=(nearly, slower, timed("new", "ours", 5.0)))
    changes = compare(first, other)
    assert [(c.contender, c.ratio, c.distinct) for c in changes] == [
        ("ours", 0.5, True),
        ("rival", pytest.approx(20 / 21), False),
    ]


def test_standings_are_geometric_means_over_a_group() -> None:
    found = {s.group: s for s in standings(made().rows)}
    assert found["decode"].mean == pytest.approx((2.0 * 20 / 11) ** 0.5)
    assert found["decode"].least == pytest.approx(20 / 11)
    assert found["decode"].num_workloads == 2
    assert found["prefill"].rival == "rival"


def test_tables_show_what_ran_and_leave_out_what_was_absent() -> None:
    first, second, stands = tables(made())
    text = plain(first)
    assert text.splitlines()[0] == "decode"
    assert "2.00x rival" in text
    assert "50.0%" in text
    assert "gone" not in text
    assert second[0] == "prefill"
    assert len(stands[2]) == 2
    assert absences(made().rows) == ["not installed: gone (gone is not installed)"]


def test_a_row_of_ours_without_a_time_stands_in_the_table_with_its_reason() -> None:
    record = made()
    wrong = replace(record.rows[0], median_us=None, status="wrong", note="relative error 0.5")
    text = plain(tables(replace(record, rows=(wrong,)))[0])
    assert "wrong: relative error 0.5" in text


def test_columns_line_up() -> None:
    lines = plain(tables(made())[0]).splitlines()[1:]
    starts = {line.index("some pages") for line in lines if "some pages" in line}
    assert len(starts) == 1


def test_a_table_is_printed_without_rich(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    show(made())
    out = capsys.readouterr().out
    assert "ceilings: read 30 GB/s" in out
    assert "geometric mean" in out


@pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import matplotlib"], capture_output=True).returncode
    != 0,
    reason="matplotlib is not installed",
)
def test_the_plot_is_a_png_that_grows_with_the_workloads(tmp_path: Path) -> None:
    def size(record: Record) -> tuple[int, int]:
        path = tmp_path / "plots" / "roof.png"
        plot.draw(record, path)
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        return struct.unpack(">II", head[16:24])

    record = made()
    assert size(record) == (1760, 605)
    many = [decode(2, 33 + i, LAYER) for i in range(30)]
    facts = {w.name: {"num_bytes": w.num_bytes, "num_flops": w.num_flops} for w in many}
    rows = tuple(timed(w.name, "ours", 10.0) for w in many)
    width, height = size(replace(record, workloads=facts, rows=rows))
    assert width == 1760
    assert height > 1200


def test_points_carry_the_workloads_numbers() -> None:
    points = plot.points(made())
    assert [p.number for p in points] == [1, 1, 2, 2, 3, 3]
    assert points[0].intensity == WORKLOADS[0].num_flops / WORKLOADS[0].num_bytes


def test_labels_of_neighbours_are_joined() -> None:
    def at(number: int, intensity: float) -> plot.Point:
        return plot.Point(
            number=number,
            workload=str(number),
            contender="x",
            is_rival=False,
            mode="cold",
            intensity=intensity,
            tflops=1.0,
            fraction=0.5,
        )

    found = plot._clusters([at(1, 4.0), at(2, 4.1), at(3, 900.0), at(4, 4.05), at(6, 4.0)])
    assert [plot._ranges(numbers) for numbers, _ in found] == ["1-2, 4, 6", "3"]


def test_a_plot_of_nothing_says_what_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="measure prefill"):
        plot.draw(replace(made(), rows=()), tmp_path / "x.png")


def test_a_missing_matplotlib_is_named_before_anything_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'attnkit\[bench\]'"):
        plot.require_matplotlib()
