"""Output of a test's processes, shown if the test fails."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

SHOWN = 200  # last lines of each log
_kept: "weakref.WeakSet[Evidence]" = weakref.WeakSet()


class Evidence:
    """Shown with every failing test while it is referenced; `tell` returns texts by name."""

    def __init__(self, tell: Callable[[], dict[str, str]]) -> None:
        self.tell = tell
        _kept.add(self)


def log_files(folder: Path) -> dict[str, str]:
    """The text of each log file in a folder."""
    return {file.name: file.read_text(errors="replace") for file in sorted(folder.glob("*.log"))}


def sections() -> Iterator[tuple[str, str]]:
    """Headings and the last lines of each text."""
    for evidence in list(_kept):
        for name, text in evidence.tell().items():
            yield f"End of {name}", "\n".join(text.splitlines()[-SHOWN:])
