"""Failures that come again with every request: told once, then counted."""

import logging
from collections import Counter

log = logging.getLogger(__name__)


class FailureLog:
    """Logs each kind of failure once, with its traceback, and counts all in `counts`, by name.

    A kind is the name of what failed, the type of the error and the line that raised it.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._told: set[tuple[str, type[Exception], str]] = set()

    def note(self, name: str, text: str, error: Exception) -> None:
        """Count a failure of `name`; `text` is what the log says of the first of its kind."""
        self.counts[name] += 1
        kind = name, type(error), _line(error)
        if kind not in self._told:
            self._told.add(kind)
            log.error("%s; from now on silently", text, exc_info=error)


def _line(error: Exception) -> str:
    """Where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
