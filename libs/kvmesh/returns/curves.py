"""Curves of return: learned rates by class, with coarser classes where evidence is scarce."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import inf

from kvmesh._native import LifeTable, grow_older, learned_rates, start_all
from kvmesh.returns.classes import ClassKey
from kvmesh.returns.rates import AGE_ENDS, BINS, share_returned

MAX_CLASSES = 8192
MAX_CHECKED = 32768  # prompts whose expected and actual returns are compared at a time
LATE_S = 60.0  # for a request that has arrived in time to be placed
CHECKED_BINS = (7, 10)  # the returns within AGE_ENDS of these, 64 s and 512 s, are compared


@dataclass(slots=True, eq=False)
class Awaited:
    """A prompt that may return; `expected` are its shares of returns within CHECKED_BINS."""

    since: float
    tables: list[LifeTable]
    expected: tuple[float, ...]
    bin: int = 0
    over: bool = False
    returned_at: float = inf


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The evidence of a class; counts fade. `rates` are per second, by bin of age."""

    waits: tuple[str, ...]
    prompts: float
    returned: float
    expected: float
    rates: list[float]


@dataclass(slots=True)
class Calibration:
    """Returns within an age: expected and observed ones of the same prompts, which are older."""

    within_s: float
    expected: float = 0.0
    observed: int = 0


class ReturnCurves:
    """Life tables of at most MAX_CLASSES classes; those unused for longest are forgotten.

    Times are in seconds; a call with an earlier time than its predecessor counts as at that time.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[ClassKey, LifeTable] = OrderedDict()
        self._queues: list[deque[Awaited]] = [deque() for _ in range(BINS - 1)]
        self._now = 0.0
        self._next = inf  # the first time at which a prompt is due in a queue
        self._due = [inf] * len(self._queues)  # the same of each queue
        self._checked: list[deque[Awaited]] = [deque(maxlen=MAX_CHECKED) for _ in CHECKED_BINS]
        self.calibrations = [Calibration(AGE_ENDS[bin_]) for bin_ in CHECKED_BINS]

    def tables(self, keys: Sequence[ClassKey]) -> list[LifeTable]:
        """The life tables of these classes; a new one for each that is new."""
        return [self._table(key) for key in keys]

    def rates(self, tables: list[LifeTable]) -> list[float]:
        """Rates of return per second by bin of age, of the last of these, coarse to fine.

        Forgotten classes do not count.
        """
        return learned_rates(tables, self._now)

    def start(self, tables: list[LifeTable], rates: Sequence[float], now: float) -> Awaited:
        """Await the return of a prompt whose use ended now; `rates` are those expected."""
        now = self.advance(now)
        expected = tuple([share_returned(rates, AGE_ENDS[bin_]) for bin_ in CHECKED_BINS])
        awaited = Awaited(now, tables, expected)
        start_all(tables, now, share_returned(rates, AGE_ENDS[-2]))
        self._append(0, awaited)
        for checked in self._checked:
            checked.append(awaited)
        return awaited

    def returned(self, awaited: Awaited, now: float, waited_s: float = 0.0) -> None:
        """The prompt has returned: its next request is placed now, after a wait in queues."""
        now = self.advance(now)
        if awaited.over:
            return
        awaited.returned_at = max(now - waited_s, awaited.since)
        for table in self._leave(awaited, now):
            table.count_return(awaited.returned_at - awaited.since, now - awaited.since)

    def forget(self, awaited: Awaited, now: float) -> None:
        """Await it no longer."""
        self._leave(awaited, self.advance(now))

    def advance(self, now: float) -> float:
        """Let awaited prompts grow older; returns the time, which never decreases."""
        self._now = now = max(now, self._now)
        if now < self._next:
            return now
        for bin_ in range(len(self._queues)):  # one may become due by the one before it
            if self._due[bin_] <= now:
                self._empty(bin_, now)
        for number, calibration in enumerate(self.calibrations):
            checked = self._checked[number]
            while checked and checked[0].since + calibration.within_s + LATE_S <= now:
                awaited = checked.popleft()
                end = awaited.since + calibration.within_s
                if awaited.returned_at < inf or not awaited.over:
                    calibration.expected += awaited.expected[number]
                    calibration.observed += awaited.returned_at < end
        self._next = min(self._due)
        for calibration, checked in zip(self.calibrations, self._checked, strict=True):
            if checked:
                self._next = min(self._next, checked[0].since + calibration.within_s + LATE_S)
        return now

    def _empty(self, bin_: int, now: float) -> None:
        """Let the due prompts of a queue grow older."""
        queue, end_s = self._queues[bin_], AGE_ENDS[bin_]
        while queue and (queue[0].over or queue[0].since + end_s <= now):
            awaited = queue.popleft()
            if not awaited.over:
                grow_older(awaited.tables, bin_, awaited.since + end_s)
                awaited.bin = bin_ + 1
                if awaited.bin < len(self._queues):
                    self._append(awaited.bin, awaited)
        self._due[bin_] = queue[0].since + end_s if queue else inf

    def _append(self, bin_: int, awaited: Awaited) -> None:
        """Let a prompt wait for the end of its bin of age."""
        self._queues[bin_].append(awaited)
        due = awaited.since + AGE_ENDS[bin_]
        if due < self._due[bin_]:
            self._due[bin_] = due
            self._next = min(self._next, due)

    def summaries(self, limit: int = MAX_CLASSES) -> list[ClassSummary]:
        """The classes by what the session waits for, not by its history: those of most prompts."""
        classes = (item for item in self._tables.items() if not (item[0].history or item[0].agent))
        found = []
        for key, table in nlargest(limit, classes, key=lambda item: item[1].prompts):
            coarser = [ClassKey(key.waits[:count]) for count in range(len(key.waits))]
            known = [self._tables[each] for each in coarser if each in self._tables]
            rates = self.rates([*known, table])
            found.append(
                ClassSummary(key.waits, table.prompts, table.returned, table.expected, rates)
            )
        return found

    def __len__(self) -> int:
        return len(self._tables)

    def _table(self, key: ClassKey) -> LifeTable:
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = LifeTable(self._now)
            if len(self._tables) > MAX_CLASSES:
                self._tables.popitem(last=False)[1].close()
        else:
            self._tables.move_to_end(key)
        return table

    def _leave(self, awaited: Awaited, now: float) -> list[LifeTable]:
        """Returns the tables that it leaves."""
        tables, awaited.over, awaited.tables = awaited.tables, True, []
        for table in tables:
            table.leave(awaited.bin, now)
        return tables
