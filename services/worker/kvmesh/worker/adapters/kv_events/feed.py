"""Forwards one rank's KV events from the engine's publisher to the sink, through a ledger."""

import logging
from dataclasses import replace

from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import KvEvent
from kvmesh.worker.adapters.kv_events.decoder import EventDecoder, MalformedEvents
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.paced_dumps import PacedDumps
from kvmesh.worker.adapters.kv_events.subscriber import ZmqSubscriber
from kvmesh.worker.engine import Sink
from kvmesh.worker.enginecore.counters import LedgerCounts

log = logging.getLogger(__name__)


class EventFeed:
    """Follows `endpoint` and tracks the rank's blocks in `ledger`, also while it has no sink.

    It requests missed messages from `replay`. Messages lost for good leave the ledger unchanged; a
    dump makes the index agree with it, and later events of the engine correct both. Messages with
    events that cannot be decoded are counted: a dump would not mend their loss.
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
        self._malformed = self._lost = 0
        self._last_error = ""
        self._decoder = EventDecoder()
        self._logged = LogOnce()
        self._dumps = PacedDumps(lambda: self._publish(self.ledger.dump()))
        self._subscriber = ZmqSubscriber(
            endpoint,
            replay,
            topic,
            on_payload=self._on_payload,
            on_restart=self.clear,
            on_gap=self._on_gap,
            on_foreign=self._on_malformed,
        )

    def start(self) -> None:
        self._subscriber.start()

    async def close(self) -> None:
        self._dumps.close()
        await self._subscriber.close()

    @property
    def counts(self) -> LedgerCounts:
        counts = self.ledger.counts(self.rank, self._malformed, self._last_error)
        return replace(counts, lost=self._lost, limits=sorted(self._decoder.limits))

    def dump(self) -> None:
        """Send all blocks in the ledger to the sink."""
        self._dumps.make()

    def clear(self) -> None:
        """Clear the ledger and the index: the engine has restarted with an empty cache."""
        self._decoder = EventDecoder(self._decoder.has_keys)
        self._publish(self.ledger.clear())

    def _on_payload(self, payload: bytes) -> None:
        try:
            events = self._decoder.decode(payload)
        except MalformedEvents as error:
            self._on_malformed(str(error))
            events = error.others
        self._publish(self.ledger.apply(events))

    def _on_malformed(self, error: str) -> None:
        self._malformed += 1
        self._last_error = error
        if self._logged.first(error):
            log.warning("rank %d: %s", self.rank, error)

    def _on_gap(self, count: int) -> None:
        self._lost += count
        log.warning("rank %d: %d messages of KV events are lost", self.rank, count)
        self._dumps.request()

    def _publish(self, events: list[KvEvent]) -> None:
        if events and self.sink is not None:
            self.sink.events(self.rank, events)
