"""Hits of one pooled cache that evicts by recency, S3-FIFO, forecasts of return, or clairvoyance.

The forecaster of the routers sees each request of a workload at its time and learns as it goes; the
cache evicts the block whose forecasts have the least value. `MIN` evicts the block that is next
used last, which no policy can beat by much. "Told which return" knows which blocks are used again,
but not when, and orders by recency after that. No block outlives those before it, under any order.
Rounds take a nominal time, so that every order meets the same requests at the same instants.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from common import Report, parser

from kvmesh.bus.messages import Candidate, Decision, Hints, Outcome
from kvmesh.hashing import sequence_hashes
from kvmesh.returns.classes import ClassKey
from kvmesh.returns.forecaster import ReturnForecaster
from kvmesh.returns.rates import age_bin, unpack_rates
from kvmesh.returns.value import values_by_age
from kvmesh.workload.formats.registry import load
from kvmesh.workload.generate.agents import REQUEST_S, TOKEN_S, AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Workload

BLOCK = 512
SIZES = {"1M": 1 << 20, "4M": 4 << 20, "8M": 8 << 20}
NEVER_S = 1e9
FORECASTS = 4  # of a block, the latest, whose values count


@dataclass(frozen=True)
class Use:
    """A request at `at` seconds, which takes no time; `blocks` are those of its prompt."""

    at: float
    index: int
    blocks: list[int]
    packed: bytes
    tokens: int
    output: int
    waits_for: list[str]


class Order:
    """Eviction order of a cache: the block with the lowest `value` of the candidates goes first."""

    def begin(self, use: Use) -> None:
        """A request starts; called before `value`."""

    def end(self, use: Use) -> None:
        """A request has ended."""

    def hold(self, use: Use) -> None:
        """The blocks of a request that starts are held."""

    def drop(self, block: int) -> None:
        """A block was evicted."""

    def value(self, block: int, now: float) -> tuple[float, float]:
        raise NotImplementedError

    def victims(self, leaves: Iterable[int], now: float) -> "Victims":
        return Victims(self, leaves, now)


class Victims:
    """Candidates in their order at one instant; more may join."""

    def __init__(self, order: Order, leaves: Iterable[int], now: float) -> None:
        self._order = order
        self._now = now
        self._heap = [(order.value(block, now), block) for block in leaves]
        heapq.heapify(self._heap)

    def add(self, block: int) -> None:
        heapq.heappush(self._heap, (self._order.value(block, self._now), block))

    def pop(self) -> int | None:
        return heapq.heappop(self._heap)[1] if self._heap else None


class Lru(Order):
    def __init__(self) -> None:
        self._used: dict[int, tuple[float, float]] = {}

    def hold(self, use: Use) -> None:
        self._used.update((block, (use.at, -i)) for i, block in enumerate(use.blocks))

    def value(self, block: int, now: float) -> tuple[float, float]:
        return self._used[block]


class Clairvoyant(Order):
    """Bélády's MIN: knows each block's next use."""

    def __init__(self, uses: list[Use]) -> None:
        self._next: dict[int, list[int]] = {}
        for position in range(len(uses) - 1, -1, -1):
            for block in uses[position].blocks:
                self._next.setdefault(block, []).append(position)

    def begin(self, use: Use) -> None:
        for block in use.blocks:
            self._next[block].pop()

    def value(self, block: int, now: float) -> tuple[float, float]:
        later = self._next[block]
        return -later[-1] if later else -inf, 0.0


class Returning(Clairvoyant):
    """Knows which blocks are used again, and not when: the others go first, each by recency."""

    def __init__(self, uses: list[Use]) -> None:
        super().__init__(uses)
        self._used: dict[int, tuple[float, float]] = {}

    def hold(self, use: Use) -> None:
        self._used.update((block, (use.at, -i)) for i, block in enumerate(use.blocks))

    def value(self, block: int, now: float) -> tuple[float, float]:
        at, place = self._used[block]
        return (at if self._next[block] else at - NEVER_S), place


class S3Fifo(Order):
    """S3-FIFO (SOSP'23): a small queue of a tenth, a main queue, a ghost queue; here of leaves."""

    def __init__(self, capacity: int) -> None:
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._capacity = capacity

    def hold(self, use: Use) -> None:
        for block in reversed(use.blocks):
            if block in self._uses:
                self._uses[block] = min(self._uses[block] + 1, 3)
                continue
            self._uses[block] = 0
            known = block in self._ghost
            self._ghost.pop(block, None)
            (self._main if known else self._small)[block] = None

    def drop(self, block: int) -> None:
        del self._uses[block]
        self._small.pop(block, None)
        self._main.pop(block, None)

    def victims(self, leaves: Iterable[int], now: float) -> Victims:
        return _FifoVictims(self, leaves, now)

    def value(self, block: int, now: float) -> tuple[float, float]:
        return 0.0, 0.0

    def choose(self, leaves: set[int]) -> int | None:
        first = self._from_small if len(self._small) > self._capacity // 10 else self._from_main
        for scan in (first, self._from_small, self._from_main):
            found = scan(leaves)
            if found is not None:
                return found
        return None

    def _from_small(self, leaves: set[int]) -> int | None:
        while (block := next(filter(leaves.__contains__, self._small), None)) is not None:
            if self._uses[block] <= 1:
                self._ghost[block] = None
                if len(self._ghost) > self._capacity:
                    self._ghost.popitem(last=False)
                return block
            del self._small[block]
            self._main[block] = None
            self._uses[block] = 0
        return None

    def _from_main(self, leaves: set[int]) -> int | None:
        while (block := next(filter(leaves.__contains__, self._main), None)) is not None:
            if not self._uses[block]:
                return block
            self._uses[block] -= 1
            self._main.move_to_end(block)
        return None


class _FifoVictims(Victims):
    def __init__(self, order: S3Fifo, leaves: Iterable[int], now: float) -> None:
        self._fifo = order
        self._leaves = set(leaves)

    def add(self, block: int) -> None:
        self._leaves.add(block)

    def pop(self) -> int | None:
        found = self._fifo.choose(self._leaves)
        if found is not None:
            self._leaves.discard(found)
        return found


@dataclass(slots=True, eq=False)
class Expected:
    """The forecast of one prompt; None if none was sent."""

    values: tuple[float, ...] | None = None
    since: float = 0.0
    over: bool = False


class Forecast(Order):
    """The routers' forecaster, and the engines' order by the sum of its forecasts' values."""

    def __init__(self, capacity: int) -> None:
        self.forecaster = ReturnForecaster("router")
        self.forecaster.set_capacity(capacity)
        self._expected: dict[int, list[Expected]] = {}
        self._by_request: dict[str, Expected] = {}
        self._by_end: dict[int, Expected] = {}
        self._used: dict[int, float] = {}
        self._typical: tuple[float, ...] = ()

    def begin(self, use: Use) -> None:
        self.forecaster.on_placed(_decision(use), use.at)

    def hold(self, use: Use) -> None:
        now, end = use.at, use.blocks[-1]
        for block in reversed(use.blocks):
            continued = self._by_end.get(block)
            if continued is not None:
                continued.over = True
                break
        mine = self._by_request[str(use.index)] = self._by_end[end] = Expected()
        for block in use.blocks:
            self._used[block] = now
            known = [each for each in self._expected.get(block, []) if not each.over]
            self._expected[block] = [*known[1 - FORECASTS :], mine]

    def end(self, use: Use) -> None:
        self.forecaster.on_finished(_outcome(use), use.at)
        for _, forecast in self.forecaster.take_forecasts(use.at):
            expected = self._by_request.pop(forecast.request, None)
            if expected is not None:
                expected.values = values_by_age(unpack_rates(forecast.rates))
                expected.since = forecast.since
        if use.index % 16 == 0:
            tables = self.forecaster.curves.tables([ClassKey()])
            values = list(values_by_age(self.forecaster.curves.rates(tables)))
            for at in range(len(values) - 2, -1, -1):
                values[at] = max(values[at], values[at + 1])
            self._typical = tuple(values)

    def value(self, block: int, now: float) -> tuple[float, float]:
        total, known = 0.0, False
        for each in self._expected[block]:
            if not each.over and each.values is not None:
                total += each.values[age_bin(now - each.since)]
                known = True
        used = self._used[block]
        if not known and self._typical:
            total = self._typical[age_bin(now - used)]
        return total, used


def run(uses: list[Use], capacity: int, order: Order) -> float:
    """The share of the prompts' blocks that the cache held when their request started."""
    children: dict[int, int] = {}
    parents: dict[int, int | None] = {}
    leaves: set[int] = set()
    hits = wanted = 0
    for use in uses:
        order.begin(use)
        blocks = use.blocks
        held = next((i for i, block in enumerate(blocks) if block not in children), len(blocks))
        hits, wanted = hits + held, wanted + len(blocks)
        order.hold(use)
        needed = set(blocks)
        excess = len(children) + len(blocks) - held - capacity
        victims = order.victims(leaves - needed, use.at) if excess > 0 else None
        while victims is not None and excess > 0:
            block = victims.pop()
            if block is None:
                break
            leaves.discard(block)
            del children[block]
            order.drop(block)
            excess -= 1
            parent = parents.pop(block)
            if parent is not None:
                children[parent] -= 1
                if not children[parent]:
                    leaves.add(parent)
                    if parent not in needed:
                        victims.add(parent)
        parent = blocks[held - 1] if held else None
        for block in blocks[held:]:
            if len(children) >= capacity:
                order.drop(block)
                continue
            children[block], parents[block] = 0, parent
            leaves.add(block)
            if parent is not None:
                children[parent] += 1
                leaves.discard(parent)
            parent = block
        order.end(use)
    return hits / wanted


def schedule(workload: Workload) -> list[Use]:
    """Every request in order of time."""
    ends: list[float] = []
    uses: list[Use] = []
    waits: dict[int, str] = {}
    for round_ in workload.rounds:
        for before in round_.after:
            waits[before] = round_.wait
    for index, round_ in enumerate(workload.rounds):
        start = max((ends[before] for before in round_.after), default=0.0) + round_.at_s
        ends.append(start + REQUEST_S + TOKEN_S * round_.output_tokens)
        content = workload.tree.blocks(round_.branch, round_.input_tokens, BLOCK).tobytes()
        packed = sequence_hashes(content, 0)
        blocks = np.frombuffer(packed, "<u8").tolist()
        if not blocks:
            continue
        wait = waits.get(index, "")
        uses.append(
            Use(
                at=start,
                index=index,
                blocks=blocks,
                packed=packed,
                tokens=round_.input_tokens,
                output=round_.output_tokens,
                waits_for=[wait] if wait in ("", "human") else ["tool", wait],
            )
        )
    return sorted(uses, key=lambda use: (use.at, use.index))


def _decision(use: Use) -> Decision:
    chosen = Candidate(
        instance="worker",
        worker="worker",
        rank=0,
        overlap=[],
        prefill=0,
        decode=0,
        requests=0,
        cost=0,
    )
    return Decision(
        request=str(use.index),
        model="m",
        time=use.at,
        router="router",
        policy="kv",
        chosen=chosen,
        candidates=[],
        tokens=use.tokens,
        sequence_hashes=use.packed,
        max_tokens=use.output,
        block_size=BLOCK,
        hints=Hints(),
    )


def _outcome(use: Use) -> Outcome:
    return Outcome(
        request=str(use.index),
        instance="worker",
        time=use.at,
        cached_tokens=0,
        output_tokens=use.output,
        ttft_s=None,
        total_s=0.0,
        finish="stop",
        waits_for=[name for name in use.waits_for if name],
    )


def workloads(
    given: Path | None, rounds: int | None, profiles: list[str]
) -> Iterator[tuple[str, Workload]]:
    if given is not None:
        yield given.stem, load(str(given))[0].first(rounds)
    for name in profiles:
        profile = load_profile(name)
        yield name, AgentGenerator(profile, 0).workload(min(profile.sessions, 60)).first(rounds)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="a workload to replay")
    arguments.add_argument("--rounds", type=int, help="only the first rounds of each workload")
    arguments.add_argument("--profiles", default="coding-agents,agent-team")
    arguments.add_argument("--sizes", default=",".join(SIZES))
    given = arguments.parse_args()
    report = Report(f"Hits of one cache of blocks of {BLOCK} tokens", "LRU")
    summary = []
    profiles = [name for name in given.profiles.split(",") if name]
    for name, workload in workloads(given.trace, given.rounds, profiles):
        uses = schedule(workload)
        for size in given.sizes.split(","):
            capacity = SIZES[size] // BLOCK
            forecast = Forecast(capacity)
            lru = 100 * run(uses, capacity, Lru())
            best = 100 * run(uses, capacity, Clairvoyant(uses))
            returning = 100 * run(uses, capacity, Returning(uses))
            fifo = 100 * run(uses, capacity, S3Fifo(capacity))
            ours = 100 * run(uses, capacity, forecast)
            closed = 100 * (ours - lru) / (best - lru) if best > lru else 0.0
            label = f"{name}, {size} tokens"
            report.add(f"{label}: forecasts", ours, "% of blocks", f"{lru:.2f}")
            report.add(f"{label}: S3-FIFO", fifo, "% of blocks", f"{lru:.2f}")
            report.add(f"{label}: told which return", returning, "% of blocks", f"{lru:.2f}")
            report.add(f"{label}: MIN", best, "% of blocks", f"{lru:.2f}")
            report.add(f"{label}: share of the gap closed", closed, "%", "", "≥ 25")
            print(f"{label}: {ours:.2f} %, LRU {lru:.2f} %, MIN {best:.2f} %", flush=True)
            summary.append(f"{label} {closed:.0f} %")
    report.finish(
        "forecasts close, of the gap between LRU and MIN: " + ", ".join(summary), given.json
    )


if __name__ == "__main__":
    main()
