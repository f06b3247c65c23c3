"""`python -m attnkit.bench`, and behind it `attnkit bench`: arguments in, record, table and plot out.

Needs neither typer nor rich. Progress goes to stderr, the tables to stdout; the record is written
after every workload, so a session that is cut short leaves what it measured. Exit status: 0, 1 if one
of ours was wrong or failed or an argument was refused, 2 for arguments that are not understood.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attnkit.backends.cpu.native import usable_cores
from attnkit.bench import machine, plot
from attnkit.bench.contender import Contender
from attnkit.bench.e2e import (
    AttnkitEngine,
    TextEngine,
    TextWorkload,
    TransformersEngine,
    encode_prompts,
    measure,
)
from attnkit.bench.presets import PRESETS, preset
from attnkit.bench.record import Record, Row, compare, load, now, save
from attnkit.bench.rivals import RIVALS, rivals
from attnkit.bench.roofline import measure as measure_ceilings
from attnkit.bench.session import run
from attnkit.bench.subjects import Subject
from attnkit.bench.table import ceilings_line, show, show_comparison
from attnkit.bench.timing import QUICK, Effort
from attnkit.bench.workloads import KINDS, Kind, Workload, parse_shape
from attnkit.contract import DeviceCapability, KVCacheLayout
from attnkit.errors import AttnkitError, BackendUnavailable, ConfigurationError
from attnkit.selection import resolve

_EPILOG = f"""\
examples:
  attnkit bench decode prefill --backend triton --against fa3,flashinfer --json record.json
  attnkit bench all --preset cpu --backend cpu --threads 2 --plot roofline.png
  attnkit bench decode --shape batch=8,ctx=4096,heads=32/8,d=128,page=16,dtype=bfloat16,kv=fp8
  attnkit bench e2e --shape prompts=16,tokens=64,dtype=bfloat16
  attnkit bench list --preset h200
  attnkit bench show record.json --plot roofline.png
  attnkit bench compare before.json after.json

rivals: {", ".join(RIVALS)}
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = argparse.ArgumentParser(
        prog="attnkit bench",
        description="Measure backends beside their rivals: same numbers, one process, outputs checked\n"
        "against float64 before anything is timed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "what",
        nargs="+",
        help=f"groups of the preset ({', '.join(KINDS)}, ...), 'all' of them, or 'e2e'; 'list' names "
        "the workloads; 'show RECORD' and 'compare RECORD RECORD' read what --json wrote",
    )
    made.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="one of ours, or any name that selection knows; may be given several times (auto)",
    )
    made.add_argument(
        "--against",
        default="all",
        metavar="RIVALS",
        help="names with commas between, 'all' that are installed, or 'none' (all)",
    )
    made.add_argument("--preset", help=f"{' or '.join(PRESETS)} (by the device)")
    made.add_argument(
        "--shape",
        action="append",
        metavar="[KIND:]KEY=VALUE,...",
        help="measure this shape instead of the preset's, for one kind or for all that are asked for; "
        "may be given several times",
    )
    made.add_argument("--only", metavar="TEXT", help="only workloads whose name contains this")
    made.add_argument("--layout", help="NHD, HND, ...: of our pages (what the backend prefers)")
    made.add_argument("--device", help="cpu or cuda (a GPU where there is one)")
    made.add_argument("--threads", type=int, help="of torch on a CPU (all cores)")
    made.add_argument(
        "--model", help="of e2e: a directory, hub id or GGUF file (the default model)"
    )
    made.add_argument(
        "--quick", action="store_true", help="few samples, and the first workload of each group"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the roofline here (PNG)")
    made.add_argument(
        "--commit", metavar="SHA", help="what the record says where the tree has no git history"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        return _dispatch(options)
    except AttnkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _dispatch(options: argparse.Namespace) -> int:
    verb, operands = options.what[0], options.what[1:]
    _check_used(options, verb)
    if options.plot is not None:
        plot.require_matplotlib()
    if verb == "list":
        for group, workload in _workloads(options, operands or ["all"]):
            print(f"{group:16} {workload.name}")
        return 0
    if verb == "show":
        record = load(Path(_operands(verb, operands, 1)[0]))
        show(record)
        return _draw(record, options.plot)
    if verb == "compare":
        first, second = (load(Path(path)) for path in _operands(verb, operands, 2))
        show_comparison(compare(first, second))
        return 0
    return _measure(options)


def _check_used(options: argparse.Namespace, verb: str) -> None:
    """Refuse options without an effect on what was asked for.

    Raises:
        ConfigurationError: there is one.
    """
    reads = {
        "list": {"preset", "shape", "only", "quick", "device"},
        "show": {"plot"},
        "compare": set(),
    }
    used = reads.get(verb)
    if used is None:
        used = {name for name in vars(options) if name != "model" or "e2e" in options.what}
        if set(options.what) == {"e2e"}:
            used -= {"preset", "only", "layout"}
    if options.shape:
        used -= {"preset"}
    if options.json is None and options.plot is None:
        used -= {"commit"}
    defaults = parser()
    for name, value in vars(options).items():
        if name not in {"what", *used} and value != defaults.get_default(name):
            raise ConfigurationError(
                f"--{name} has no effect on {' '.join(options.what)}"
                f"{' with --shape' if name == 'preset' and options.shape else ''}"
                f"{' without --json or --plot' if name == 'commit' else ''}; leave it out"
            )
    kinds = {*options.what, *(KINDS if "all" in options.what or verb == "list" else ())}
    for shape in options.shape or ():
        kind, named, _ = shape.rpartition(":")
        if named and kind not in kinds:
            raise ConfigurationError(
                f"--shape {shape} is for {kind!r}, which is not measured; name one of "
                f"{', '.join(options.what)}"
            )


def _measure(options: argparse.Namespace) -> int:
    device = _device(options)
    if options.threads is not None:
        _set_threads(options.threads)
    texts: list[TextWorkload] = []
    if "e2e" in options.what:
        texts = [TextWorkload.parse(s) for s in _shapes(options.shape or [""], "e2e")]
    what = [name for name in options.what if name != "e2e"]
    workloads = _workloads(options, what) if what else []
    contenders = _contenders(options)
    origin = machine.origin(device, now(), options.commit)
    ceilings = None
    if workloads:
        _say("measuring the ceilings of this device")
        ceilings = measure_ceilings(device, {workload.dtype for _, workload in workloads})
        _say(ceilings_line(ceilings))

    rows: list[Row] = []

    def record() -> Record:
        return Record(
            **origin,
            ceilings=ceilings,
            workloads={
                **{workload.name: _facts(workload) for _, workload in workloads},
                **{workload.name: asdict(workload) for workload in texts},
            },
            rows=tuple(rows),
        )

    effort = QUICK if options.quick else Effort()
    for done in run(workloads, contenders, device, effort, ceilings, _say):
        rows += done
        if options.json is not None:
            save(record(), options.json)
    for text in texts:
        rows += _measure_text(text, options, device)
        if options.json is not None:
            save(record(), options.json)
    made = record()
    show(made)
    _draw(made, options.plot)
    return int(any(row.status in ("wrong", "failed") and not row.is_rival for row in rows))


def _measure_text(
    workload: TextWorkload, options: argparse.Namespace, device: torch.device
) -> list[Row]:
    _say(workload.name)
    ours = [
        AttnkitEngine(options.model, workload.dtype, backend, device)
        for backend in options.backend or ["auto"]
    ]
    engines: list[TextEngine] = list(ours)
    if options.against != "none":
        engines.append(TransformersEngine.load(ours[0].llm.model_path, workload.dtype, device))
    prompts = encode_prompts(ours[0].llm, workload)
    return measure(engines, prompts, workload, 2 if options.quick else 5, _say)


def _workloads(options: argparse.Namespace, what: Sequence[str]) -> list[tuple[str, Workload]]:
    """(group, workload) of the groups, or kinds, that were asked for."""
    if options.shape:
        found = [
            (kind, parse_shape(_kind(kind), shape))
            for kind in what
            for shape in _shapes(options.shape, kind)
        ]
    else:
        groups = preset(options.preset or ("h200" if _device(options).type == "cuda" else "cpu"))
        unknown = [name for name in what if name not in groups and name != "all"]
        if unknown:
            raise ConfigurationError(
                f"the preset has no group {', '.join(unknown)}; use all, e2e, {', '.join(groups)}"
            )
        names = list(groups) if "all" in what else what
        found = [
            (name, workload)
            for name in names
            for workload in (groups[name][:1] if options.quick else groups[name])
        ]
    if options.only is not None:
        found = [(group, workload) for group, workload in found if options.only in workload.name]
        if not found:
            raise ConfigurationError(
                f"no workload's name contains {options.only!r}; see attnkit bench list"
            )
    return found


def _shapes(given: Sequence[str], kind: str) -> list[str]:
    """The shapes meant for a kind: those that name it, and those that name none."""
    parts = [shape.rpartition(":") for shape in given]
    return [shape for named, _, shape in parts if named in ("", kind)]


def _kind(name: str) -> Kind:
    for kind in KINDS:
        if name == kind:
            return kind
    raise ConfigurationError(f"--shape needs a kind, and {name!r} is none; use {', '.join(KINDS)}")


def _contenders(options: argparse.Namespace) -> list[Contender]:
    layout = None if options.layout is None else KVCacheLayout.parse(options.layout)
    names = dict.fromkeys(options.backend or ["auto"])
    for name in names:
        if name != "auto":
            # A name that nothing has is a mistake now, not a row of every workload. A library that is
            # missing is such a row.
            with contextlib.suppress(BackendUnavailable):
                resolve(name)
    ours: list[Contender] = [Subject(backend=name, layout=layout) for name in names]
    return [*ours, *rivals(options.against)]


def _device(options: argparse.Namespace) -> torch.device:
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    DeviceCapability.of(name)  # Refuses what is not here.
    return torch.device(name)


def _set_threads(count: int) -> None:
    cores = usable_cores()
    if not 1 <= count <= cores:
        raise ConfigurationError(
            f"--threads {count} is not allowed; this process may use {cores} cores, so give 1 to {cores}"
        )
    torch.set_num_threads(count)


def _operands(verb: str, operands: Sequence[str], count: int) -> Sequence[str]:
    if len(operands) != count:
        raise ConfigurationError(
            f"{verb} takes {count} record file(s), but {len(operands)} were given"
        )
    return operands


def _facts(workload: Workload) -> dict[str, Any]:
    return {
        **asdict(workload),
        "num_bytes": workload.num_bytes,
        "num_flops": workload.num_flops,
    }


def _draw(record: Record, path: Path | None) -> int:
    if path is not None:
        plot.draw(record, path)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
