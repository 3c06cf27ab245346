"""The virtual clock: a deterministic event queue."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]
Entry = tuple[float, int, Action]


class VirtualClock:
    """Runs actions by time; actions of equal time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._scheduled = 0
        self._stopped = False
        self._heap: list[Entry] = []
        self._planned: list[Entry] = []

    def at(self, time: float, action: Action) -> None:
        """Run `action` at `time` (seconds), or now if that has passed."""
        self._scheduled += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._scheduled, action))

    def after(self, delay: float, action: Action) -> None:
        """Run `action` in `delay` (seconds, at least 0)."""
        self._scheduled += 1
        heapq.heappush(self._heap, (self.now + delay, self._scheduled, action))

    def plan(self, actions: list[tuple[float, Action]]) -> None:
        """Schedule many actions, as `at` does, without making later scheduling slower."""
        first = self._scheduled + 1
        self._scheduled += len(actions)
        self._planned += [
            (max(time, self.now), first + i, act) for i, (time, act) in enumerate(actions)
        ]
        self._planned.sort(reverse=True)

    def stop(self) -> None:
        """Make `run` return after the current action."""
        self._stopped = True

    def run(self) -> None:
        """Run actions until none is left or `stop` is called."""
        heap, planned, pop = self._heap, self._planned, heapq.heappop
        while (heap or planned) and not self._stopped:
            from_plan = planned and (not heap or planned[-1] < heap[0])
            self.now, _, action = planned.pop() if from_plan else pop(heap)
            action()
