"""Orders of eviction of the field, over the engines' own block manager.

Each values a run of blocks by the sessions whose prompts contain it. They are told what kvmesh's
engines are: the sessions, their ends, and what each waits for.
"""

import heapq
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from kvmesh.bus.messages import Decision, Outcome, RouteEvent
from kvmesh.retention.claims import UNCLAIMED, EvictionRank
from kvmesh.retention.eviction_pool import EvictionPool
from kvmesh.returns.rates import AGE_ENDS, BINS, age_bin
from kvmesh.returns.value import values_by_age
from kvmesh.simulator.fleet import MODEL
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.prompts import SimulatedPrompts
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.radix_tree import BlockRun

CYCLES = 5
SAMPLES = 256
FEW = 10
NEVER = -inf


@dataclass(slots=True)
class Idle:
    """A session between two rounds, since `since`; `tokens` are those of its context.

    `returns_at` is the time of its next round, which only Bélády's order reads. `waits_for` is
    None while the session runs, and `gone` true once it has ended.
    """

    since: float = 0.0
    waits_for: tuple[str, ...] | None = None
    tokens: int = 0
    returns_at: float = inf
    engine: str = ""
    gone: bool = False
    arrived: float = 0.0
    cycles: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=CYCLES))
    pinned_until: float = 0.0
    exposed_s: float = 0.0


class Order:
    """The order of eviction: `value` of a session, lowest first, ranked anew each `every_s`."""

    every_s = 1.0

    def __init__(self) -> None:
        self.sessions: defaultdict[int, Idle] = defaultdict(Idle)
        self._users: dict[BlockRun, set[int]] = {}
        self._engines: dict[BlockRun, str] = {}

    def value(self, session: Idle, now: float) -> float:
        """The value of holding the blocks of a session that does not run."""
        raise NotImplementedError

    def rank(self, now: float) -> None:
        """Called before all runs are ranked anew."""

    def begin(self, session: int, now: float) -> None:
        """A round of the session arrives."""
        known = self.sessions[session]
        if known.waits_for is not None:
            self._returned(known, now)
        known.arrived = now
        known.waits_for = None

    def end(
        self, session: int, now: float, waits_for: Sequence[str], tokens: int, returns_at: float
    ) -> None:
        """A round has ended; the session's next one comes at `returns_at`, or never (inf)."""
        known = self.sessions[session]
        known.since, known.waits_for, known.tokens = now, tuple(waits_for), tokens
        known.returns_at, known.exposed_s = returns_at, 0.0
        self._waits(known, now)

    def finish(self, session: int) -> None:
        """The session has ended for good."""
        self.sessions[session].gone = True

    def use(self, session: int, runs: Sequence[BlockRun], engine: str = "") -> None:
        """The session's prompt contains these runs, which the engine of its last round holds."""
        self.sessions[session].engine = engine
        for run in runs:
            self._users.setdefault(run, set()).add(session)
            self._engines[run] = engine

    def left(self, run: BlockRun) -> None:
        """A run leaves: whoever used it used the one before it."""
        if run.parent is not None and run in self._users:
            self._users.setdefault(run.parent, set()).update(self._users[run])
            self._engines[run.parent] = self._engines[run]

    def worth(self, run: BlockRun, now: float) -> float:
        """The value of the session that gives a run its highest one.

        A session that has moved to another engine gives none to the copy that it left behind.
        """
        engine = self._engines.get(run)
        users = [u for u in self._users.get(run, ()) if self.sessions[u].engine == engine]
        return max((self._value_of(user, now) for user in users), default=NEVER)

    def _value_of(self, session: int, now: float) -> float:
        known = self.sessions[session]
        if known.gone:
            return NEVER
        return inf if known.waits_for is None else self.value(known, now)

    def _returned(self, session: Idle, now: float) -> None:
        """A session that has waited returns."""

    def _waits(self, session: Idle, now: float) -> None:
        """A session begins to wait."""


class Recency(Order):
    """Plain LRU."""

    def worth(self, run: BlockRun, now: float) -> float:
        return 0.0


class Belady(Order):
    """The session that returns last goes first; all waits are known."""

    def value(self, session: Idle, now: float) -> float:
        return NEVER if session.returns_at == inf else -max(session.returns_at - now, 0.0)


class Idleness(Order):
    """MORI (arXiv 2606.00866): idlest first, ranked every 5 s.

    Idleness is the share of wall time that a session waited in its last five cycles, the present
    one included.
    """

    every_s = 5.0

    def value(self, session: Idle, now: float) -> float:
        waited = now - session.since + sum(waited for waited, _ in session.cycles)
        whole = now - session.arrived + sum(whole for _, whole in session.cycles)
        return -waited / max(whole, 1e-9)

    def _returned(self, session: Idle, now: float) -> None:
        session.cycles.append((now - session.since, now - session.arrived))


class ToolTimes(Order):
    """Continuum (arXiv 2511.02230): a time to live for each tool call, else LRU.

    Of the gaps seen for the tool, it takes the time τ that maximises what a return within τ saves,
    the seconds to compute the context again and to queue for memory, less the share of the engine's
    memory that the context occupies until then.
    """

    def __init__(self, prefill_s: Callable[[int], float], memory: int) -> None:
        super().__init__()
        self._prefill_s = prefill_s
        self._memory = memory
        self._gaps: defaultdict[tuple[str, ...], deque[float]] = defaultdict(
            lambda: deque(maxlen=SAMPLES)
        )
        self.queue_s = 0.0

    def value(self, session: Idle, now: float) -> float:
        pinned = session.pinned_until > now
        return 1e9 + session.pinned_until if pinned else session.since

    def waited(self, queue_s: float) -> None:
        """A request waited so long for its placement."""
        self.queue_s += 0.05 * (queue_s - self.queue_s)

    def _returned(self, session: Idle, now: float) -> None:
        for known in ((), _tool(session)):
            self._gaps[known].append(now - session.since)

    def _waits(self, session: Idle, now: float) -> None:
        if session.waits_for and session.waits_for[0] != "human":
            session.pinned_until = now + self._time_to_live(session)

    def _time_to_live(self, session: Idle) -> float:
        own = self._gaps[_tool(session)]
        gaps = sorted(own if len(own) >= FEW else self._gaps[()])
        saved = self._prefill_s(session.tokens) + self.queue_s
        share = session.tokens / self._memory
        best, best_s, below = 0.0, 0.0, 0.0
        for number, gap in enumerate(gaps, 1):
            below += gap
            held = (below + gap * (len(gaps) - number)) / len(gaps)
            gain = saved * number / len(gaps) - held * share
            if gain > best:
                best, best_s = gain, gap
        return best_s


class CostRule(Order):
    """By expected cost, as Layby's rule: what a return saves against the time until it comes.

    For the wait's class it learns how many sessions return at which age, those that still wait
    included. The value is the highest, over all times to hold the context, of the expected seconds
    saved per block and second held.
    """

    def __init__(self, prefill_s: Callable[[int], float]) -> None:
        super().__init__()
        self._prefill_s = prefill_s
        self._returns: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * BINS)
        self._exposed: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * BINS)
        self._rates: dict[tuple[str, ...], list[float]] = {}

    def rank(self, now: float) -> None:
        for session in self.sessions.values():
            if session.waits_for is not None and not session.gone:
                self._expose(session, now)
        self._rates.clear()

    def value(self, session: Idle, now: float) -> float:
        rates = self._rates_of(session.waits_for or ())
        per_token = self._prefill_s(session.tokens) / max(session.tokens, 1)
        return per_token * values_by_age(rates)[age_bin(now - session.since)]

    def _returned(self, session: Idle, now: float) -> None:
        self._expose(session, now)
        for known in _classes(session.waits_for or ()):
            self._returns[known][age_bin(now - session.since)] += 1

    def _expose(self, session: Idle, now: float) -> None:
        """Add the time since the last call to the bins of age."""
        start, end = session.exposed_s, now - session.since
        for bin_ in range(age_bin(start), age_bin(end) + 1):
            low = AGE_ENDS[bin_ - 1] if bin_ else 0.0
            part = min(end, AGE_ENDS[bin_]) - max(start, low)
            for known in _classes(session.waits_for or ()):
                self._exposed[known][bin_] += part
        session.exposed_s = end

    def _rates_of(self, waits_for: tuple[str, ...]) -> list[float]:
        """Returns per second in each bin; those of coarser classes count as three sessions."""
        if waits_for not in self._rates:
            coarse = self._rates_of(waits_for[:-1]) if waits_for else [1e-4] * BINS
            pairs = zip(self._returns[waits_for], self._exposed[waits_for], coarse, strict=True)
            self._rates[waits_for] = [
                (returns + 3.0) / (exposed + 3.0 / rate) for returns, exposed, rate in pairs
            ]
        return self._rates[waits_for]


def _tool(session: Idle) -> tuple[str, ...]:
    return (session.waits_for or ())[:2]


def _classes(waits_for: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [waits_for[:length] for length in range(len(waits_for) + 1)]


class OrderedPool(EvictionPool[BlockRun]):
    """Unused runs in an order of sessions, doubtful ones first; runs of equal worth by recency."""

    def __init__(self, order: Order) -> None:
        super().__init__(_has_children, lambda run, now: UNCLAIMED)
        self._policy = order
        self._numbers = count()
        self._held: dict[BlockRun, int] = {}
        self._ranked: list[tuple[bool, float, int, BlockRun]] = []
        self._fresh: list[BlockRun] = []
        self._ranked_at = -inf

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: BlockRun) -> bool:
        return key in self._held

    def add(self, key: BlockRun, rank: EvictionRank = UNCLAIMED) -> None:
        self._held[key] = next(self._numbers)
        self._fresh.append(key)

    def discard(self, key: BlockRun) -> None:
        if self._held.pop(key, None) is not None:
            self._policy.left(key)

    def eviction_rank(self, key: BlockRun) -> EvictionRank:
        return UNCLAIMED

    def update(self, key: BlockRun, rank: EvictionRank) -> None:
        """Claims have no effect on the order, but doubt has."""
        self._fresh.append(key)

    def unblock(self, key: BlockRun) -> None:
        if key in self._held:
            self._fresh.append(key)

    def next_victim(self, now: float) -> BlockRun:
        run = self.lowest(now)
        if run is None:
            raise IndexError("no unused run without dependents")
        return run

    def lowest(self, now: float) -> BlockRun | None:
        """The run to evict first, None if there is none."""
        if now - self._ranked_at >= self._policy.every_s:
            self._policy.rank(now)
            self._ranked, self._fresh, self._ranked_at = [], list(self._held), now
        for run in self._fresh:
            if run in self._held and not run.children:
                worth = self._policy.worth(run, now)
                heapq.heappush(self._ranked, (not run.doubtful, worth, self._held[run], run))
        self._fresh.clear()
        while self._ranked:
            live, _, number, run = self._ranked[0]
            current = self._held.get(run) == number and live != run.doubtful
            if current and not run.children:
                return run
            heapq.heappop(self._ranked)
        return None


def _has_children(run: BlockRun) -> bool:
    return bool(run.children)


def order_blocks(manager: BlockManager, order: Order) -> None:
    """Let an order decide evictions of a block manager that is empty."""
    manager.retention.evictable = OrderedPool(order)


class OrderedRun:
    """Lets an order decide the evictions of all engines of a simulation that has not started."""

    def __init__(self, simulation: Simulation, order: Order) -> None:
        self._simulation = simulation
        self._order = order
        workload = simulation.workload
        self._prompts = SimulatedPrompts(workload, MODEL, simulation.options.block_size)
        self._following = workload.following()
        self._final = workload.final_rounds()
        self._begun: set[int] = set()
        for worker in simulation.workers.values():
            for manager in worker.core.block_managers:
                order_blocks(manager, order)
        simulation.routers.on_route = self._follow

    def _follow(self, event: RouteEvent, now: float) -> None:
        index = int(event.request.split(".")[0])
        session = self._simulation.workload.rounds[index].session
        if isinstance(event, Decision):
            if index not in self._begun:
                self._begun.add(index)
                self._order.begin(session, now - event.wait_s)
                if isinstance(self._order, ToolTimes):
                    self._order.waited(event.wait_s)
        elif isinstance(event, Outcome):
            self._end(index, session, event, now)

    def _end(self, index: int, session: int, event: Outcome, now: float) -> None:
        simulation = self._simulation
        round_, after = simulation.workload.rounds[index], self._following[index]
        hashes = array("Q", self._prompts.hashes(round_).sequence_hashes)
        for manager in simulation.workers[event.instance].core.block_managers:
            self._order.use(session, manager.match_prefix(hashes).runs, event.instance)
        if index in self._final:
            self._order.finish(session)
        wait = (
            inf
            if after is None
            else simulation.workload.rounds[after].at_s / simulation.options.speed
        )
        tokens = round_.input_tokens + event.output_tokens
        self._order.end(session, now, event.waits_for, tokens, now + wait)
