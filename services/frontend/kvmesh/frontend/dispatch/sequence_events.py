"""Publisher of sequence events and outcomes of this frontend's requests."""

import asyncio

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Outcome, SeqBatch, SeqEvent

GATHER_S = 0.003
MAX_PENDING = 100_000


class SequenceEventPublisher:
    """Gathers events per model for a few milliseconds and publishes them in order."""

    def __init__(self, bus: Bus, instance: str) -> None:
        self._bus = bus
        self._instance = instance
        self._pending: dict[str, list[SeqEvent]] = {}
        self._outcomes: list[tuple[str, Outcome]] = []
        self._due = asyncio.Event()

    def event(self, model: str, event: SeqEvent) -> None:
        events = self._pending.setdefault(model, [])
        if len(events) < MAX_PENDING:
            events.append(event)
        self._due.set()

    def outcome(self, model: str, outcome: Outcome) -> None:
        if len(self._outcomes) < MAX_PENDING:
            self._outcomes.append((model, outcome))
        self._due.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._due.wait()
            await asyncio.sleep(GATHER_S)
            self._due.clear()
            self.flush()

    def flush(self) -> None:
        """Publish pending events now."""
        pending, self._pending = self._pending, {}
        outcomes, self._outcomes = self._outcomes, []
        for model, events in pending.items():
            batch = SeqBatch(source=self._instance, events=events)
            self._bus.post(self._bus.subjects.seq(model), batch)
        for model, outcome in outcomes:
            self._bus.post(self._bus.subjects.route(model), outcome)
