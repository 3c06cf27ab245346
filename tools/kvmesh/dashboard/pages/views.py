"""The pages by path, in the order of the navigation; adds them to the server."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nicegui import ui
from starlette.requests import Request

from kvmesh.dashboard.elements.shell import frame
from kvmesh.dashboard.http.access import Access
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.pages import (
    decision,
    fleet,
    planner,
    prefixes,
    request,
    requests,
    retention,
    session,
    sessions,
    whatif,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    """One page. `show` builds its elements, from the mesh and the query of the URL.

    Without `listed` the navigation does not name it: another page leads there.
    """

    path: str
    name: str
    show: Callable[[Mesh, Mapping[str, str]], None]
    listed: bool = True


PAGES = (
    Page("/", "Fleet", fleet.show),
    Page("/requests", "Requests", requests.show),
    Page("/sessions", "Sessions", sessions.show),
    Page("/prefixes", "Prefixes", prefixes.show),
    Page("/retention", "Retention", retention.show),
    Page("/planner", "Planner", planner.show),
    Page("/whatif", "What if", whatif.show),
    Page("/request", "Request", request.show, listed=False),
    Page("/session", "Session", session.show, listed=False),
    Page("/decision", "Decision", decision.show, listed=False),
)


def add_pages(mesh: Mesh, access: Access) -> None:
    """Serve every page to those whom `access` lets pass."""
    names = {page.path: page.name for page in PAGES if page.listed}
    for page in PAGES:
        _add(page, names, mesh, access)


def _add(page: Page, names: dict[str, str], mesh: Mesh, access: Access) -> None:
    def build(request: Request) -> None:
        with frame(page.path, page.name, names, mesh, access, request):
            page.show(mesh, request.query_params)

    ui.page(page.path, title=f"{page.name} · kvmesh", response_timeout=10)(build)
