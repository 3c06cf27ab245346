"""Idle storage: the blocks that a policy holds unused for the hits of a plain time to live.

The rounds take a nominal time and all meet one cache, as in retention.py. A policy at a price holds
a block only while its order's worth is above the price, and the highest price with the same hits is
taken: its memory may vary, as that of a time to live does.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from agentic_orders import Belady, CostRule, Idle, Order, OrderedPool
from agentic_runs import OURS, prefill_of
from retention import BLOCK, ENDLESS, Held, Managed, Timed, Use, fewest, least, schedule

from kvmesh.bus.messages import Candidate, Decision, Hints, Outcome
from kvmesh.returns.forecaster import ReturnForecaster
from kvmesh.simulator.clients.harness import Harness
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Workload

STEPS = 10
ROUTER = "router"
CHECK_S = 10.0
TIMES = {"5 min": (300.0, 60.0), "1 h": (3600.0, 25.0)}


class IdleShare(NamedTuple):
    """A policy's idle blocks, as a percentage of those of a time to live with the same hits."""

    ttl: str
    policy: str
    percent: float
    target: float


class Taught(CostRule):
    """The cost rule with all waits of the workload learned before, and nothing learned meanwhile.

    What it does not know of a wait is which one of its class it is.
    """

    def __init__(self, taught: CostRule) -> None:
        super().__init__(prefill_of(CoreOptions()))
        self._taught = taught

    def _rates_of(self, waits_for: tuple[str, ...]) -> list[float]:
        return self._taught._rates_of(waits_for)

    def rank(self, now: float) -> None:
        """Keep all rates."""

    def _returned(self, session: Idle, now: float) -> None:
        """Learn nothing."""


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


class Forecasting(Managed):
    """The engines' block manager with the forecasts of a router, as in the product."""

    def __init__(self, workload: Workload, uses: list[Use], most: int) -> None:
        super().__init__(most, told=True)
        self._harness = Harness(workload)
        self._forecaster = ReturnForecaster(ROUTER)
        self._forecaster.set_capacity(max(most, max(len(use.blocks) for use in uses)))

    def on_use(self, use: Use) -> None:
        forecaster, request, session = self._forecaster, str(use.index), str(use.round.session)
        if use.begins:
            forecaster.on_placed(_decision(use, request, session), use.at)
            return
        if not use.last:  # then its blocks were released
            self.blocks.retention.end_request(request, session, use.blocks, use.at)
        outcome = Outcome(
            request=request,
            instance=ROUTER,
            time=use.at,
            cached_tokens=0,
            output_tokens=use.round.output_tokens,
            ttft_s=0.0,
            total_s=0.0,
            finish="stop",
            agent=self._harness.agent(use.index),
            waits_for=self._harness.waits_for(use.index),
        )
        forecaster.on_finished(outcome, use.at)
        forecasts = [forecast for _, forecast in forecaster.take_forecasts(use.at)]
        self.blocks.retention.expect_returns(forecasts, use.at)


def _decision(use: Use, request: str, session: str) -> Decision:
    chosen = Candidate(
        instance=ROUTER, worker="w", rank=0, overlap=[], prefill=0, decode=0, requests=0, cost=0
    )
    return Decision(
        request=request,
        model="m",
        time=use.at,
        router=ROUTER,
        policy="kv",
        chosen=chosen,
        candidates=[],
        tokens=use.round.input_tokens,
        sequence_hashes=use.blocks[: use.prompt].tobytes(),
        max_tokens=use.round.output_tokens,
        block_size=BLOCK,
        hints=Hints(session=session),
    )


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


def idle_shares(workload: Workload) -> Iterator[IdleShare]:
    """The idle blocks of each policy for the hits of each time to live."""
    uses = schedule(workload)

    def by_cost(price: float) -> Managed:
        return Priced(workload, uses, CostRule(prefill_of(CoreOptions())), price)

    teacher = CostRule(prefill_of(CoreOptions()))
    Priced(workload, uses, teacher, 0.0).run(uses)
    teacher.rank(uses[-1].at)

    def by_taught_cost(price: float) -> Managed:
        return Priced(workload, uses, Taught(teacher), price)

    def known(price: float) -> Managed:
        return Priced(workload, uses, Belady(), -1 / price)

    for name, (seconds, target) in TIMES.items():
        ttl = Timed(uses, seconds).run()
        row = partial(_row, name, ttl, target)
        yield row("the same, told what ended", Timed(uses, seconds, told=True).run())
        yield row("LRU, told what ended", least(uses, ttl.hits, told=True)[1])
        forecast = fewest(uses, ttl.hits, partial(Forecasting, workload, uses))
        yield row(OURS.name, forecast[1])
        yield row("cost rule at a price", dearest(uses, ttl.hits, by_cost, 1e-12, 1e-3))
        taught = dearest(uses, ttl.hits, by_taught_cost, 1e-12, 1e-3)
        yield row("cost rule at a price, all kinds of waits known", taught)
        yield row("all waits known", dearest(uses, ttl.hits, known, 1e-6, 1.0))


def _row(ttl: str, timed: Held, target: float, policy: str, held: Held) -> IdleShare:
    return IdleShare(ttl, policy, 100 * held.idle / timed.idle, target)
