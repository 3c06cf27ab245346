"""The virtual clock: what happens next, deterministically."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]
Entry = tuple[float, int, Action]


class VirtualClock:
    """Actions by time; those of one instant run in the order in which they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entered = 0
        self._stopped = False
        self._heap: list[Entry] = []
        self._planned: list[Entry] = []

    def at(self, time: float, action: Action) -> None:
        """Run `action` at `time`, in seconds; a time that has passed means now."""
        self._entered += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._entered, action))

    def after(self, delay: float, action: Action) -> None:
        """Run `action` in `delay` seconds, which is not negative."""
        self._entered += 1
        heapq.heappush(self._heap, (self.now + delay, self._entered, action))

    def plan(self, actions: list[tuple[float, Action]]) -> None:
        """Like `at` for each of many, which do not slow down what is entered later."""
        first = self._entered + 1
        self._entered += len(actions)
        self._planned += [
            (max(time, self.now), first + i, act) for i, (time, act) in enumerate(actions)
        ]
        self._planned.sort(reverse=True)

    def stop(self) -> None:
        """Let no more time pass: `run` returns after the present action."""
        self._stopped = True

    def run(self) -> None:
        """Let time pass until there is nothing to do or `stop` is called."""
        heap, planned, pop = self._heap, self._planned, heapq.heappop
        while (heap or planned) and not self._stopped:
            from_plan = planned and (not heap or planned[-1] < heap[0])
            self.now, _, action = planned.pop() if from_plan else pop(heap)
            action()
