"""The command line `attnkit`: one file a command.

In: arguments. Out: text on stdout, or JSON with --json; reasons and progress on stderr. Errors that
attnkit raises on purpose become one line and exit status 1.
"""

from __future__ import annotations

import sys

from attnkit.errors import AttnkitError


def main() -> None:
    """Entry point of the installed command."""
    try:
        import typer
    except ModuleNotFoundError as missing:
        if missing.name != "typer":
            raise
        sys.exit("the attnkit command needs typer and rich: pip install 'attnkit[cli]'")
    from attnkit.cli.app import app

    try:
        app(standalone_mode=False)
    except AttnkitError as error:
        sys.exit(f"error: {error}")
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
