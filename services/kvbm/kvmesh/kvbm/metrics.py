"""The metrics of a kvbm, read from its state when scraped: requests count plain integers."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.kvbm.core.blocks.block import REMOTE, TIERS
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.peers.compatibility import PeerCompatibility
from kvmesh.kvbm.worker_server import WorkerServer

PREFIX = "kvmesh_kvbm_"


class ManagerCollector(Collector):
    """Exports what a manager and its desk know, and how the nodes are divided."""

    def __init__(self, manager: Manager, desk: WorkerServer, divisions: PeerCompatibility) -> None:
        self._manager = manager
        self._desk = desk
        self._divisions = divisions

    def collect(self) -> Iterable[Metric]:
        yield from self._tiers()
        yield from self._paths()
        yield from self._plain()
        yield from self._reasons()

    def _tiers(self) -> Iterator[Metric]:
        store = self._manager.store
        blocks = _gauge("blocks", "Blocks in a tier", "tier")
        used = _gauge("used_bytes", "Bytes of blocks in a tier", "tier")
        size = _gauge("capacity_bytes", "Size of a tier", "tier")
        kept = _gauge("kept_bytes", "Bytes kept longer because it was asked for", "tier")
        evicted = _counter("evicted_blocks", "Blocks evicted to make room", "tier")
        for number, tier in store.tiers.items():
            label = [str(number)]
            blocks.add_metric(label, len(tier.copies))
            used.add_metric(label, tier.slots.used)
            size.add_metric(label, tier.slots.capacity)
            kept.add_metric(label, sum(tier.promises.charged.values()))
            evicted.add_metric(label, tier.evicted)
        if store.far is not None:
            blocks.add_metric([str(REMOTE)], len(store.far))
        yield from (blocks, used, size, kept, evicted)
        hits = _counter("hit_blocks", "Blocks asked for that a tier had", "tier")
        onboarded = _counter("onboarded_blocks", "Blocks given to workers", "tier")
        for number in TIERS:
            hits.add_metric([str(number)], store.counts.hits[number])
            onboarded.add_metric([str(number)], store.counts.onboarded[number])
        yield from (hits, onboarded)

    def _paths(self) -> Iterator[Metric]:
        moved = _counter("moved_bytes", "Bytes moved between tiers", "source", "target")
        done = _counter("moved_blocks", "Blocks moved between tiers", "source", "target")
        failed = _counter("failed_moves", "Moves that failed", "source", "target")
        moving = _gauge("moving_blocks", "Blocks being moved", "source", "target")
        speed = _gauge("bytes_per_second", "Measured speed of a path", "source", "target")
        for (source, target), traffic in self._manager.store.traffic.items():
            label = [str(source), str(target)]
            moved.add_metric(label, traffic.bytes)
            done.add_metric(label, traffic.done)
            failed.add_metric(label, traffic.failed)
            moving.add_metric(label, traffic.moving)
            speed.add_metric(label, traffic.bps)
        yield from (moved, done, failed, moving, speed)

    def _plain(self) -> Iterator[Metric]:
        manager, counts = self._manager, self._manager.store.counts
        fetches, offers = manager.fetches, manager.offers
        for name, text, value in (
            ("requests", "Requests of workers", self._desk.requests),
            ("malformed_requests", "Requests that could not be read", self._desk.malformed),
            ("offered_blocks", "Blocks offered that the arena did not have", counts.offered),
            ("written_blocks", "Blocks written by workers", counts.written),
            ("corrupt_blocks", "Blocks dropped because of their checksum", counts.corrupt),
            ("declined_blocks", "Blocks not loaded because computing is faster", counts.declined),
            ("lent_blocks", "Blocks that other nodes could read", counts.lent),
            ("prepared_blocks", "Blocks made ready for other nodes", counts.prepared),
            ("waits", "Fetches that waited for another worker of the node", counts.waits),
            ("peer_waits", "Fetches that waited for another node", counts.further),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in (
            ("lookups_pending", "Fetches that wait for the remote store", fetches.looking),
            ("workers", "Workers attached", len(manager.guests)),
            ("sessions", "Sessions followed", manager.keeping.sessions),
            ("reading_tickets", "Tickets of workers that read", len(fetches.readings)),
            ("writing_tickets", "Tickets of workers that write", len(offers.writings)),
            ("staged_bytes", "Bytes that workers are writing", offers.staged),
            (
                "announced_blocks",
                "Blocks that workers have said they compute",
                len(manager.announced),
            ),
            ("claims", "Prompts that other nodes are told this one computes", len(manager.claims)),
            ("heard_claims", "Prompts that other nodes say they compute", len(manager.others)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)

    def _reasons(self) -> Iterator[Metric]:
        refused = _counter("refused_blocks", "Blocks offered and not wanted", "reason")
        for reason, count in self._manager.store.counts.skipped.items():
            refused.add_metric([reason], count)
        outcomes = _counter(
            "retention_outcomes", "What came of explicit retention", "tier", "outcome"
        )
        for number, tier in self._manager.store.tiers.items():
            for outcome, count in tier.promises.outcomes.counts.items():
                outcomes.add_metric([str(number), outcome], count)
        text = "Other nodes with which no blocks of a model are shared: they differ in layout"
        divided = _gauge("divided_nodes", text, "model")
        for model, nodes in self._divisions.nodes.items():
            divided.add_metric([model], nodes)
        yield from (refused, outcomes, divided)
        text = "Other nodes with which no blocks at all are shared: their key is another"
        yield GaugeMetricFamily(PREFIX + "strange_nodes", text, value=self._divisions.strangers)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)
