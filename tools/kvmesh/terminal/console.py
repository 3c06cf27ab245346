"""The console of standard output."""

import sys

from rich.console import Console

UNLIMITED = 1_000_000  # columns


def stdout_console() -> Console:
    """The console of standard output, as wide as the terminal; without limit if it is none.

    A pipe or a file thus has each row whole, on one line.
    """
    width = None if sys.stdout.isatty() else UNLIMITED
    return Console(highlight=False, width=width)


def print_line(console: Console, text: str) -> None:
    """Print text as it is: a console of a terminal does not break it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
