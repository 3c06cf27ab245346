"""The prefixes that the prompts of a model share, and the ranks and block managers with them."""

import time
from collections.abc import Mapping
from typing import Any

from nicegui import events, ui

from kvmesh.dashboard.elements.charts import COLOURS, TEXT
from kvmesh.dashboard.elements.figure_row import FigureRow
from kvmesh.dashboard.elements.links import session_href
from kvmesh.dashboard.elements.shell import REFRESH_S, every, heading
from kvmesh.dashboard.elements.table import PagedTable
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.prefixes import PrefixSnapshot
from kvmesh.dashboard.state.prefixes.holders import UNKNOWN
from kvmesh.dashboard.state.prefixes.nodes import (
    HOLDERS,
    HolderRow,
    holder_rows,
    nodes,
    run_name,
    short_name,
    slices,
    tenant_of,
)
from kvmesh.dashboard.state.prefixes.tree import MOST_PROMPTS, PrefixRun, RecentPrompt
from kvmesh.observer.columns import part_text

STATES = {"held": COLOURS[2], "partly": COLOURS[1], "lost": COLOURS[4], "unknown": COLOURS[6]}
KEY = (
    "Each line is a run of KV blocks with which prompts begin or go on, with its share of all"
    " prompt tokens, and the number of its holders by tier: engine memory, host memory, disk,"
    " remote store."
)
STATE_TEXTS = {
    "held": "all of it held",
    "partly": "partly held",
    "lost": "held by nobody",
    "unknown": "unknown or merged",
}
HEADER = """
<div class="run"><span class="run-name"><bdi>{{ props.node.label }}</bdi>
<span v-if="props.node.tenant" class="quiet"> of <bdi>{{ props.node.tenant }}</bdi></span></span>
<span class="run-bar" aria-hidden="true"><i :style="{ width: props.node.width }"></i></span>
<span class="run-share">{{ props.node.share }}</span>
<span class="run-figure">{{ props.node.tokens }}<span class="unseen"> tokens</span></span>
<span class="run-figure">{{ props.node.requests }}<span class="unseen">
{{ props.node.requests === '1' ? 'request' : 'requests' }}</span></span>
<span :class="'run-holders run-' + props.node.state">{{ props.node.holders }}</span>
<span class="run-time quiet">{{ props.node.used }}</span></div>
"""
HEADINGS = """
<div class="run run-headings quiet" aria-hidden="true"><span class="run-name">sessions</span>
<span class="run-bar"></span><span class="run-share">share</span>
<span class="run-figure">tokens</span><span class="run-figure">requests</span>
<span class="run-holders">holders</span><span class="run-time">last</span></div>
"""
HOLDER_ROWS = 10
MOST_NAMES = 20


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page."""
    page = PrefixPage(mesh, query.get("model", ""))
    every(REFRESH_S, page.refresh)


class PrefixPage:
    """The elements of the page, and what its viewer has chosen."""

    def __init__(self, mesh: Mesh, model: str) -> None:
        self._mesh = mesh
        self._asked_model = model
        self._shown: PrefixSnapshot | None = None
        self._nodes: list[dict[str, Any]] = []
        self._chosen = ""
        self._seen: set[str] = set()
        self._model = ui.select([], label="Model", on_change=self._on_model).props("dense")
        self._model.classes("chooser")
        self._notice = ui.label().classes("notice").props('role="status"')
        self._figures = FigureRow("sessions", "prompt tokens", "shared", "held by nobody", "as of")
        with ui.element("div").classes("columns"):
            with ui.element("div"):
                ui.label(KEY).classes("quiet")
                ui.html(HEADINGS, sanitize=False).classes("whole")
                self._tree = ui.tree([], on_select=self._on_select, on_expand=lambda _: None)
                self._tree.props('dense no-transition no-nodes-label="No prompts"')
                self._tree.props('aria-label="prefixes"')
                self._tree.add_slot("default-header", HEADER)
            with ui.element("div").classes("beside"):
                self._chart = _sunburst(self._on_slice)
                with ui.element("div").classes("states quiet"):
                    for state, text in STATE_TEXTS.items():
                        with ui.element("span"):
                            ui.element("i").style(f"background: {STATES[state]}")
                            ui.label(text).style("display: inline")
                self._detail = ui.element("section").props('aria-label="chosen prefix"')
                with self._detail:
                    self._build_detail()

    def _build_detail(self) -> None:
        self._name = heading("Chosen prefix")
        with self._name:
            self._title = ui.label().style("display: inline")
        self._facts = FigureRow("tokens", "sessions", "requests", "of all tokens", "holders")
        self._sessions = ui.element("div").classes("quiet names")
        self._named: tuple[list[tuple[str, str]], int] = [], 0
        self._table = PagedTable(HOLDERS, self._holders, "holders", page_rows=HOLDER_ROWS).show()
        self._detail.visible = False

    def refresh(self) -> None:
        """Show the newest tree of the chosen model."""
        models = self._mesh.prefixes.models()
        if models != self._model.options:
            wanted = str(self._model.value or self._asked_model)
            chosen = wanted if wanted in models else next(iter(models), None)
            self._model.set_options(models, value=chosen)
        polled = self._mesh.prefixes.of(str(self._model.value or ""))
        snapshot = polled.poll() if polled is not None else None
        self._notice.text = _notice(snapshot, polled.fault if polled is not None else "", models)
        if snapshot is None or snapshot is self._shown:
            return
        self._shown = snapshot
        self._draw(snapshot)
        self._draw_detail()

    def _draw(self, snapshot: PrefixSnapshot) -> None:
        tree = snapshot.tree
        found = nodes(tree, snapshot.holders)
        if found != self._nodes:
            self._nodes = found
            self._tree.props["nodes"] = found
        shared = {run.key for run in tree.runs() if len(run.prompts) > 1}
        self._tree.expand(sorted(shared - self._seen))  # a viewer may have closed the others
        self._seen = shared
        lost = sum(run.passed for run in tree.runs() if snapshot.holders[run.key].held == 0)
        self._figures.set(
            f"{tree.sessions:,}",
            f"{tree.tokens:,}",
            part_text(tree.shared_tokens(), tree.tokens),
            "–" if snapshot.fault else part_text(lost * tree.block_size, tree.tokens),
            time.strftime("%H:%M:%S", time.localtime(snapshot.time)),
        )
        self._chart.options["series"][0]["data"] = slices(tree, snapshot.holders, STATES)
        self._chart.update()

    def _draw_detail(self) -> None:
        snapshot, run = self._shown, self._run()
        self._detail.visible = snapshot is not None and run is not None
        if snapshot is None or run is None:
            return
        tree, held = snapshot.tree, snapshot.holders[run.key]
        tenant = tenant_of(tree, run)
        self._title.text = f": {run_name(tree, run)}" + (f" of {tenant}" if tenant else "")
        first = run.first * tree.block_size
        count = "–" if held.blocks is None else f"{len(held.ranks):,}"
        self._facts.set(
            f"{first:,} to {first + run.blocks * tree.block_size:,}",
            f"{len(run.prompts):,}",
            f"{run.requests:,}",
            f"{tree.share(run):.1%}",
            count,
        )
        self._draw_sessions(tree.prompts_of(run))
        self._table.refresh()

    def _draw_sessions(self, prompts: list[RecentPrompt]) -> None:
        latest = [prompt for prompt in prompts if prompt.session][:MOST_NAMES]
        named = sorted(latest, key=lambda prompt: prompt.session)  # a focused link stays in place
        links = [(prompt.tenant, prompt.session) for prompt in named]
        more = len(prompts) - len(named)
        if (links, more) == self._named:
            return
        self._named = links, more
        self._sessions.clear()
        with self._sessions:
            for tenant, session in links:
                ui.link(short_name(session), session_href(tenant, session))
            if more:
                ui.label(f"and {more:,} more")

    def _run(self) -> PrefixRun | None:
        if self._shown is None or not self._chosen:
            return None
        return next((run for run in self._shown.tree.runs() if run.key == self._chosen), None)

    def _holders(self) -> list[HolderRow]:
        snapshot, run = self._shown, self._run()
        if snapshot is None or run is None:
            return []
        held = snapshot.holders.get(run.key, UNKNOWN)
        return holder_rows(held, snapshot.tree.block_size)

    def _on_model(self, _: object) -> None:
        self._shown = None

    def _on_select(self, event: events.ValueChangeEventArguments[str | None]) -> None:
        self._chosen = str(event.value or "")
        self._draw_detail()

    def _on_slice(self, event: events.EChartPointClickEventArguments) -> None:
        data: object = event.data
        key = data.get("key") if isinstance(data, dict) else None
        if isinstance(key, str):
            self._chosen = key
            self._tree.select(key)
            self._draw_detail()


def _notice(snapshot: PrefixSnapshot | None, fault: str, models: list[str]) -> str:
    if not models:
        return "No worker serves a model."
    if fault:
        return f"The tree is not up to date. {fault}"
    if snapshot is None:
        return "Asking the index."
    if snapshot.fault:
        return f"The holders are not known. {snapshot.fault}"
    if not snapshot.tree.roots:
        return "No recent request of this model has a prompt of a whole block."
    if snapshot.tree.sessions > MOST_PROMPTS:
        return f"The tree has the prompts of the latest {MOST_PROMPTS} sessions."
    return ""


def _sunburst(on_click: Any) -> ui.echart:
    title = "Prompt tokens by prefix"
    options = {
        "aria": {"enabled": True, "label": {"description": title}},
        "animation": False,
        "title": {"text": title, "left": 0, "textStyle": {"fontSize": 13, "color": TEXT}},
        "tooltip": {"confine": True, "formatter": "{b}"},
        "series": [
            {
                "type": "sunburst",
                "data": [],
                "radius": ["8%", "98%"],
                "center": ["50%", "54%"],
                "sort": None,
                "nodeClick": False,
                "label": {
                    "minAngle": 12,
                    "fontSize": 10,
                    "overflow": "truncate",
                    "width": 70,
                    "color": "#fff",
                    "textBorderWidth": 0,
                },
                "itemStyle": {"borderWidth": 1, "borderColor": "#8888"},
                "emphasis": {"focus": "ancestor"},
            }
        ],
    }
    return (
        ui.echart(options, on_point_click=on_click)
        .classes("chart sunburst")
        .props(f'role="img" aria-label="{title}"')
    )
