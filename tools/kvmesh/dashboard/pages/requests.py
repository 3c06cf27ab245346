"""The requests: those that run, as their tokens come, and the latest that ended."""

from collections.abc import Mapping

from nicegui import ui

from kvmesh.dashboard.elements.links import request_href
from kvmesh.dashboard.elements.shell import REFRESH_S, every, heading
from kvmesh.dashboard.elements.table import PagedTable
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.requests.log import MOST_ENDED
from kvmesh.dashboard.state.requests.rows import ENDED, MOST_RUNNING, RUNNING


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page."""
    heading("Running")
    note = ui.label().classes("quiet")
    running = PagedTable(
        RUNNING,
        mesh.running_rows,
        "running requests",
        lambda row: request_href(row.request),
        sparse=True,
    ).show()
    heading("Ended")
    ui.label(f"The latest {MOST_ENDED:,} of the last {mesh.window_s / 60:g} minutes.").classes(
        "quiet"
    )
    ended = PagedTable(
        ENDED,
        mesh.ended_rows,
        "ended requests",
        lambda row: request_href(row.request),
        sparse=True,
    ).show()

    def refresh() -> None:
        count = len(mesh.running_rows())
        cut = f"More than {MOST_RUNNING:,} run; those that began first are listed."
        note.text = f"{count:,} wait or run now." if count < MOST_RUNNING else cut
        running.refresh()
        ended.refresh()

    every(REFRESH_S, refresh)
