"""`attnkit backends`: the capability matrix.

In: nothing, or names. Out: one column per backend, asked of the classes themselves, and a first row
that says whether it can run on this machine. Backends over latents have a table of their own.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from attnkit.contract import AttentionBackend
from attnkit.errors import BackendUnavailable
from attnkit.matrix import capability_matrix, matrix_markdown, mla_matrix
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
    for name in names or backend_names():
        try:
            found[name] = resolve(name)
        except BackendUnavailable as absent:
            if names:
                raise
            typer.echo(f"{name}: {absent}", err=True)
    tables = []
    for matrix, latent in ((capability_matrix, False), (mla_matrix, True)):
        kind = {name: cls for name, cls in found.items() if cls.is_mla() is latent}
        if kind:
            here = [cls.unavailable_reason() or "yes" for cls in kind.values()]
            tables.append((kind, [("runs here", here), *matrix(kind)]))
    if as_json:
        cells = {
            name: {row: answers[i] for row, answers in rows}
            for kind, rows in tables
            for i, name in enumerate(kind)
        }
        typer.echo(json.dumps(cells, indent=2))
        return
    for kind, rows in tables:
        console = Console()
        if not console.is_terminal:  # No width to fit into: nothing is cut for a file or a pipe.
            typer.echo(matrix_markdown(list(kind), rows))
            continue
        table = Table(row_styles=["", "dim"])
        for column in ("", *kind):
            table.add_column(column, overflow="fold")
        for row, answers in rows:
            table.add_row(row, *answers)
        console.print(table)
