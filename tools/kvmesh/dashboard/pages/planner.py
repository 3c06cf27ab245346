"""The planner: load against forecast, workers of each pool, kept promises, and all decisions."""

import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlencode

from nicegui import ui

from kvmesh.bus.messages import Role, ScalingDecision
from kvmesh.dashboard.elements import charts
from kvmesh.dashboard.elements.figure_row import FigureRow
from kvmesh.dashboard.elements.shell import REFRESH_S, every, heading
from kvmesh.dashboard.elements.table import PagedTable
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.plan import (
    DECISIONS,
    DecisionRow,
    ModelPlan,
    clock_text,
    demand,
    thinned,
)
from kvmesh.observer.plans import by_model, leading, promised_share, worker_hours
from kvmesh.runtime.quantities import duration

SPANS = {900: "the last 15 minutes", 3600: "the last hour", 21600: "the last 6 hours"}
DECISION = "/decision"
Draw = Callable[[Sequence[ScalingDecision]], None]


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page; the query may name the `model`."""
    page = PlannerPage(mesh, query.get("model", ""))
    every(REFRESH_S, page.refresh)


class PlannerPage:
    """The elements of the page, and the decisions that they show."""

    def __init__(self, mesh: Mesh, model: str) -> None:
        self._mesh = mesh
        self._model = model
        self._plan = ModelPlan([], 0.0)
        self._latest_decision: ScalingDecision | None = None
        self._shown: tuple[ScalingDecision | None, int, str, float, int] | None = None
        self._drawn: list[Draw] = []
        self._parts: tuple[list[str], list[str]] = ([], [])
        self._silent = ui.label().props('role="status"')
        with ui.row().classes("items-center") as self._controls:
            self._models = ui.select([], label="Model", on_change=self._choose).props("dense")
            self._models.style("min-width: 12rem")
            self._span = ui.select(SPANS, label="Time", value=3600, on_change=self.refresh)
            self._span.props("dense").style("min-width: 12rem")
        with ui.element("div").style("width: 100%") as self._content:
            with ui.row().classes("items-center").style("margin: .6rem 0"):
                self._reason = ui.label()
                self._latest = ui.link("Details of the latest decision", DECISION)
            self._unreachable = ui.label().classes("warn")
            self._figures = FigureRow(
                "ready", "wanted", "arrivals/s", "forecast/s", "requests waiting",
                "worker-hours ready", "changes", "last decision",
            )  # fmt: skip
            self._charts = ui.element("div").classes("charts")
            heading("Decisions")
            self._table = PagedTable(DECISIONS, self._rows, "decisions", self._href)
            every_one = "Also decisions that change no pool"
            self._every = ui.checkbox(every_one, on_change=lambda: self._table.refresh())
            self._every.props(f'aria-label="{every_one}"')
            self._table.show()

    def refresh(self) -> None:
        """Show the decisions of now, if there are others than before."""
        decisions = self._mesh.decisions
        last = decisions[-1] if decisions else None
        self._say(last is not None)
        minute = int(time.time() / 60)  # the beginning of the time that is shown moves
        shown = (last, len(decisions), self._model, self._span.value, minute)
        if last is not None and shown != self._shown:
            self._shown = shown
            self._show()
        if self._latest_decision is not None:
            self._set_figures(self._latest_decision)

    def _say(self, decided: bool) -> None:
        """Say who decides, or how to run a planner."""
        self._controls.set_visibility(decided)
        self._content.set_visibility(decided)
        cards = self._mesh.cards.values()
        names = sorted(card.name for card in cards if card.role == Role.PLANNER)
        if names:
            running = f"Running: {', '.join(names)}."
            self._silent.text = running if decided else f"{running} No decision so far."
        else:
            past = " The decisions below are past ones." if decided else ""
            self._silent.text = (
                "No planner runs in this mesh: the number of workers is fixed. Run one with “kvmesh"
                f" up --planner”; where each service is started alone, with “kvmesh planner”.{past}"
            )

    def _show(self) -> None:
        found = by_model(self._mesh.decisions)
        if self._model not in found:
            self._model = max(found, key=lambda model: found[model][-1].time)
        self._models.set_options(list(found), value=self._model)
        self._models.set_visibility(len(found) > 1)
        self._plan = ModelPlan(found[self._model], time.time() - self._span.value)
        parts = (self._plan.pools, self._plan.promises)
        if parts != self._parts or not self._drawn:
            self._parts = parts
            self._charts.clear()
            with self._charts:
                self._drawn = [_demand_chart(), *map(_pool_chart, parts[0])]
                if parts[1]:
                    self._drawn.append(_kept_chart(parts[1]))
        decisions = thinned(self._plan.leading)
        for draw in self._drawn:
            draw(decisions)
        self._latest_decision = leading(found[self._model])[-1]
        self._set_latest(self._latest_decision)
        self._table.refresh()

    def _set_figures(self, last: ScalingDecision) -> None:
        pools = last.pools.values()
        self._figures.set(
            f"{sum(pool.ready for pool in pools):,}",
            f"{sum(pool.wanted for pool in pools):,}",
            f"{last.signals.get('arrivals_per_s', 0.0):,.2f}",
            f"{last.signals.get('forecast_per_s', 0.0):,.2f}",
            f"{last.signals.get('waiting_requests', 0.0):,.0f}",
            f"{worker_hours(self._plan.leading):,.2f}",
            f"{self._plan.changes:,}",
            f"{duration(max(0.0, time.time() - last.time))} ago",
        )

    def _set_latest(self, last: ScalingDecision) -> None:
        self._reason.text = f"{clock_text(last.time)}, {last.planner}: {last.reason}."
        self._latest.props(f'href="{decision_path(last)}"')
        names = ", ".join(last.unreachable)
        self._unreachable.text = f"No worker can keep {names}." if names else ""

    def _choose(self) -> None:
        if self._models.value and self._models.value != self._model:
            self._model = self._models.value
            self.refresh()

    def _rows(self) -> list[DecisionRow]:
        return self._plan.rows(changed_only=not self._every.value)

    def _href(self, row: DecisionRow) -> str:
        return decision_path(row.decision)


def decision_path(decision: ScalingDecision) -> str:
    """The address of the page about one decision."""
    named = {"model": decision.model, "time": repr(decision.time), "planner": decision.planner}
    return f"{DECISION}?{urlencode(named)}"


def _demand_chart() -> Draw:
    chart = charts.lines("Requests per second", ("arrivals", "forecast"))
    for series in chart.options["series"]:
        series["connectNulls"] = True

    def draw(decisions: Sequence[ScalingDecision]) -> None:
        charts.draw(chart, demand(decisions), lambda p: p.arrivals, lambda p: p.forecast)

    return draw


def _pool_chart(pool: str) -> Draw:
    chart = charts.lines(f"Workers of pool {pool}", ("ready", "starting", "wanted"))
    chart.options["yAxis"]["minInterval"] = 1
    for series in chart.options["series"]:
        series["step"] = "end"

    def draw(decisions: Sequence[ScalingDecision]) -> None:
        charts.draw(
            chart,
            [each for each in decisions if pool in each.pools],
            lambda d: d.pools[pool].ready,
            lambda d: d.pools[pool].starting,
            lambda d: d.pools[pool].wanted,
        )

    return draw


def _kept_chart(promises: Sequence[str]) -> Draw:
    chart = charts.lines("Requests that kept each promise", promises, share=True)
    for series, promise in zip(chart.options["series"], promises, strict=True):
        if (share := promised_share(promise)) is not None:
            series["markLine"] = {
                "symbol": "none",
                "silent": True,
                "lineStyle": {"type": "dashed"},
                "label": {
                    "position": "insideStartTop",
                    "formatter": f"promised {100 * share:g} %",
                    "color": charts.TEXT,
                },
                "data": [{"yAxis": 100 * share}],
            }

    def draw(decisions: Sequence[ScalingDecision]) -> None:
        charts.draw(chart, decisions, *(_percent(promise) for promise in promises))

    return draw


def _percent(promise: str) -> Callable[[ScalingDecision], float | None]:
    return lambda d: 100 * d.kept[promise] if promise in d.kept else None
