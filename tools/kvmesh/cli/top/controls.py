"""The state of the screen that keys change: view, order, pause, help, first row. Pure."""

from dataclasses import dataclass

from kvmesh.observer.columns import VIEWS, RowView

HELP = (
    "1 fleet, 2 sessions, 3 tenants, 4 caches",
    "s  sort by the next column",
    "r  reverse the order",
    "j, k, arrows, space, b  scroll",
    "p  pause and continue",
    "?  this help",
    "q  quit",
)
_SCROLL = {"j": 1, "\x1b[B": 1, "\x1bOB": 1, "k": -1, "\x1b[A": -1, "\x1bOA": -1}
_PAGES = {" ": 1, "\x1b[6~": 1, "b": -1, "\x1b[5~": -1}


@dataclass
class TopControls:
    """The present choices of the person at the keys."""

    view: RowView
    sort: str
    reverse: bool
    first: int = 0
    paused: bool = False
    help: bool = False
    quit: bool = False

    def press(self, key: str, rows: int) -> None:
        """Obey one key; `rows` is the number of rows on a screen. Unknown keys do nothing."""
        names = list(VIEWS)
        if key.isdecimal() and 1 <= int(key) <= len(names):
            self.show(VIEWS[names[int(key) - 1]])
        elif key == "s":
            columns = [column.name for column in self.view.columns]
            self.sort = columns[(columns.index(self.sort) + 1) % len(columns)]
            column = self.view.column(self.sort)
            self.reverse = column is not None and column.number
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "p":
            self.paused = not self.paused
        elif key == "?":
            self.help = not self.help
        elif key in ("q", "\x03"):
            self.quit = True
        else:
            move = _SCROLL.get(key, 0) + rows * _PAGES.get(key, 0)
            self.first = max(0, self.first + move)

    def show(self, view: RowView) -> None:
        """Show a view in its usual order."""
        self.view, self.sort, self.reverse, self.first = view, view.sort, view.reverse, 0


def split_keys(text: str) -> list[str]:
    """Keys in what a terminal has sent at once: characters and escape sequences."""
    keys: list[str] = []
    while text:
        length = 1
        if text[:2] in ("\x1b[", "\x1bO"):
            ends = (n for n, c in enumerate(text[2:], 3) if "@" <= c <= "~")
            length = next(ends, len(text))
        keys.append(text[:length])
        text = text[length:]
    return keys
