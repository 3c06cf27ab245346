"""Output of a test's processes, shown if the test fails."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

SHOWN = 200  # last lines of each log
_live: "weakref.WeakSet[Evidence]" = weakref.WeakSet()


class Evidence:
    """Texts by name, shown with every failing test while the object is referenced."""

    def __init__(self, read_texts: Callable[[], dict[str, str]]) -> None:
        self.read_texts = read_texts
        _live.add(self)


def log_files(folder: Path) -> dict[str, str]:
    """The text of each log file in a folder."""
    return {file.name: file.read_text(errors="replace") for file in sorted(folder.glob("*.log"))}


def sections() -> Iterator[tuple[str, str]]:
    """Headings and the last lines of each text."""
    for evidence in list(_live):
        for name, text in evidence.read_texts().items():
            yield f"End of {name}", "\n".join(text.splitlines()[-SHOWN:])
