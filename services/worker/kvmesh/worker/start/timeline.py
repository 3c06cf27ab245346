"""The phases of one start, reported by several threads and processes: a pure core with a lock."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from threading import Lock, get_ident
from time import monotonic
from typing import NamedTuple

from kvmesh.bus.messages import Phase, StartPhase

ORDER = {str(phase): number for number, phase in enumerate(StartPhase)}
MOST_REPORTS = 4096


class Stretch(NamedTuple):
    """A time in one phase, from `began` to `ended` on the monotonic clock."""

    phase: str
    began: float
    ended: float


class _Report(NamedTuple):
    stretch: Stretch
    outer: bool


class StartTimeline:
    """Attributes each moment of a start to one phase at most.

    Of several phases at one time the first counts, so that the slowest process or rank decides;
    an `outer` phase counts only while no other does. `created` is the beginning of the start.
    `on_change` is called, in any thread, when the present phase may have changed. `last` is the
    phase entered last, also once it has ended.
    """

    def __init__(self, created: float | None = None) -> None:
        self.created = monotonic() if created is None else created
        self.on_change: Callable[[], None] = lambda: None
        self.last = str(StartPhase.PROCESS)
        self._reports: list[_Report] = []
        self._entered: dict[str, list[tuple[str, float]]] = {}
        self._lock = Lock()

    def begin_again(self) -> None:
        """Forget the past: another start begins now, when a worker has fallen asleep."""
        with self._lock:
            self.created = monotonic()
            self._reports.clear()

    @contextmanager
    def phase(self, phase: StartPhase, outer: bool = False) -> Iterator[None]:
        """The phase of this thread within the block."""
        source, began = f"thread {get_ident()}", monotonic()
        with self._lock:
            self._entered.setdefault(source, []).append((phase, began))
            self.last = str(phase)
        self.on_change()
        try:
            yield
        finally:
            self.add(phase, began, monotonic(), outer)
            with self._lock:
                self._entered[source].pop()
            self.on_change()

    def add(self, phase: str, began: float, ended: float, outer: bool = False) -> bool:
        """Count a phase from `began` to `ended`; False if it is unknown or its times are absurd."""
        if phase not in ORDER or not isfinite(began) or not isfinite(ended):
            return False
        began = max(began, self.created)
        with self._lock:
            if began > ended or len(self._reports) >= MOST_REPORTS:
                return False
            self._reports.append(_Report(Stretch(str(phase), began, ended), outer))
        return True

    def enter(self, source: str, phase: str, began: float) -> None:
        """Another process is in a phase until it enters the next one or leaves."""
        with self._lock:
            if phase in ORDER and (source in self._entered or len(self._entered) < MOST_REPORTS):
                self._entered[source] = [(phase, began)]
                self.last = str(phase)
        self.on_change()

    def leave(self, source: str) -> None:
        """Another process is in no phase that it has told."""
        with self._lock:
            self._entered.pop(source, None)
        self.on_change()

    def present(self) -> tuple[str, float] | None:
        """The phase that the start is in, and since when."""
        with self._lock:
            entered = [stack[-1] for stack in self._entered.values() if stack]
        return min(entered, key=lambda each: (ORDER[each[0]], each[1]), default=None)

    def stretches(self) -> list[Stretch]:
        """The phases that count, in order of time; they do not overlap."""
        with self._lock:
            reports = list(self._reports)
        edges = sorted(
            (at, change, report.outer, ORDER[report.stretch.phase])
            for report in reports
            for at, change in ((report.stretch.began, 1), (report.stretch.ended, -1))
        )
        names = list(ORDER)
        open_now: Counter[tuple[bool, int]] = Counter()
        found: list[Stretch] = []
        before = 0.0
        for at, change, outer, number in edges:
            if at > before and (current := min(+open_now, default=None)) is not None:
                _append(found, Stretch(names[current[1]], before, at))
            open_now[outer, number] += change
            before = at
        return found

    def parked(self) -> Stretch | None:
        """The time in which the worker was parked; None if it was not, or still is."""
        found = (each for each in self.stretches() if each.phase == StartPhase.PARKED)
        return next(found, None)

    def row(self) -> list[Phase]:
        """The seconds of each phase that took any, in order."""
        seconds: Counter[str] = Counter()
        for phase, began, ended in self.stretches():
            seconds[phase] += ended - began  # type: ignore[assignment]  # floats can be counted
        return [Phase(phase, round(seconds[phase], 3)) for phase in ORDER if seconds[phase] > 0]


def _append(found: list[Stretch], new: Stretch) -> None:
    last = found[-1] if found else None
    if last is not None and (last.phase, last.ended) == (new.phase, new.began):
        found[-1] = last._replace(ended=new.ended)
    else:
        found.append(new)
