"""Idle storage: the blocks that a policy holds unused for the hits of a plain time to live.

The rounds take a nominal time and all meet one cache, as in retention.py. A policy at a price holds
a block only while its order's worth is above the price, and the highest price with the same hits is
taken: its memory may vary, as that of a time to live does.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from agentic_orders import Belady, CostRule, Order, OrderedPool
from agentic_runs import prefill_of
from retention import BLOCK, ENDLESS, Held, Managed, Timed, Use, least, schedule

from kvmesh.simulator.clients.harness import Harness
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Workload

STEPS = 10
CHECK_S = 10.0
TIMES = {"5 min": (300.0, 60.0), "1 h": (3600.0, 25.0)}


class Idle(NamedTuple):
    """A policy's idle blocks, as a percentage of those of a time to live with the same hits."""

    ttl: str
    policy: str
    percent: float
    target: float


class Priced(Managed):
    """A block manager that drops what is worth less than a price, every CHECK_S seconds."""

    def __init__(self, workload: Workload, uses: list[Use], order: Order, price: float) -> None:
        super().__init__(ENDLESS, told=True)
        self._order = order
        self._pool = OrderedPool(order)
        self._price = price
        self._checked = 0.0
        self._harness = Harness(workload)
        self._following = workload.following()
        self._starts = {use.index: use.at for use in uses if use.begins}
        self.blocks.retention.evictable = self._pool

    def on_use(self, use: Use) -> None:
        session, order = use.round.session, self._order
        if use.begins:
            order.begin(session, use.at)
        else:
            after = self._following[use.index]
            returns_at = self._starts[after] if after is not None else float("inf")
            order.use(session, self.blocks.match_prefix(use.blocks).runs)
            waits_for = self._harness.waits_for(use.index)
            order.end(session, use.at, waits_for, len(use.blocks) * BLOCK, returns_at)
            if use.last:
                order.finish(session)
        if use.at - self._checked >= CHECK_S:
            self._checked = use.at
            self._drop(use.at)

    def _drop(self, now: float) -> None:
        while (run := self._pool.lowest(now)) is not None:
            if self._order.worth(run, now) >= self._price:
                return
            self.blocks.retention.evict(len(run), now)


def dearest(
    uses: list[Use], hits: int, priced: Callable[[float], Managed], low: float, high: float
) -> Held:
    """The contents at the highest price between two positive bounds that leaves so many hits."""
    found = priced(low).run(uses)
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        held = priced(middle).run(uses)
        if held.hits >= hits:
            low, found = middle, held
        else:
            high = middle
    return found


def idle_shares(workload: Workload) -> Iterator[Idle]:
    """The idle blocks of each policy for the hits of each time to live."""
    uses = schedule(workload)

    def by_cost(price: float) -> Managed:
        return Priced(workload, uses, CostRule(prefill_of(CoreOptions())), price)

    def known(price: float) -> Managed:
        return Priced(workload, uses, Belady(), -1 / price)

    for name, (seconds, target) in TIMES.items():
        ttl = Timed(uses, seconds).run()
        row = partial(_row, name, ttl, target)
        yield row("the same, told what ended", Timed(uses, seconds, told=True).run())
        yield row("LRU, told what ended", least(uses, ttl.hits, told=True)[1])
        yield row("cost rule at a price", dearest(uses, ttl.hits, by_cost, 1e-12, 1e-3))
        yield row("all waits known", dearest(uses, ttl.hits, known, 1e-6, 1.0))


def _row(ttl: str, timed: Held, target: float, policy: str, held: Held) -> Idle:
    return Idle(ttl, policy, 100 * held.idle / timed.idle, target)
