"""The fleet: figures of the whole mesh, their last minutes, and every process."""

from collections.abc import Mapping

from nicegui import ui

from kvmesh.dashboard.elements import charts
from kvmesh.dashboard.elements.figure_row import FigureRow
from kvmesh.dashboard.elements.shell import REFRESH_S, every, heading
from kvmesh.dashboard.elements.table import PagedTable
from kvmesh.dashboard.elements.tiles import Tiles
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.kv_tiers import TIER_VIEW, tier_rows
from kvmesh.dashboard.state.pools import POOLS, pools
from kvmesh.dashboard.state.starts import START_VIEW
from kvmesh.observer.columns import FLEET

DRAW_S = 3.0  # charts are most of what a browser gets


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page."""
    figures = FigureRow("workers", "running", "waiting", "prompt tokens/s", "output tokens/s")
    with ui.element("div").classes("charts"):
        load = charts.lines("Requests in workers", ("running", "waiting"))
        tokens = charts.lines("Tokens per second", ("prompt", "output"))
        memory = charts.lines("KV blocks of workers", ("in use", "cached"), share=True)
        tiles = Tiles("Workers by KV blocks in use")
    heading("Pools")
    grouped = PagedTable(POOLS, lambda: pools(mesh.fleet_rows()), "pools", filtered=False).show()
    heading("KV memory by tier")
    tiers = PagedTable(
        TIER_VIEW, lambda: tier_rows(mesh.cards, mesh.fleet_rows()), "tiers", filtered=False
    ).show()
    heading("Starts of workers")
    starts = PagedTable(START_VIEW, mesh.start_rows, "starts", page_rows=10, filtered=False).show()
    heading("Processes")
    table = PagedTable(FLEET, mesh.fleet_rows, "processes").show()

    def draw() -> None:
        samples = mesh.history.samples
        charts.draw(load, samples, lambda s: s.running, lambda s: s.waiting)
        charts.draw(
            tokens, samples, lambda s: s.prompt_tokens_per_s, lambda s: s.output_tokens_per_s
        )
        charts.draw(memory, samples, lambda s: 100 * s.kv_used, lambda s: 100 * s.kv_cached)
        tiles.draw(mesh.fleet_rows())

    def refresh() -> None:
        if mesh.history.samples:
            last = mesh.history.samples[-1]
            figures.set(
                f"{last.workers:,}",
                f"{last.running:,}",
                f"{last.waiting:,}",
                f"{last.prompt_tokens_per_s:,.0f}",
                f"{last.output_tokens_per_s:,.0f}",
            )
        grouped.refresh()
        tiers.refresh()
        starts.refresh()
        table.refresh()

    every(DRAW_S, draw)
    every(REFRESH_S, refresh)
