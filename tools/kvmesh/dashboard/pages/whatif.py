"""Past requests under another policy or fleet, beside the present one and the measurements."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from nicegui import ui

from kvmesh.bus.messages import Role
from kvmesh.dashboard.comparisons import MOST_REQUESTS, ComparisonError
from kvmesh.dashboard.elements import charts
from kvmesh.dashboard.elements.plain_table import headed_table
from kvmesh.dashboard.elements.shell import REFRESH_S, every, heading
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.whatif import (
    MOST_BLOCKS,
    MOST_WORKERS,
    Compared,
    WhatIf,
    adoption,
    busiest_first,
    command_lines,
    fidelity,
    figure_rows,
    problem,
    span_text,
)
from kvmesh.router.policies.registry import BUILT_IN, installed
from kvmesh.runtime.quantities import duration

log = logging.getLogger(__name__)
CUSTOM = 0
USUAL = ("round-robin", "kv")  # those that a page compares when it opens
SPANS = {
    300: "the last 5 minutes",
    900: "the last 15 minutes",
    3600: "the last hour",
    CUSTOM: "from … to …",
}
UNCHANGED = "as at present"


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page; the query may name the `model` and the `policy`."""
    page = WhatIfPage(mesh, query)
    every(REFRESH_S, page.refresh)
    ui.context.client.on_delete(page.cancel)


class WhatIfPage:
    """The form, the comparison that runs, and its result."""

    def __init__(self, mesh: Mesh, query: Mapping[str, str]) -> None:
        self._mesh = mesh
        self._task: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._names: list[str] = []
        self._wanted_model = query.get("model", "")
        self._policies = {name: name for name in sorted({*BUILT_IN, *installed()})}
        age = duration(mesh.settings.streams.route_age_s)
        ui.label(
            "Simulates past requests as the mesh is configured now, and as you choose. Nothing in"
            f" the mesh changes. The mesh keeps its requests for {age} (streams.route_age_s); at"
            f" most {MOST_REQUESTS:,} are simulated, for at most"
            f" {mesh.settings.dashboard.whatif_s:g} s (dashboard.whatif_s)."
        ).classes("quiet")
        self._build_form(query.get("policy", ""))
        self._status = ui.label().props('role="status"')
        self._progress = ui.linear_progress(0.0, show_value=False)
        self._progress.props('aria-label="Progress of the simulation"').set_visibility(False)
        self._result = ui.element("div").style("width: 100%")

    def _build_form(self, policy: str) -> None:
        mock = self._mesh.settings.mock
        with ui.row().classes("items-end form"):
            self._model = ui.select([], label="Model")
            self._span = ui.select(SPANS, label="Requests of", value=900, on_change=self._spanned)
            self._from = ui.input(label="From").props("type=datetime-local step=1 stack-label")
            self._to = ui.input(label="To").props("type=datetime-local step=1 stack-label")
            chosen = policy if policy in self._policies else self._other_policy()
            self._policy = ui.select(
                {"": UNCHANGED, **self._policies}, label="Policy", value=chosen
            )
            self._workers = _number("Workers", MOST_WORKERS)
            self._blocks = _number("Blocks per worker", MOST_BLOCKS)
            self._speedup = ui.number(label="Speed of all engines", value=mock.speedup, min=0)
            self._speedup.tooltip(
                "Step times of the mock engine, or of mock.profile, divided by this number: cards"
                " of workers name no speed"
            )
            narrow = (self._from, self._to, self._workers, self._blocks, self._speedup)
            for field in (self._model, self._span, self._policy, *narrow):
                field.props("dense").style(f"min-width: {8 if field in narrow else 11}rem")
            self._button = ui.button("Compare", on_click=self._start, color=None)
            self._button.props("no-caps").classes("act")
            self._cancel = ui.button("Cancel", on_click=self.cancel, color=None)
            self._cancel.props("no-caps outline")
            self._cancel.set_visibility(False)
        self._spanned()

    def _other_policy(self) -> str:
        """The policy of the comparison that a page opens with: the usual one beside the present."""
        present = self._mesh.settings.router.policy
        return next((name for name in USUAL if name != present and name in self._policies), "")

    def refresh(self) -> None:
        """Offer the models of now; the first ones begin a comparison."""
        names = sorted(
            {
                card.model.name
                for card in self._mesh.cards.values()
                if card.role == Role.WORKER and card.model is not None
            }
        )
        if names == self._names:
            return
        first, self._names = not self._names, names
        value = self._model.value or self._wanted_model
        if value not in names:
            value = names[0] if names else None
        self._model.set_options(names, value=value)
        if first and self._task is None and value is not None:
            now = time.time()
            self._begin(now - float(self._span.value or 0), now)  # a page that opens shows one
            self._opening = self._task
            self._button.set_enabled(True)  # another one may take its place

    def cancel(self) -> None:
        """End the comparison that runs."""
        if self._task is not None:
            self._task.cancel()

    def _spanned(self) -> None:
        for field in (self._from, self._to):
            field.set_visibility(self._span.value == CUSTOM)

    async def _start(self) -> None:
        if self._task is not None and self._task is self._opening:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._task is not None:
            return
        now = time.time()
        since, until = now - float(self._span.value or 0), now
        if self._span.value == CUSTOM:
            since, until = await self._times()
        self._begin(since, until)

    def _begin(self, since: float, until: float) -> None:
        """Begin a comparison of the requests between two Unix times, unless the form is wrong."""
        now = time.time()
        asked = self._asked(round(max(since, 0.0), 3), round(min(until, now), 3))
        age_s = self._mesh.settings.streams.route_age_s
        if wrong := problem(asked, self._policies, now, age_s):
            self._status.text = wrong
            return
        self._result.clear()
        self._running(True)
        self._task = asyncio.create_task(self._run(asked))

    async def _times(self) -> tuple[float, float]:
        """The times of the form in Unix seconds, as the browser's time zone has them; 0 if none."""
        texts = json.dumps([self._from.value or "", self._to.value or ""])
        try:
            found: Any = await ui.run_javascript(f"{texts}.map(t => Date.parse(t) || 0)")
            since, until = (float(each) / 1000 for each in found)
        except (TimeoutError, TypeError, ValueError):
            return 0.0, 0.0
        return since, until

    def _asked(self, since: float, until: float) -> WhatIf:
        return WhatIf(
            model=self._model.value or "",
            since=since,
            until=until,
            policy=self._policy.value or "",
            workers=int(self._workers.value or 0),
            blocks=int(self._blocks.value or 0),
            speedup=float(self._speedup.value or 0.0),
        )

    async def _run(self, asked: WhatIf) -> None:
        workers = [
            card
            for card in self._mesh.cards.values()
            if card.model is not None and card.model.name == asked.model
        ]
        try:
            found = await self._mesh.comparisons.compare(asked, workers, self._report)
            self._status.text = span_text(found)
            with self._result:
                _show(found, self._mesh)
        except ComparisonError as error:
            self._status.text = str(error)
        except asyncio.CancelledError:
            self._status.text = "Cancelled."
            raise
        except Exception:
            log.exception("a comparison failed")
            self._status.text = "The comparison failed; the log has the cause."
        finally:
            self._task = None
            self._running(False)

    def _running(self, runs: bool) -> None:
        self._button.set_enabled(not runs)
        self._cancel.set_visibility(runs)
        self._progress.set_visibility(runs)
        self._progress.value = 0.0

    def _report(self, step: str, share: float) -> None:
        self._status.text = step
        self._progress.value = share


def _number(label: str, most: int) -> ui.number:
    field = ui.number(label=label, min=1, max=most, precision=0)
    field.props('placeholder="as at present" stack-label clearable')
    return field


def _show(found: Compared, mesh: Mesh) -> None:
    comparison = found.comparison
    ui.label(
        f"Workers: {comparison.measured.serving} served these requests; present"
        f" {comparison.present_fleet}; chosen {comparison.chosen_fleet}."
    )
    ui.label(fidelity(comparison))
    heading("Figures")
    headed_table("comparison", figure_rows(comparison))
    runs = (comparison.measured, comparison.present, comparison.chosen)
    names = ("measured", f"present ({runs[1].policy})", f"chosen ({runs[2].policy})")
    with ui.element("div").classes("charts"):
        ttft = charts.lines("Share of requests up to each TTFT, in seconds", names, share=True)
        ttft.options["xAxis"] = _axis("log")
        cached = charts.lines("Cached share, by seconds after the start", names, share=True)
        cached.options["xAxis"] = _axis("value")
        spread = charts.lines("Computed prompt tokens of each worker, the most first", names)
        workers = range(1, 1 + max(len(run.workers) for run in runs))
        spread.options["xAxis"] = {**_axis("category"), "data": [str(n) for n in workers]}
    for number, run in enumerate(runs):
        ttft.options["series"][number]["data"] = _points(run.ttft_curve)
        cached.options["series"][number]["data"] = _points(run.cached_curve)
        spread.options["series"][number] |= {"type": "bar", "data": busiest_first(run)}
    for line in adoption(found):
        ui.label(line)
    heading("The same in a terminal")
    ui.label("These figures, with the dashboard’s own settings (file and environment):")
    for command in command_lines(found, mesh.settings):
        ui.label(command).classes("mono command").props('tabindex="0"')


def _axis(kind: str) -> dict[str, Any]:
    label = {"color": charts.TEXT, "alignMaxLabel": "right"}
    return {"type": kind, "axisLabel": label, "splitLine": {"show": False}}


def _points(curve: list[tuple[float, float]]) -> list[list[float]]:
    return [[round(x, 4), round(100 * y, 2)] for x, y in curve]
