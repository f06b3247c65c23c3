"""`attnkit verify BACKEND`: run the conformance kit.

In: a backend by any name selection knows. Out: how many cases passed, each failure with the measured
error and its budget; exit status 1 if any failed.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnkit.conformance import verify as run_kit


def verify(
    backend: Annotated[
        str, typer.Argument(help="A name, path/to/file.py:Class or package.module:Class.")
    ],
    device: Annotated[str, typer.Option(help="Where to run: cpu or cuda.")] = "cpu",
    only: Annotated[str | None, typer.Option(help="Only checks whose name contains this.")] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes to spread checks over; on a GPU, where kernels are compiled first.",
        ),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole report as JSON.")
    ] = False,
) -> None:
    """Check a backend against the float64 oracle and the laws, on every feature it claims."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    # Where lines cannot be taken back, a bar would leave an empty one.
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("verify", total=None)

        def progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name[:40].ljust(40))

        report = run_kit(backend, device=device, filter=only, progress=progress, jobs=jobs)
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    raise typer.Exit(0 if report.ok else 1)
