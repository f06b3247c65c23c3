"""The typer application: which commands there are.

In: the command functions of the files beside this. Out: `app`, which `attnkit.cli.main` runs and the
docs are generated from.
"""

from __future__ import annotations

import typer

from attnkit.cli.backends import backends
from attnkit.cli.bench import SETTINGS, bench
from attnkit.cli.explain import explain
from attnkit.cli.generate import generate
from attnkit.cli.verify import verify

app = typer.Typer(
    name="attnkit",
    help="Attention for LLM inference: run a model, choose and check a backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (generate, backends, explain, verify):
    app.command()(command)
app.command(**SETTINGS)(bench)
