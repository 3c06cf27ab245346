"""One rank's cache events from the engine's publisher to the worker's, by way of the books."""

import logging

from kvmesh.bus.messages import KvEvent
from kvmesh.worker.adapters.cache_ledger import CacheLedger
from kvmesh.worker.adapters.zmq_events import EventDecoder, ZmqSubscriber
from kvmesh.worker.engine import Sink

log = logging.getLogger(__name__)


class EventFeed:
    """Follows `endpoint`, asks `replay` for what it missed; `ledger` knows what the rank holds.

    Messages that are lost for good leave the books as they were: they are told again from the
    start, so that at least mesh and books agree, and the engine's next events mend the rest.
    """

    def __init__(
        self,
        rank: int,
        ledger: CacheLedger,
        sink: Sink,
        endpoint: str,
        replay: str | None = None,
        topic: str = "",
    ) -> None:
        self.rank = rank
        self.ledger = ledger
        self._sink = sink
        self._decoder = EventDecoder()
        self._subscriber = ZmqSubscriber(
            endpoint, replay, topic, self._on_payload, self.clear, self._on_gap
        )

    def start(self) -> None:
        self._subscriber.start()

    async def close(self) -> None:
        await self._subscriber.close()

    def dump(self) -> None:
        """Tell all that is known to be held."""
        self._publish(self.ledger.dump())

    def clear(self) -> None:
        """The engine holds nothing: tell it now, whenever its own event may come."""
        self._publish(self.ledger.clear())

    def _on_payload(self, payload: bytes) -> None:
        try:
            events = self._decoder.decode(payload)
        except ValueError as error:
            log.warning("rank %d: %s", self.rank, error)
            self._on_gap(1)
            return
        self._publish(self.ledger.apply(events))

    def _on_gap(self, count: int) -> None:
        log.warning("rank %d: %d messages of KV events are lost", self.rank, count)
        self.dump()

    def _publish(self, events: list[KvEvent]) -> None:
        if events:
            self._sink.events(self.rank, events)
