"""Faults of a process's own connection, by kind and subject. Pure."""

import logging
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)
REFUSED, STALLED = "refused_subject", "stalled_reader"
Observer = Callable[[str, Mapping[str, str]], None]


class BusFaults:
    """Passes all present faults of a kind to the observers; without any it logs each new one."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, str]] = {}
        self._observers: list[Observer] = []

    def observe(self, observer: Observer) -> None:
        """Have `observer` called with the present faults, and at each change."""
        self._observers.append(observer)
        for kind, found in self._found.items():
            observer(kind, found)

    def ignore(self, observer: Observer) -> None:
        """Call an observer no longer, if it was."""
        self._observers = [each for each in self._observers if each != observer]

    def texts(self, kind: str) -> list[str]:
        """One line per present fault of a kind."""
        return list(self._found.get(kind, {}).values())

    def about(self, kind: str) -> set[str]:
        """The subjects or streams of the present faults of a kind."""
        return set(self._found.get(kind, {}))

    def update(self, kind: str, found: Mapping[str, str]) -> None:
        """Replace all faults of a kind; `found` maps a subject or stream to one line of text."""
        before = self._found.get(kind, {})
        if before == found:
            return
        self._found[kind] = dict(found)
        for observer in self._observers:
            observer(kind, found)
        for about, text in found.items():
            if not self._observers and about not in before:
                log.warning("%s", text)

    def set(self, kind: str, about: str, text: str) -> None:
        """Add or replace one fault; an empty `text` removes it."""
        others = {k: v for k, v in self._found.get(kind, {}).items() if k != about}
        self.update(kind, {**others, about: text} if text else others)
