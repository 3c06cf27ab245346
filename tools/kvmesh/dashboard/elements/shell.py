"""The parts that all pages have: navigation, colours, the state of the connection, refreshing."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from nicegui import Client, events, ui
from starlette.requests import Request

from kvmesh.dashboard.http.access import SIGN_IN, SIGN_OUT, Access
from kvmesh.dashboard.mesh import Mesh

log = logging.getLogger(__name__)
REFRESH_S = 1.0
THEME = "kvmesh_theme"
DARK = {"system": None, "light": False, "dark": True}
STYLE = Path(__file__).with_name("style.css")
FOCUS = Path(__file__).with_name("focus.js").read_text()
_paused: WeakSet[Client] = WeakSet()


@contextmanager
def frame(
    path: str, name: str, names: dict[str, str], mesh: Mesh, access: Access, request: Request
) -> Iterator[None]:
    """The frame of a page; its content goes inside. `names` are the names of the pages by path."""
    theme = request.cookies.get(THEME, "")
    ui.add_css(STYLE)
    ui.add_body_html(f"<script>{FOCUS}</script>")
    ui.colors(primary="var(--accent)")
    if (slot := ui.context.client.content.parent_slot) is not None:
        slot.parent.props('role="none"')  # Quasar's page is a second <main> around all of this
    ui.html('<a class="skip" href="#content">Skip to the content</a>', sanitize=False)
    with ui.element("header").classes("bar"):
        ui.html("<strong>kvmesh</strong>", sanitize=False)
        with ui.element("nav").props('aria-label="Pages"').classes("bar-links row"):
            for each, label in names.items():
                link = ui.link(label, each)
                if each == path:
                    link.props('aria-current="page"')
        with ui.element("div").classes("end"):
            ui.label(f"mesh {mesh.bus.options.namespace}")
            _pause_button()
            _theme_choice(theme if theme in DARK else "system")
            if access.requires_keys:
                ui.html(
                    f'<form method="post" action="{SIGN_OUT}"><button>Sign out</button></form>',
                    sanitize=False,
                )
    trouble = ui.label().classes("trouble").props('role="status"')
    headers = {key.lower(): value for key, value in request.headers.items()}

    def watch() -> None:
        trouble.text = mesh.trouble
        if access.judge("GET", headers).status:
            ui.navigate.to(SIGN_IN)

    watch()
    ui.timer(REFRESH_S, watch)
    with ui.element("main").props('id="content" tabindex="-1"'):
        heading(name, 1)
        yield


def every(seconds: float, refresh: Callable[[], None]) -> None:
    """Call `refresh` now and every so many seconds while the page is open and not paused.

    A failure is logged once for each page that is opened, and shown there.
    """
    client, failed = ui.context.client, False

    def refreshing() -> None:
        nonlocal failed
        if client in _paused:
            return
        try:
            refresh()
        except Exception:
            if not failed:
                failed = True
                log.exception("a page could not be refreshed")
                ui.notify(
                    "This page could not be refreshed; the log has the cause.", type="negative"
                )

    refreshing()
    ui.timer(seconds, refreshing)


def heading(text: str, level: int = 2) -> ui.element:
    """A heading of the page."""
    element = ui.element(f"h{level}")
    with element:
        ui.label(text).style("display: inline")
    return element


def _pause_button() -> None:
    """Stop and resume the refreshing of this page: moving figures are hard to read for many."""
    client = ui.context.client

    def turn() -> None:
        paused = client not in _paused
        if paused:
            _paused.add(client)
        else:
            _paused.discard(client)
        button.text = "Resume" if paused else "Pause"

    button = ui.button("Pause", on_click=turn).props("flat dense no-caps size=sm")


def _theme_choice(chosen: str) -> None:
    """Choose the colours; a cookie of the browser remembers them for all pages."""
    dark = ui.dark_mode(DARK[chosen])

    def change(event: events.ValueChangeEventArguments[str]) -> None:
        dark.value = DARK[event.value]
        cookie = f"{THEME}={event.value};path=/;samesite=strict;max-age=31536000"
        ui.run_javascript(f"document.cookie='{cookie}'")

    names = {"system": "System", "light": "Light", "dark": "Dark"}
    ui.toggle(names, value=chosen, on_change=change).props(
        'flat dense no-caps size=sm role="group" aria-label="Colours"'
    )
