"""Follows a mesh over the bus, and shows frames of it: the shell of `kvmesh top`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.worker_reports import follow_loads, follow_starts
from kvmesh.bus.errors import NotPermitted
from kvmesh.bus.messages import RankEvents
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.cli.learned import learned_of, line
from kvmesh.cli.status.served import ServedByWorker, cache_rows, events_of
from kvmesh.cli.top.controls import TopControls
from kvmesh.cli.top.screen import FRAME_LINES, TopStatus, frame, table
from kvmesh.cli.top.terminal import LastWarning, keys
from kvmesh.observer.activity import by_session, by_tenant
from kvmesh.observer.fleet import FleetView
from kvmesh.observer.route_stream import decoded_outcome
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings
from kvmesh.terminal.console import stdout_console

REFRESH_S = 1.0
RATES_S = 2.5  # until the first rates are known
REPLAY_S = 10.0
LEARNERS_S = 5.0


class TopMonitor:
    """The figures of one mesh, kept up to date by its messages."""

    def __init__(self, bus: Bus, settings: Settings, window_s: float) -> None:
        self._bus = bus
        self._settings = settings
        self._window_s = window_s
        self._fleet = FleetView()
        self._sessions = by_session(window_s)
        self._tenants = by_tenant(window_s)
        self._learned = ""
        self._served = ServedByWorker()
        self._events: dict[str, list[RankEvents]] = {}
        self._clock = asyncio.get_running_loop().time
        self._reader = StreamReader(
            bus,
            bus.subjects.route_stream,
            bus.subjects.route_all,
            self._on_route,
            Start(time=datetime.fromtimestamp(time.time() - window_s, UTC)),
        )

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the mesh; raises NotFound if there is none, NotPermitted or another BusError."""
        directory = Directory(
            self._bus,
            stream_limits(self._settings.streams),
            lambda card: self._fleet.joined(card, self._clock()),
            self._fleet.left,
        )
        await directory.open()
        try:
            loads = await follow_loads(
                self._bus, lambda load: self._fleet.load(load, self._clock())
            )
            starts = await follow_starts(
                self._bus, lambda worker: self._fleet.starting(worker, self._clock())
            )
            await self._reader.open()
            questions = [
                asyncio.create_task(self._follow_learners(directory)),
                asyncio.create_task(self._follow_events(directory)),
            ]
            try:
                yield
            finally:
                for question in questions:
                    question.cancel()
                await self._reader.close()
                await starts.unsubscribe()
                await loads.unsubscribe()
        finally:
            await directory.close()

    async def _follow_learners(self, directory: Directory) -> None:
        """Ask the mesh's learners what they gained, every LEARNERS_S, if this user may."""
        try:
            while True:
                found = await learned_of(self._bus, directory.instances)
                self._learned = line(found or ())
                await asyncio.sleep(LEARNERS_S)
        except NotPermitted:
            self._learned = ""

    async def _follow_events(self, directory: Directory) -> None:
        """Ask workers for the counts of their KV events, every LEARNERS_S, if this user may."""
        with suppress(NotPermitted):
            while True:
                cards = directory.instances
                self._events = await events_of(self._bus, cards)
                self._served.retain(card.instance for card in cards)
                await asyncio.sleep(LEARNERS_S)

    def _on_route(self, message: StreamMessage) -> None:
        self._served.add(message.data)
        outcome = decoded_outcome(message.data)
        if outcome is not None:
            # clocks differ, and no request ended in the future
            at = min(message.time, time.time())
            self._sessions.add(outcome, at)
            self._tenants.add(outcome, at)

    async def replayed(self) -> None:
        """Wait for the requests of the window and the first rates."""
        await asyncio.wait_for(self._reader.caught_up.wait(), REPLAY_S)
        await asyncio.sleep(RATES_S)

    def rows(self, view: str) -> list[Any]:
        """The rows of a view now, without an order."""
        if view == "fleet":
            return self._fleet.rows(self._clock())
        if view == "caches":
            return cache_rows(self._served.since(time.time() - self._window_s), self._events)
        return (self._sessions if view == "sessions" else self._tenants).rows(time.time())

    def status(self, notice: str = "") -> TopStatus:
        """The present state of the connection."""
        trouble = ""
        if not self._bus.connected:
            trouble = f"no connection to NATS at {self._bus.server}: figures stand still; retrying"
        elif silent := self._reader.silent_for:
            trouble = f"NATS at {self._bus.server} has sent nothing for {silent:.0f} s"
        mesh = f"mesh {self._bus.options.namespace} on {self._bus.server}"
        return TopStatus(mesh, self._window_s, time.time(), trouble, notice, self._learned)


async def show_once(monitor: TopMonitor, controls: TopControls, as_json: bool) -> None:
    """Print one frame, of all rows."""
    async with monitor.following():
        await monitor.replayed()
        view, rows = controls.view, monitor.rows(controls.view.name)
        ordered = view.ordered(rows, controls.sort, controls.reverse)
        if as_json:
            records = [view.record(row) for row in ordered]
            report = {"time": time.time(), "view": view.name, "rows": records}
            print(msgspec.json.encode(report).decode())
            return
        table(view, ordered, controls.sort, controls.reverse).show(stdout_console())


async def show_live(monitor: TopMonitor, controls: TopControls) -> None:
    """Show frames in the whole terminal until it ends or `q` is pressed."""
    console = Console(highlight=False)
    pressed = asyncio.Event()
    warnings = LastWarning()
    rows: list[Any] = []

    def on_key(key: str) -> None:
        controls.press(key, max(1, console.height - FRAME_LINES))
        pressed.set()

    def end() -> None:
        controls.quit = True
        pressed.set()

    root = logging.getLogger()
    handlers, root.handlers[:] = root.handlers[:], [warnings]
    try:
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
        async with monitor.following():
            with keys(on_key, end), live:
                shown = ""
                while not controls.quit:
                    if not controls.paused or controls.view.name != shown:
                        shown, rows = controls.view.name, monitor.rows(controls.view.name)
                    status = monitor.status(warnings.text)
                    live.update(frame(controls, rows, status, *console.size[::-1]), refresh=True)
                    pressed.clear()
                    try:
                        await asyncio.wait_for(pressed.wait(), REFRESH_S)
                    except TimeoutError:
                        warnings.text = ""
    finally:
        root.handlers[:] = handlers
