"""The decisions of a roll: whom to replace next, when, and when to stop. Pure."""

import re
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import NamedTuple

from kvmesh.bus.messages import RollRecord
from kvmesh.cli.rolling.figures import RequestFigures, worse

_NUMBER = re.compile(r"(\d+)")


class Replica(NamedTuple):
    """A process of the service that has a card; it `serves` if it may be given work."""

    name: str
    instance: str
    serves: bool = True
    draining: bool = False


class Act(Enum):
    """Kinds of steps."""

    WAIT = auto()
    REPLACE = auto()
    REPLACED = auto()  # it serves again; its requests are watched from now on
    STOP = auto()
    END = auto()


class Step(NamedTuple):
    """The present step: `name` is the process that it is about, `reason` why a roll stops."""

    act: Act
    name: str = ""
    reason: str = ""


class Roll:
    """Replaces the processes of `record.before` one at a time.

    The next one follows once the last one has left, and `watch_s` seconds of requests since its
    successor serves fared no worse than before. A process that does not serve again, or leave,
    within `timeout_s` seconds stops the roll. Times passed in are in seconds of one clock.
    `last_first` replaces the highest numbers first.
    """

    def __init__(
        self,
        record: RollRecord,
        watch_s: float,
        timeout_s: float,
        tolerance: float,
        last_first: bool = False,
    ) -> None:
        names = sorted(record.before, key=_by_number, reverse=last_first)
        self._before = {name: record.before[name] for name in names}
        self._watch_s = watch_s
        self._timeout_s = timeout_s
        self._tolerance = tolerance
        self._current = ""
        self._asked_at = 0.0
        self._served_at: float | None = None

    def left(self, replicas: Collection[Replica]) -> list[str]:
        """The names of those still to be replaced, in order."""
        living = {replica.instance for replica in replicas}
        return [name for name, instance in self._before.items() if instance in living]

    def step(
        self,
        now: float,
        replicas: Collection[Replica],
        failure: str,
        figures: Callable[[], tuple[RequestFigures, RequestFigures]],
    ) -> Step:
        """The next step. `failure` is the reason why the present replacement has failed, if any.

        `figures` are those before the roll and since the present process serves again.
        """
        if not self._current:
            return self._next(now, replicas)
        name = self._current
        if failure:
            return Step(Act.STOP, name, failure)
        if self._served_at is None:
            if self._is_replaced(name, replicas):
                self._served_at = now
                return Step(Act.REPLACED, name)
            if now - self._asked_at > self._timeout_s:
                return Step(Act.STOP, name, f"{name} does not serve after {self._timeout_s:g} s")
            return Step(Act.WAIT, name)
        if not self._is_replaced(name, replicas):
            return Step(Act.STOP, name, f"{name} has left again")
        if now - self._served_at < self._watch_s:
            return Step(Act.WAIT, name)
        if reason := worse(*figures(), self._tolerance):
            return Step(Act.STOP, name, f"since {name} is replaced, {reason}")
        if name in self.left(replicas):  # its successor serves beside it
            if now - self._asked_at > self._timeout_s:
                return Step(Act.STOP, name, f"{name} has not left after {self._timeout_s:g} s")
            return Step(Act.WAIT, name)
        self._current, self._served_at = "", None
        return self._next(now, replicas)

    def _next(self, now: float, replicas: Collection[Replica]) -> Step:
        left = self.left(replicas)
        if not left:
            return Step(Act.END)
        draining = {replica.instance for replica in replicas if replica.draining}
        leaving = [name for name in left if self._before[name] in draining]
        self._current, self._asked_at = (leaving or left)[0], now
        # an interrupted roll, or somebody else, has told it to leave
        return Step(Act.WAIT if leaving else Act.REPLACE, self._current)

    def _is_replaced(self, name: str, replicas: Collection[Replica]) -> bool:
        """True if another instance serves in its place, perhaps under another name."""
        instance = self._before[name]
        serving = [each for each in replicas if each.serves and each.instance != instance]
        if any(each.name == name for each in serving):
            return True
        gone = all(each.instance != instance for each in replicas)
        return gone and len(serving) >= len(self._before)


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that orders worker-10 behind worker-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
