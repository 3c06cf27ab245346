"""Addresses of the pages about one request or session, and links to them. Pure but for `linked`."""

import re
from collections.abc import Iterable
from urllib.parse import urlencode

from nicegui import ui

from kvmesh.runtime.logs import printable


def request_href(request: str) -> str:
    """The page of a request."""
    return f"/request?{urlencode({'id': request})}"


def session_href(tenant: str, name: str) -> str:
    """The page of a tenant's session, by the name that the tenant gave it."""
    return f"/session?{urlencode({'tenant': tenant, 'name': name})}"


def linked(text: str, requests: Iterable[str]) -> None:
    """Show a line of text, in which the ids of these requests lead to their pages."""
    ids = sorted(set(requests), key=len, reverse=True)
    pattern = "|".join(map(re.escape, ids))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    with ui.element("div").classes("line"):
        for part in parts:
            if part in ids:
                ui.link(printable(part), request_href(part))
            elif part:
                ui.label(printable(part))
