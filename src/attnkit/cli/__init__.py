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
        from attnkit.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        sys.exit("the attnkit command needs typer and rich: pip install 'attnkit[cli]'")
    try:
        app()  # exits by itself: the command's status, 2 for bad usage, 130 after Ctrl-C
    except AttnkitError as error:
        sys.exit(f"error: {error}")
