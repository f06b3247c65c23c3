"""`python -m attnkit` is the command `attnkit`."""

from attnkit.cli import main

main()
