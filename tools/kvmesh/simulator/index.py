"""The simulated index: the indexer's own core behind a network that delays and loses events."""

from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Protocol

from kvmesh.bus.messages import Instance, KvEvent, RankKey, Removed
from kvmesh.hashing import HASH_BYTES
from kvmesh.index import create_index
from kvmesh.indexer.decoding import Events, EventSource
from kvmesh.indexer.rank_state import RankStates
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.simulator.options import Network
from kvmesh.simulator.records import WorkerRecord
from kvmesh.simulator.virtual_clock import VirtualClock

NO_RANK = RankKey("", 0)


class EventPublisher(Protocol):
    """A worker or a kvbm; `event_id` is the id of its next event."""

    source: EventSource
    instance: str
    event_id: int
    record: WorkerRecord

    def dump(self) -> list[KvEvent]:
        """All its blocks as events, after a `Cleared`."""
        ...


class SimulatedIndex:
    """Applies KV events after a delay; lost batches cause gaps, which dumps repair.

    Events that have arrived are applied at the next query: only queries depend on them.
    """

    def __init__(
        self,
        clock: VirtualClock,
        publishers: Mapping[str, EventPublisher],
        network: Network,
        seed: int,
    ) -> None:
        self.rank_states = RankStates(create_index())
        self._clock = clock
        self._publishers = publishers
        self._network = network
        self._losses = Random(f"{seed} losses")
        self._in_transit: deque[tuple[float, Events]] = deque()
        self._rank_names: list[RankKey] = []
        self._ranks_size = (0, 0)

    def join(self, card: Instance) -> None:
        self.rank_states.joined(card)

    def leave(self, card: Instance) -> None:
        """Remove a worker, after applying those of its events that have arrived."""
        self.receive(self._clock.now)
        self.rank_states.left(card)
        self._ranks_size = (0, 0)

    def publish(self, publisher: EventPublisher, events: list[KvEvent]) -> None:
        """Put KV events in transit, or drop them as lost."""
        first = publisher.event_id
        publisher.event_id += len(events)
        for event in events:
            if isinstance(event, Removed):
                publisher.record.evicted_blocks += len(event.engine) // HASH_BYTES
        network = self._network
        if network.event_loss and self._losses.random() < network.event_loss:
            return
        now = self._clock.now
        batch = Events(publisher.source, publisher.instance, 0, first, now, events)
        self._in_transit.append((now + network.kv_events, batch))

    def find(self, sequence_hashes: bytes) -> Overlaps:
        self.receive(self._clock.now)
        return Overlaps(self._ranks(), self.rank_states.index.find(sequence_hashes))

    def receive(self, now: float) -> None:
        """Apply the batches that have arrived by `now`; request dumps of ranks with gaps."""
        in_transit = self._in_transit
        while in_transit and in_transit[0][0] <= now:
            self.rank_states.apply(in_transit.popleft()[1])
        if not self._network.event_loss:
            return
        for key in self.rank_states.due_dumps(now, self._network.dump):
            publisher = self._publishers.get(key.instance)
            if publisher is not None:
                self.publish(publisher, publisher.dump())

    def _ranks(self) -> list[RankKey]:
        """Keys of the ranks by index slot; a new list whenever the ranks change."""
        rank_states = self.rank_states
        size = (len(rank_states.keys), rank_states.ranks)
        if size != self._ranks_size:
            self._ranks_size = size
            self._rank_names = [key or NO_RANK for key in rank_states.keys]
        return self._rank_names
