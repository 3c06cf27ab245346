"""Keys by the value of what is expected of them, lowest first, as that value changes with age.

The value of a key is constant between two changes of age bin of its expectations. A calendar has
the next change of each key, and a priority queue the values; a change that is due counts once the
lowest key is asked for. An expectation has at most `BINS` values, so a key enters the queue at most
that many times for each, whatever the number of evictions: O(log n) each.
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Generic, TypeAlias, TypeVar

from kvmesh.retention.return_value import Expectation, TypicalReturn

K = TypeVar("K", bound=Hashable)
SLACK = 64
NOT_QUEUED = -1
Expected: TypeAlias = Sequence[Expectation]


class ReturnOrder(Generic[K]):
    """Knowledge of an owner of keys about their returns.

    `expected(key)` returns the expectations of a key, none for a key without a forecast, and
    `last_use(key)` the time of its last use. `saving(key)` is what a return saves if the key is
    held, in any unit; by default it is the same for all keys.
    """

    def __init__(
        self,
        typical: TypicalReturn,
        expected: Callable[[K], Expected],
        last_use: Callable[[K], float],
        saving: Callable[[K], float] = lambda _: 1.0,
    ) -> None:
        self.typical = typical
        self.expected = expected
        self.last_use = last_use
        self.saving = saving


class ValuedKey(Generic[K]):
    """A key with its value, and the `stamp` of its last use; `serial` is that of its queue entry.

    A return saves `saving`. `changes_at` is the time of its entry in the calendar.
    """

    __slots__ = ("blocked", "changes_at", "expected", "key", "saving", "serial", "stamp", "value")

    def __init__(self, key: K, expected: Expected, stamp: int, saving: float) -> None:
        self.key = key
        self.expected = expected
        self.stamp = stamp
        self.saving = saving
        self.value = -1.0
        self.serial = NOT_QUEUED
        self.changes_at = -inf
        self.blocked = False


class ValuedKeys(Generic[K]):
    """Keys by (value, recency)."""

    def __init__(self) -> None:
        self._entries: dict[K, ValuedKey[K]] = {}
        self._queue: list[tuple[float, int, int, ValuedKey[K]]] = []
        self._calendar: list[tuple[float, int, ValuedKey[K]]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def put(self, key: K, expected: Expected, stamp: int, saving: float = 1.0) -> None:
        """Add a key, or replace it."""
        self.discard(key)
        entry = self._entries[key] = ValuedKey(key, expected, stamp, saving)
        self._serial += 1
        heapq.heappush(self._calendar, (-inf, self._serial, entry))
        self._compact()

    def discard(self, key: K) -> int | None:
        """Remove a key; returns its stamp, None if it is absent."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        entry.serial, entry.changes_at = NOT_QUEUED, inf
        return entry.stamp

    def stamp(self, key: K) -> int:
        """The stamp of a key; KeyError if it is absent."""
        return self._entries[key].stamp

    def value(self, key: K) -> float | None:
        """The value of a key as of the last `lowest`; None if the key is absent."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def lowest(self, now: float) -> ValuedKey[K] | None:
        """The key of the lowest value at `now` that is not blocked; None if there is none."""
        self._compact()
        calendar, queue = self._calendar, self._queue
        while calendar and calendar[0][0] <= now:
            due, _, entry = heapq.heappop(calendar)
            if entry.changes_at == due:
                self._value(entry, now)
        while queue and queue[0][3].serial != queue[0][2]:
            heapq.heappop(queue)
        return queue[0][3] if queue else None

    def block(self, entry: ValuedKey[K]) -> None:
        """Pass over a key until it is unblocked."""
        entry.blocked, entry.serial = True, NOT_QUEUED

    def unblock(self, key: K) -> None:
        """Consider a key again; it must be present."""
        entry = self._entries[key]
        if entry.blocked:
            entry.blocked = False
            self._enqueue(entry)

    def _value(self, entry: ValuedKey[K], now: float) -> None:
        value, change = 0.0, inf
        for expectation in entry.expected:
            part, end = expectation.at(now)
            value += part
            change = min(change, end)
        value *= entry.saving
        if value != entry.value:
            entry.value = value
            if not entry.blocked:
                self._enqueue(entry)
        entry.changes_at = change
        if change < inf:
            self._serial += 1
            heapq.heappush(self._calendar, (change, self._serial, entry))

    def _enqueue(self, entry: ValuedKey[K]) -> None:
        self._serial += 1
        entry.serial = self._serial
        heapq.heappush(self._queue, (entry.value, entry.stamp, entry.serial, entry))

    def _compact(self) -> None:
        if len(self._queue) + len(self._calendar) <= 4 * len(self._entries) + SLACK:
            return
        self._queue = [item for item in self._queue if item[3].serial == item[2]]
        self._calendar = [item for item in self._calendar if item[2].changes_at == item[0]]
        heapq.heapify(self._queue)
        heapq.heapify(self._calendar)
