"""Follows the mesh over the bus for all pages: cards, loads, requests, scaling decisions."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.worker_reports import follow_loads, follow_starts
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import (
    Instance,
    Load,
    MessageDecoder,
    Outcome,
    RouteEvent,
    ScalingDecision,
    SeqBatch,
    Starting,
)
from kvmesh.bus.storage.buckets import read_headers
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.dashboard.comparisons import Comparisons
from kvmesh.dashboard.polled import Polled
from kvmesh.dashboard.prefixes import Prefixes
from kvmesh.dashboard.state.clocks import plausible
from kvmesh.dashboard.state.history import FleetHistory
from kvmesh.dashboard.state.pins import StoredHead, TenantNames, stored_head
from kvmesh.dashboard.state.requests.log import RequestLog
from kvmesh.dashboard.state.requests.rows import RunningRow, ended_rows, running_rows
from kvmesh.dashboard.state.shared import Shared
from kvmesh.dashboard.state.starts import WorkerStartRow, worker_starts
from kvmesh.frontend.http.cache.pin_store import HEAD, PinHead
from kvmesh.observer.activity import by_session, by_tenant
from kvmesh.observer.fleet import FleetView
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

_heads = msgspec.json.Decoder(PinHead)
log = logging.getLogger(__name__)
SAMPLE_S = 1.0
PINS_S = 2.0
PLAN_S = 6 * 3600.0
MOST_DECISIONS = 10_000
MOST_DECISION_BYTES = 32 << 20  # of their messages
T = TypeVar("T")


async def read_pins(bus: Bus) -> list[StoredHead]:
    """The pins in force; raises BusError."""
    try:
        found = await read_headers(bus, bus.subjects.pins_bucket)
    except NotFound:  # the first pin creates it
        return []
    now = time.time()
    pins = []
    for key, headers in found.items():
        try:
            head = _heads.decode(headers[HEAD])
        except (KeyError, msgspec.MsgspecError):
            continue
        if head.expires > now:
            pins.append(stored_head(key, head))
    return pins


class Mesh:
    """The state that all pages show."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        own = settings.dashboard
        self.bus = bus
        self.settings = settings
        self.window_s = own.window_s
        self.fleet = FleetView()
        self.comparisons = Comparisons(bus, settings)
        self.requests = RequestLog(own.window_s, own.window_bytes)
        self.sessions = by_session(own.window_s)
        self.tenants = by_tenant(own.window_s)
        self.history = FleetHistory()
        self.decisions: deque[ScalingDecision] = deque()
        self._decision_sizes: deque[int] = deque()
        self._decision_bytes = 0
        self._routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
        self._sequences = MessageDecoder(SeqBatch)
        self._scaling = MessageDecoder(ScalingDecision)
        self._clock = asyncio.get_running_loop().time
        self._readers: list[StreamReader] = []
        self.fleet_rows = self._shared(lambda: self.fleet.rows(self._clock()))
        self.start_rows = self._shared(self._start_rows)
        self.running_rows = self._shared(self._running_rows)
        self.ended_rows = self._shared(lambda: ended_rows(self.requests.ended()))
        self.session_rows = self._shared(lambda: self.sessions.rows(time.time()))
        self._cards: dict[str, Instance] = {}
        self.prefixes = Prefixes(bus, self.requests, self._cards)
        self.tenant_names = TenantNames()
        self.pins = Polled(lambda: read_pins(bus), PINS_S)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the mesh; raises NotPermitted or another BusError if it cannot begin to."""
        directory = Directory(
            self.bus, stream_limits(self.settings.streams), self._joined, self._left
        )
        await directory.open()
        loads = await follow_loads(self.bus, self._on_load)
        starts = await follow_starts(self.bus, self._on_start)
        subjects, now = self.bus.subjects, datetime.now(UTC)
        since = Start(time=now - timedelta(seconds=self.window_s))
        planned = Start(time=now - timedelta(seconds=PLAN_S))
        self._readers = [
            self._reader(subjects.seq_stream, subjects.seq_all, self._on_sequences, since),
            self._reader(subjects.route_stream, subjects.route_all, self._on_route, since),
            self._reader(subjects.scaling_stream, subjects.scaling_all, self._on_scaling, planned),
        ]
        sampling = asyncio.create_task(self._sample())
        try:
            for reader in self._readers:
                await reader.open()
            yield
        finally:
            sampling.cancel()
            for reader in self._readers:
                await reader.close()
            await starts.unsubscribe()
            await loads.unsubscribe()
            await directory.close()

    @property
    def trouble(self) -> str:
        """The reason why the figures do not change; empty if they do."""
        if not self.bus.connected:
            return f"No connection to NATS at {self.bus.server}; retrying. Figures stand still."
        if silent := max((reader.silent_for for reader in self._readers), default=0.0):
            return f"NATS at {self.bus.server} has sent nothing for {silent:.0f} s."
        if not all(reader.caught_up.is_set() for reader in self._readers):
            return "Reading the past requests of the mesh."
        return ""

    @property
    def cards(self) -> dict[str, Instance]:
        """The cards of all processes by instance."""
        return self._cards

    def _shared(self, compute: Callable[[], T]) -> Shared[T]:
        """A value for all pages, computed at most once per SAMPLE_S."""
        return Shared(compute, self._clock, SAMPLE_S)

    def _start_rows(self) -> list[WorkerStartRow]:
        starting = self.fleet.starts(self._clock())
        return worker_starts(self._cards.values(), starting, time.time())

    def _running_rows(self) -> list[RunningRow]:
        now = time.time()
        return running_rows(self.requests.running(now), now)

    def _joined(self, card: Instance) -> None:
        self._cards[card.instance] = card
        self.fleet.joined(card, self._clock())

    def _left(self, card: Instance) -> None:
        self._cards.pop(card.instance, None)
        self.fleet.left(card)

    def _on_load(self, load: Load) -> None:
        self.fleet.load(load, self._clock())

    def _on_start(self, worker: Starting) -> None:
        self.fleet.starting(worker, self._clock())

    def _on_route(self, message: StreamMessage) -> None:
        event = _decoded(self._routes, message)
        if event is None:
            return
        self.requests.add_route(event, time.time(), len(message.data))
        if isinstance(event, Outcome):
            at = min(message.time, time.time())  # clocks differ, and no request ended in the future
            self.sessions.add(event, at)
            self.tenants.add(event, at)
            self.tenant_names.learn(event)

    def _on_sequences(self, message: StreamMessage) -> None:
        batch = _decoded(self._sequences, message)
        now = time.time()
        if message.pending:  # of the past: a frontend that was alive then may be dead
            now = min(message.time, now)
        for event in batch.events if batch is not None else ():
            self.requests.add_sequence(event, now)

    def _on_scaling(self, message: StreamMessage) -> None:
        decision = _decoded(self._scaling, message)
        if decision is None:
            return
        if (decided := plausible(decision.time, message.time)) != decision.time:
            decision = msgspec.structs.replace(decision, time=decided)
        self.decisions.append(decision)
        self._decision_sizes.append(len(message.data))
        self._decision_bytes += len(message.data)
        while len(self.decisions) > MOST_DECISIONS or self._decision_bytes > MOST_DECISION_BYTES:
            self.decisions.popleft()
            self._decision_bytes -= self._decision_sizes.popleft()

    def _reader(
        self, stream: str, subject: str, handle: Callable[[StreamMessage], None], start: Start
    ) -> StreamReader:
        return StreamReader(self.bus, stream, subject, handle, start)

    async def _sample(self) -> None:
        while True:
            self.history.add(time.time(), self.fleet_rows())
            await asyncio.sleep(SAMPLE_S)


def _decoded(decoder: MessageDecoder[T], message: StreamMessage) -> T | None:
    try:
        return decoder.decode(message.data)
    except msgspec.MsgspecError:
        return None  # of another version, or malformed
