"""Names that callers choose, as text."""

from collections.abc import Iterable

from rich.text import Text

from kvmesh.runtime.logs import printable


def literal(text: str) -> Text:
    """`text` for a table's cell, without effect of any markup or control character in it."""
    return Text(printable(text))


def literal_lines(lines: Iterable[str]) -> Text:
    """Lines of text, each as by `literal`."""
    return Text("\n".join(map(printable, lines)))
