"""What the processes of a test have said, shown when it fails."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

SHOWN = 200  # last lines of each log
_kept: "weakref.WeakSet[Evidence]" = weakref.WeakSet()


class Evidence:
    """Shown with every test that fails while this is referred to; `tell` gives text by name."""

    def __init__(self, tell: Callable[[], dict[str, str]]) -> None:
        self.tell = tell
        _kept.add(self)


def log_files(folder: Path) -> dict[str, str]:
    """The text of each log of a folder."""
    return {file.name: file.read_text(errors="replace") for file in sorted(folder.glob("*.log"))}


def sections() -> Iterator[tuple[str, str]]:
    """All that is kept: headings and the end of each text."""
    for evidence in list(_kept):
        for name, text in evidence.tell().items():
            yield f"End of {name}", "\n".join(text.splitlines()[-SHOWN:])
