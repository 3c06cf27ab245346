"""Forwards one rank's KV events from the engine's publisher to the sink, through a ledger."""

import logging

from kvmesh.bus.messages import KvEvent
from kvmesh.worker.adapters.cache_ledger import CacheLedger
from kvmesh.worker.adapters.zmq_events import EventDecoder, ZmqSubscriber
from kvmesh.worker.engine import Sink

log = logging.getLogger(__name__)


class EventFeed:
    """Follows `endpoint` and tracks the rank's blocks in `ledger`, also while it has no sink.

    It requests missed messages from `replay`. Messages lost for good leave the ledger unchanged; a
    dump makes the index agree with it, and later events of the engine correct both.
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
        self.sink: Sink | None = sink
        self._decoder = EventDecoder()
        self._subscriber = ZmqSubscriber(
            endpoint, replay, topic, self._on_payload, self.clear, self._on_gap
        )

    def start(self) -> None:
        self._subscriber.start()

    async def close(self) -> None:
        await self._subscriber.close()

    def dump(self) -> None:
        """Send all blocks in the ledger to the sink."""
        self._publish(self.ledger.dump())

    def clear(self) -> None:
        """Clear the ledger and the index: the engine has restarted with an empty cache."""
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
        if events and self.sink is not None:
            self.sink.events(self.rank, events)
