"""`attnkit bench`: measure backends beside their rivals.

In: the arguments of `python -m attnkit.bench`, handed on as they are, so that machines without typer
have the same command. Out: tables, a record, a plot.
"""

from __future__ import annotations

from typing import Any

import typer

SETTINGS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
"""Of the typer command: everything, --help included, belongs to the bench's own parser."""


def bench(context: typer.Context) -> None:
    """Measure backends beside their rivals, on the same numbers; outputs are checked first."""
    from attnkit.bench.__main__ import main

    raise typer.Exit(main(context.args))
