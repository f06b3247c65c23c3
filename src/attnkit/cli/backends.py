"""`attnkit backends`: the capability matrix.

In: nothing, or names. Out: one column per backend, asked of the classes themselves, and a first row
that says whether it can run on this machine.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from attnkit.contract import AttentionBackend
from attnkit.errors import BackendUnavailable
from attnkit.matrix import capability_matrix
from attnkit.selection import backend_names, resolve


def backends(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Only these: names, path/to/file.py:Class or package.module:Class."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what each backend can do, and whether it can run here."""
    found: dict[str, type[AttentionBackend]] = {}
    here: list[str] = []
    for name in names or backend_names():
        try:
            found[name] = resolve(name)
        except BackendUnavailable as absent:
            if names:
                raise
            typer.echo(f"{name}: {absent}", err=True)
            continue
        here.append(found[name].is_available() or "yes")
    rows = [("runs here", here), *capability_matrix(found)]
    if as_json:
        cells = {name: {row: answers[i] for row, answers in rows} for i, name in enumerate(found)}
        typer.echo(json.dumps(cells, indent=2))
        return
    table = Table("", *found, row_styles=["", "dim"])
    for row, answers in rows:
        table.add_row(row, *answers)
    Console().print(table)
