"""The virtual clock: what happens next, deterministically."""

import heapq
from collections.abc import Callable, Iterator
from functools import partial

Action = Callable[[], None]
Entry = tuple[float, int, Action]


class Agenda:
    """Actions by time; those of one instant run in the order in which they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entered = 0
        self._stopped = False
        self._heap: list[Entry] = []

    def at(self, time: float, action: Action) -> None:
        """Run `action` at `time`, in seconds; a time that has passed means now."""
        self._entered += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._entered, action))

    def after(self, delay: float, action: Action) -> None:
        """Run `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def plan(self, actions: list[tuple[float, Action]]) -> None:
        """Like `at` for each of many; what is not next does not slow down the rest."""
        first = self._entered + 1
        self._entered += len(actions)
        entries = [(max(time, self.now), first + i, act) for i, (time, act) in enumerate(actions)]
        self._enter_next(iter(sorted(entries, key=_order)))

    def _enter_next(self, entries: Iterator[Entry]) -> None:
        entry = next(entries, None)
        if entry is not None:
            time, number, action = entry
            planned: Entry = time, number, partial(self._run_planned, entries, action)
            heapq.heappush(self._heap, planned)

    def _run_planned(self, entries: Iterator[Entry], action: Action) -> None:
        self._enter_next(entries)
        action()

    def stop(self) -> None:
        """Let no more time pass: `run` returns after the present action."""
        self._stopped = True

    def run(self) -> None:
        """Let time pass until there is nothing to do or `stop` is called."""
        heap, pop = self._heap, heapq.heappop
        while heap and not self._stopped:
            self.now, _, action = pop(heap)
            action()


def _order(entry: Entry) -> tuple[float, int]:
    return entry[:2]
