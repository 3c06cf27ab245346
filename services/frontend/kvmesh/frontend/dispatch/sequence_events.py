"""Publisher of sequence events and outcomes of this frontend's requests."""

import asyncio
import logging
from collections import deque

from msgspec import Raw

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Outcome, SeqBatch, SeqEvent, SeqFree, encode
from kvmesh.bus.packs import packed
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
GATHER_S = 0.003
MAX_PENDING = 100_000
RETAIN_S = 30.0  # a broken connection is noticed within this time
REPEATED = 1000  # events in a message of repeated ones
STORE_S = 2.0
CONFIRM_S = 5.0
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 2.0


class RecentFrees:
    """The SeqFrees of the last RETAIN_S seconds, at most MAX_PENDING, to be published again.

    A broken connection, or a server whose stream is not restored yet, may have lost them.
    """

    def __init__(self) -> None:
        self._frees: deque[tuple[float, str, SeqFree]] = deque(maxlen=MAX_PENDING)

    def add(self, model: str, event: SeqFree, now: float) -> None:
        self._frees.append((now, model, event))

    def expire(self, now: float) -> None:
        """Forget the older ones; call it only while the stream is known to be there."""
        while self._frees and self._frees[0][0] < now - RETAIN_S:
            self._frees.popleft()

    def batches(self) -> list[tuple[str, list[SeqEvent]]]:
        """All of them in order, by model, at most REPEATED each."""
        by_model: dict[str, list[SeqEvent]] = {}
        for _, model, event in self._frees:
            by_model.setdefault(model, []).append(event)
        return [
            (model, events[at : at + REPEATED])
            for model, events in by_model.items()
            for at in range(0, len(events), REPEATED)
        ]


class SequenceEventPublisher:
    """Gathers events per model for a few milliseconds and publishes them in order.

    The stream is in the server's memory, and posts are not acknowledged. After each reconnect the
    recent SeqFrees are therefore published again until they are stored: an attempt whose
    SeqFree is lost would count as active in the routers for minutes.
    """

    def __init__(self, bus: Bus, instance: str, directory: Directory | None = None) -> None:
        self._bus = bus
        self._directory = directory
        self._instance = instance
        self._pending: dict[str, list[SeqEvent]] = {}
        self._outcomes: dict[str, list[bytes]] = {}
        self._unsent_outcomes = 0
        self._due: asyncio.TimerHandle | None = None
        self._recent = RecentFrees()
        self._reconnected = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks()
        self._confirmed_at = -CONFIRM_S

    def event(self, model: str, event: SeqEvent) -> None:
        events = self._pending.setdefault(model, [])
        if len(events) < MAX_PENDING:
            events.append(event)
        if type(event) is SeqFree:
            self._recent.add(model, event, self._loop.time())
        self._gather()

    def outcome(self, model: str, outcome: Outcome) -> None:
        if self._unsent_outcomes < MAX_PENDING:
            self._outcomes.setdefault(model, []).append(encode(outcome))
            self._unsent_outcomes += 1
        self._gather()

    def _gather(self) -> None:
        if self._due is None:
            self._due = self._loop.call_later(GATHER_S, self.flush)

    async def run(self) -> None:
        """Publish the recent frees again after each reconnect, until the stream has them."""
        self._bus.on_reconnect.append(self._reconnected.set)
        try:
            while True:
                await self._reconnected.wait()
                backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
                while not await self._stored():
                    await asyncio.sleep(backoff.delay())
        finally:
            self._bus.on_reconnect.remove(self._reconnected.set)

    async def _stored(self) -> bool:
        """Store the recent frees; returns whether all were stored."""
        self._reconnected.clear()
        try:
            for model, events in self._recent.batches():
                batch = encode(SeqBatch(source=self._instance, events=events))
                await self._bus.store(self._bus.subjects.seq(model), batch, STORE_S)
        except BusError as error:
            log.debug("recent ends of requests are not stored yet: %s", cause(error))
            self._reconnected.set()
        return not self._reconnected.is_set()

    async def _confirm(self, model: str, outcomes: bytes) -> None:
        """Store outcomes: whether the server stores the others, too, would else go unnoticed."""
        try:
            await self._bus.store(self._bus.subjects.route(model), outcomes, STORE_S)
        except BusError as error:
            log.debug("an outcome is not stored: %s", cause(error))

    def flush(self) -> None:
        """Publish pending events now."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        pending, self._pending = self._pending, {}
        outcomes, self._outcomes, self._unsent_outcomes = self._outcomes, {}, 0
        packs = self._directory is not None and self._directory.packs
        for model, events in pending.items():
            batch = SeqBatch(source=self._instance, events=events)
            self._bus.post(self._bus.subjects.seq(model), batch)
        now = self._loop.time()
        for model, ended in outcomes.items():
            for data in packed(ended) if packs else ended:
                if self._bus.connected and now > self._confirmed_at + CONFIRM_S:
                    self._confirmed_at = now
                    self._tasks.start(self._confirm(model, data))
                else:
                    self._bus.post(self._bus.subjects.route(model), Raw(data))
        if self._bus.connected and not self._reconnected.is_set():
            self._recent.expire(now)
