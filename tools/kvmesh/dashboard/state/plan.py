"""The decisions of planners about one model, as tables and charts show them. Pure."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.bus.messages import FleetCandidate, ScalingDecision
from kvmesh.observer.columns import RowColumn, RowView
from kvmesh.observer.hindsight import Hindsight, hindsight
from kvmesh.observer.plans import leading, sizes

MOST_POINTS = 1000
MOST_CANDIDATES = 50


class DemandPoint(NamedTuple):
    """Requests per second that arrived at a time, and that were forecast for it."""

    time: float
    arrivals: float | None
    forecast: float | None


@dataclass(frozen=True)
class DecisionRow:
    """One decision as a row; `came` says what followed."""

    decision: ScalingDecision
    came: str

    @property
    def time(self) -> float:
        return self.decision.time

    @property
    def reason(self) -> str:
        return self.decision.reason

    @property
    def pools(self) -> str:
        return sizes(self.decision)

    @property
    def arrivals(self) -> float | None:
        return self.decision.signals.get("arrivals_per_s")

    @property
    def forecast(self) -> float | None:
        return self.decision.signals.get("forecast_per_s")

    @property
    def kept(self) -> str:
        return ", ".join(f"{share:.1%} {name}" for name, share in self.decision.kept.items())

    @property
    def planner(self) -> str:
        return self.decision.planner


def clock_text(value: float) -> str:
    """A time of this day, in the dashboard's time zone; of another day with its date."""
    then, today = time.localtime(value), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


DECISIONS = RowView(
    "decisions",
    (
        RowColumn("time", "time", clock_text),
        RowColumn("pools", "workers", number=False),
        RowColumn("reason", "reason", number=False),
        RowColumn("arrivals", "arrivals/s", _rate),
        RowColumn("forecast", "forecast/s", _rate),
        RowColumn("kept", "kept before", number=False),
        RowColumn("came", "came true", number=False),
        RowColumn("planner", "planner", number=False),
    ),
    "time",
    True,
)


class ModelPlan:
    """The decisions about a model from `since` on, of those that `by_model` orders.

    `all` are those of every planner, `leading` those of the planner that leads.
    """

    def __init__(self, decisions: Sequence[ScalingDecision], since: float) -> None:
        self.all = [each for each in decisions if each.time >= since]
        led = leading(decisions)
        came = zip(led, hindsight(led), strict=True)
        self._came = {(each.time, each.planner): then for each, then in came}
        self.leading = [each for each in led if each.time >= since]

    @property
    def changes(self) -> int:
        return sum(each.changed for each in self.leading)

    @property
    def pools(self) -> list[str]:
        """The pools of the decisions, those of the last one first."""
        return list(dict.fromkeys(pool for each in reversed(self.leading) for pool in each.pools))

    @property
    def promises(self) -> list[str]:
        return sorted({promise for each in self.leading for promise in each.kept})

    def hindsight(self, decision: ScalingDecision) -> Hindsight | None:
        """The time after a decision; None for one of a planner that did not lead."""
        return self._came.get((decision.time, decision.planner))

    def rows(self, changed_only: bool) -> list[DecisionRow]:
        """All decisions as rows, or those that changed a pool."""
        return [
            DecisionRow(each, self._came_text(each))
            for each in self.all
            if each.changed or not changed_only
        ]

    def _came_text(self, decision: ScalingDecision) -> str:
        came = self.hindsight(decision)
        if came is None:
            return "another planner led"
        return came.text(decision.signals.get("forecast_per_s", 0.0))


def thinned(decisions: Sequence[ScalingDecision]) -> list[ScalingDecision]:
    """At most MOST_POINTS of the decisions, evenly; the last one is among them."""
    step = -(-len(decisions) // MOST_POINTS) or 1
    return list(decisions[::-1][::step][::-1])


def demand(decisions: Sequence[ScalingDecision]) -> list[DemandPoint]:
    """The arrivals, and each forecast at the time for which it was made: one start-up time later.

    A later decision's forecast replaces earlier ones for the same time or a later one.
    """
    forecasts: list[DemandPoint] = []
    for each in decisions:
        startup = max((pool.startup_s for pool in each.pools.values()), default=0.0)
        due = each.time + startup
        while forecasts and forecasts[-1].time >= due:
            forecasts.pop()
        forecasts.append(DemandPoint(due, None, each.signals.get("forecast_per_s")))
    arrivals = [DemandPoint(d.time, d.signals.get("arrivals_per_s"), None) for d in decisions]
    return sorted(arrivals + forecasts, key=lambda point: point.time)


def candidate_rows(decision: ScalingDecision) -> Iterator[list[str]]:
    """A row for each fleet that was considered, after one with the headings."""
    promises = list(dict.fromkeys(name for each in decision.candidates for name in each.shares))
    yield ["workers", "cost per hour", "busy", *promises, ""]
    wanted = {name: pool.wanted for name, pool in decision.pools.items()}
    for each in decision.candidates[:MOST_CANDIDATES]:
        yield [
            ", ".join(f"{pool} {count}" for pool, count in each.workers.items()),
            f"{each.cost:g}",
            f"{each.busy:.0%}",
            *(_modelled(each, name) for name in promises),
            "chosen" if each.workers == wanted else "",
        ]


def _modelled(candidate: FleetCandidate, promise: str) -> str:
    if promise not in candidate.shares:
        return ""
    seconds = candidate.quantiles.get(promise)
    return f"{candidate.shares[promise]:.1%}" + ("" if seconds is None else f" ({seconds:.2g} s)")


def pool_rows(decision: ScalingDecision) -> Iterator[list[str]]:
    """A row for each pool, after one with the headings."""
    yield [
        "pool", "before", "wanted", "ready", "starting", "waiting", "never ready",
        "start-up",
        "step times", "samples",
    ]  # fmt: skip
    for name, pool in decision.pools.items():
        factor = f" ×{pool.profile_factor:.2f}" if pool.profile_factor != 1 else ""
        yield [
            name, f"{pool.before}", f"{pool.wanted}", f"{pool.ready}", f"{pool.starting}",
            f"{pool.parked}", f"{pool.failed}", f"{pool.startup_s:.0f} s", pool.step_times + factor,
            f"{pool.samples:,}",
        ]  # fmt: skip


def kept_rows(decision: ScalingDecision) -> Iterator[list[str]]:
    """A row for each promise that was measured or cannot be kept, after one with the headings."""
    yield ["promise", "kept by the requests of the last minutes", ""]
    for name in dict.fromkeys([*decision.kept, *decision.unreachable]):
        kept = decision.kept.get(name)
        yield [
            name,
            "" if kept is None else f"{kept:.1%}",
            "no worker can keep it" if name in decision.unreachable else "",
        ]


def signal_rows(decision: ScalingDecision) -> Iterator[list[str]]:
    """A row for each input of the decision, after one with the headings."""
    yield ["signal", "value"]
    for name, value in decision.signals.items():
        yield [name.removesuffix("_per_s").replace("_", " ") + _unit(name), f"{value:,.6g}"]


def _unit(name: str) -> str:
    return " per second" if name.endswith("_per_s") else ""
