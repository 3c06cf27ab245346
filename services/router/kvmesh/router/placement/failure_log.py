"""Log of failures that may recur with every request: each kind is logged once, all are counted."""

import logging
from collections import Counter

log = logging.getLogger(__name__)


class FailureLog:
    """Logs each kind of failure once, with its traceback, and counts all in `counts`, by name.

    A kind is the name, the type of the error and the line that raised it.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: set[tuple[str, type[Exception], str]] = set()

    def note(self, name: str, text: str, error: Exception) -> None:
        """Count a failure of `name`; log `text` for the first of its kind."""
        self.counts[name] += 1
        kind = name, type(error), _line(error)
        if kind not in self._logged:
            self._logged.add(kind)
            log.error("%s (logged once)", text, exc_info=error)


def _line(error: Exception) -> str:
    """File and line that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
