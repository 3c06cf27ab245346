"""The simulated index: the live one's core, which learns late of what engines hold, or never."""

from collections import deque
from collections.abc import Mapping
from random import Random

from kvmesh.bus.messages import Instance, KvEvent, RankKey, Removed
from kvmesh.hashing import HASH_BYTES
from kvmesh.index import create_index
from kvmesh.indexer.decoding import Events
from kvmesh.indexer.rank_state import RankStates
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.simulator.fleet import SimulatedWorker
from kvmesh.simulator.options import Network
from kvmesh.simulator.virtual_clock import VirtualClock

NOBODY = RankKey("", 0)


class Index:
    """Takes KV events some time after they were published; lost ones make gaps, dumps heal them.

    What has arrived is only taken in when somebody asks: before, it does not matter.
    """

    def __init__(
        self,
        agenda: VirtualClock,
        workers: Mapping[str, SimulatedWorker],
        network: Network,
        seed: int,
    ) -> None:
        self.holdings = RankStates(create_index())
        self._agenda = agenda
        self._workers = workers
        self._network = network
        self._losses = Random(f"{seed} losses")
        self._under_way: deque[tuple[float, Events]] = deque()
        self._rank_names: list[RankKey] = []
        self._ranks_size = (0, 0)

    def join(self, card: Instance) -> None:
        self.holdings.joined(card)

    def leave(self, card: Instance) -> None:
        """Forget a worker, whose last words have been heard if they had the time."""
        self.hear(self._agenda.now)
        self.holdings.left(card)
        self._ranks_size = (0, 0)

    def publish(self, worker: SimulatedWorker, events: list[KvEvent]) -> None:
        """Send what changed in a worker's cache on its way."""
        first = worker.event_id
        worker.event_id += len(events)
        for event in events:
            if isinstance(event, Removed):
                worker.record.evicted_blocks += len(event.engine) // HASH_BYTES
        network = self._network
        if network.event_loss and self._losses.random() < network.event_loss:
            return
        now = self._agenda.now
        batch = Events(worker.source, worker.instance, 0, first, now, events)
        self._under_way.append((now + network.kv_events, batch))

    def find(self, sequence: bytes) -> Overlaps:
        self.hear(self._agenda.now)
        return Overlaps(self._ranks(), self.holdings.index.find(sequence))

    def hear(self, now: float) -> None:
        """Take in what has arrived by `now`, and ask for dumps where something is missing."""
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            self.holdings.apply(under_way.popleft()[1])
        if not self._network.event_loss:
            return
        for key in self.holdings.due_dumps(now, self._network.dump):
            worker = self._workers.get(key.instance)
            if worker is not None:
                self.publish(worker, worker.core.dump())

    def _ranks(self) -> list[RankKey]:
        """The names of the index's ranks; a new list whenever they change."""
        holdings = self.holdings
        size = (len(holdings.keys), holdings.ranks)
        if size != self._ranks_size:
            self._ranks_size = size
            self._rank_names = [key or NOBODY for key in holdings.keys]
        return self._rank_names
