"""Order of the waiting requests: priority tiers, then fair classes in rotation, then a key.

The order depends on the pushed and removed entries alone, so every replica computes the same one.
The only exception: an entry older than a bound goes first, unless it is of a batch request.

Requests with the same constraints form a lane. If a lane has no capacity, later requests of other
lanes go first, and no class loses its turn by that (ADR 16).
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping

from kvmesh.bus.messages import SeqWait
from kvmesh.router.state.fair_classes import main_class

Heap = list[tuple[float, float, str]]
BATCH = "~"  # first character of the lanes of batch requests


class QueuePart:
    """Waiting requests of one part of a class, lowest key first; `lanes` has them by lane.

    `served` is the total cost of its placed requests.
    """

    __slots__ = ("heap", "lanes", "name", "served")

    def __init__(self, name: str, served: float) -> None:
        self.name = name
        self.served = served
        self.heap: Heap = []
        self.lanes: dict[str, Heap] = {}

    def push(self, entry: SeqWait) -> None:
        item = (entry.key, entry.arrived, entry.request)
        heapq.heappush(self.heap, item)
        heapq.heappush(self.lanes.setdefault(entry.lane, []), item)

    def first(self, entries: Mapping[str, SeqWait]) -> str | None:
        """The next request; None if there is none."""
        return self._first(self.heap, entries)

    def first_outside(self, entries: Mapping[str, SeqWait], blocked: Collection[str]) -> str | None:
        """The next request outside the `blocked` lanes."""
        best: tuple[float, float, str] | None = None
        for lane in [lane for lane in self.lanes if lane not in blocked]:
            heap = self.lanes[lane]
            if self._first(heap, entries, lane) is None:
                del self.lanes[lane]
            elif best is None or heap[0] < best:
                best = heap[0]
        return None if best is None else best[2]

    def _first(
        self, heap: Heap, entries: Mapping[str, SeqWait], lane: str | None = None
    ) -> str | None:
        """The first entry of a heap that is still current, in `lane` if given."""
        while heap:
            key, _, request = heap[0]
            entry = entries.get(request)
            if (
                entry is not None
                and (entry.key, entry.fair_class) == (key, self.name)
                and (lane is None or entry.lane == lane)
            ):
                return request
            heapq.heappop(heap)
        return None


class FairClass:
    """Waiting requests of one class within one tier; the least served of its parts is next."""

    __slots__ = ("_parts", "_served", "_turns", "deficit", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.deficit = 0.0
        self._served = 0.0
        self._parts: dict[str, QueuePart] = {}
        self._turns: list[tuple[float, str]] = []

    def push(self, entry: SeqWait) -> None:
        part = self._parts.get(entry.fair_class)
        if part is None:
            part = self._parts[entry.fair_class] = QueuePart(entry.fair_class, self._served)
            heapq.heappush(self._turns, (part.served, part.name))
        part.push(entry)

    def first(self, entries: Mapping[str, SeqWait]) -> str | None:
        """The next request; None if there is none."""
        while self._turns:
            served, name = self._turns[0]
            part = self._parts[name]
            request = part.first(entries)
            if request is None:
                heapq.heappop(self._turns)
                del self._parts[name]
            elif part.served > served:
                heapq.heapreplace(self._turns, (part.served, name))
            else:
                self._served = served
                return request
        return None

    def first_outside(self, entries: Mapping[str, SeqWait], blocked: Collection[str]) -> str | None:
        """The next request outside the `blocked` lanes."""
        for part in sorted(self._parts.values(), key=lambda part: (part.served, part.name)):
            request = part.first_outside(entries, blocked)
            if request is not None:
                return request
        return None

    def charge(self, entry: SeqWait) -> None:
        """Charge a placed request."""
        self.deficit = max(self.deficit - entry.cost, 0.0)
        part = self._parts.get(entry.fair_class)
        if part is not None:
            part.served += entry.cost


class PriorityTier:
    """Deficit round robin (Shreedhar and Varghese 1995) over classes; cost in uncached tokens.

    The front class places requests while its deficit covers the next one; each turn adds `quantum`
    times its weight. An empty class loses its deficit and its turn. Subdividing a class gains it
    nothing: its parts share its turns.
    """

    def __init__(self, quantum: float, weights: Mapping[str, float]) -> None:
        self._quantum = quantum
        self._weights = weights
        self._classes: dict[str, FairClass] = {}
        self._turns: deque[FairClass] = deque()

    def push(self, entry: SeqWait) -> None:
        name = main_class(entry.fair_class)
        fair = self._classes.get(name)
        if fair is None:
            fair = self._classes[name] = FairClass(name)
            self._turns.append(fair)
            if len(self._turns) == 1:
                self._credit(fair)
        fair.push(entry)

    def head(self, entries: Mapping[str, SeqWait]) -> str | None:
        """The next request, or None; rotates the turn to its class."""
        passed = 0
        while self._turns:
            fair = self._turns[0]
            first = fair.first(entries)
            if first is None:
                self._turns.popleft()
                del self._classes[fair.name]
                self._credit_front()
                passed = 0
            elif fair.deficit >= entries[first].cost or len(self._turns) == 1:
                return first
            elif passed == len(self._turns):
                self._skip_rounds(entries)
                passed = 0
            else:
                passed += 1
                self._turns.rotate(-1)
                self._credit_front()
        return None

    def head_outside(self, entries: Mapping[str, SeqWait], blocked: Collection[str]) -> str | None:
        """The next request outside the `blocked` lanes; does not move the turn."""
        best: str | None = None
        soonest = math.inf
        for position, fair in enumerate(self._turns):
            first = fair.first_outside(entries, blocked)
            if first is None:
                continue
            missing = max(entries[first].cost - fair.deficit, 0.0)
            turns = math.ceil(missing / self._share(fair))
            rounds = (
                turns if position == 0 else max(turns - 1, 0)
            )  # others are credited before theirs
            if rounds < soonest:
                best, soonest = first, float(rounds)
        return best

    def _skip_rounds(self, entries: Mapping[str, SeqWait]) -> None:
        """Credit at once all rounds in which no class could place a request."""
        needed = []
        for fair in self._turns:
            first = fair.first(entries)
            if first is None:
                return
            missing = entries[first].cost - fair.deficit
            needed.append(math.ceil(missing / self._share(fair)))
        for fair in self._turns:
            fair.deficit += max(min(needed) - 1, 0) * self._share(fair)

    def charge(self, entry: SeqWait) -> None:
        """Charge a placed request of this tier."""
        fair = self._classes.get(main_class(entry.fair_class))
        if fair is not None:
            fair.charge(entry)

    def _credit_front(self) -> None:
        if self._turns:
            self._credit(self._turns[0])

    def _credit(self, fair: FairClass) -> None:
        fair.deficit += self._share(fair)

    def _share(self, fair: FairClass) -> float:
        return self._quantum * self._weights.get(fair.name, 1.0)


class FairOrder:
    """The waiting requests of all replicas."""

    def __init__(self, quantum: float, weights: Mapping[str, float], starvation: float) -> None:
        self._quantum = quantum
        self._weights = weights
        self._starvation = starvation
        self._tiers: dict[int, PriorityTier] = {}
        self._ages: dict[str, list[tuple[float, str]]] = {}
        self._sizes: dict[str, int] = {}
        self.entries: dict[str, SeqWait] = {}

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def lanes(self) -> Collection[str]:
        """Lanes with waiting requests."""
        return self._sizes.keys()

    def size(self, batch: bool) -> int:
        """Number of waiting batch requests, or of the others."""
        sizes = self._sizes.items()
        return sum(n for lane, n in sizes if lane.startswith(BATCH) is batch)

    def push(self, entry: SeqWait) -> None:
        """Add or replace an entry."""
        known = self.entries.get(entry.request)
        if known == entry:
            return
        if known is not None and (known.tier, known.lane) != (entry.tier, entry.lane):
            self.remove(entry.request, placed=False)
            known = None
        self.entries[entry.request] = entry
        tier = self._tiers.get(entry.tier)
        if tier is None:
            tier = self._tiers[entry.tier] = PriorityTier(self._quantum, self._weights)
        tier.push(entry)
        tier.head(self.entries)  # now, so that the order depends on the events alone
        if known is None:
            self._sizes[entry.lane] = self._sizes.get(entry.lane, 0) + 1
            heapq.heappush(self._ages.setdefault(entry.lane, []), (entry.arrived, entry.request))

    def remove(self, request: str, placed: bool) -> SeqWait | None:
        """Remove an entry; a placed one is charged to its class."""
        entry = self.entries.pop(request, None)
        if entry is None:
            return None
        self._sizes[entry.lane] -= 1
        if not self._sizes[entry.lane]:
            del self._sizes[entry.lane], self._ages[entry.lane]
        if placed:
            self._tiers[entry.tier].charge(entry)
        self._settle(entry.tier)
        return entry

    def _settle(self, number: int) -> None:
        if self._tiers[number].head(self.entries) is None:
            del self._tiers[number]

    def head(self, time: float, blocked: Collection[str] = ()) -> SeqWait | None:
        """The next entry at `time` (Unix seconds) outside the `blocked` lanes."""
        oldest = self._oldest(blocked)
        if oldest is not None and time - oldest[0] > self._starvation:
            return self.entries[oldest[1]]
        for number in sorted(self._tiers, reverse=True):
            tier = self._tiers[number]
            request = (
                tier.head_outside(self.entries, blocked) if blocked else tier.head(self.entries)
            )
            if request is not None:
                return self.entries[request]
        return None

    def _is_in(self, request: str, lane: str) -> bool:
        entry = self.entries.get(request)
        return entry is not None and entry.lane == lane

    def _oldest(self, blocked: Collection[str]) -> tuple[float, str] | None:
        oldest: tuple[float, str] | None = None
        for lane, ages in self._ages.items():
            if lane in blocked or lane.startswith(BATCH):
                continue
            while not self._is_in(ages[0][1], lane):  # each lane has a current entry
                heapq.heappop(ages)
            if oldest is None or ages[0] < oldest:
                oldest = ages[0]
        return oldest
