"""Prometheus metrics of a kvbm, read from its plain counters when scraped."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.kvbm.core.blocks.block import REMOTE, TIERS
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.peers.compatibility import PeerCompatibility
from kvmesh.kvbm.worker_server import WorkerServer

PREFIX = "kvmesh_kvbm_"


class ManagerCollector(Collector):
    """Exports the counters of the manager and its server, and the peers' compatibility."""

    def __init__(
        self, manager: Manager, server: WorkerServer, compatibility: PeerCompatibility
    ) -> None:
        self._manager = manager
        self._server = server
        self._compatibility = compatibility

    def collect(self) -> Iterable[Metric]:
        yield from self._tiers()
        yield from self._paths()
        yield from self._plain()
        yield from self._reasons()
        yield from self._returns()

    def _tiers(self) -> Iterator[Metric]:
        store = self._manager.store
        blocks = _gauge("blocks", "Blocks in a tier", "tier")
        used = _gauge("used_bytes", "Bytes of blocks in a tier", "tier")
        size = _gauge("capacity_bytes", "Size of a tier", "tier")
        retained = _gauge("retained_bytes", "Bytes with explicit retention", "tier")
        evicted = _counter("evicted_blocks", "Blocks evicted to free space", "tier")
        for number, tier in store.tiers.items():
            label = [str(number)]
            blocks.add_metric(label, len(tier.copies))
            used.add_metric(label, tier.slots.used)
            size.add_metric(label, tier.slots.capacity)
            retained.add_metric(label, sum(tier.budget.charged.values()))
            evicted.add_metric(label, tier.evicted)
        if store.remote is not None:
            blocks.add_metric([str(REMOTE)], len(store.remote))
        yield from (blocks, used, size, retained, evicted)
        hits = _counter("hit_blocks", "Fetched blocks that a tier had", "tier")
        onboarded = _counter("onboarded_blocks", "Blocks loaded by workers, by source tier", "tier")
        for number in TIERS:
            hits.add_metric([str(number)], store.counts.hits[number])
            onboarded.add_metric([str(number)], store.counts.onboarded[number])
        yield from (hits, onboarded)

    def _paths(self) -> Iterator[Metric]:
        moved = _counter("moved_bytes", "Bytes moved between tiers", "source", "target")
        done = _counter("moved_blocks", "Blocks moved between tiers", "source", "target")
        failed = _counter("failed_moves", "Moves that failed", "source", "target")
        moving = _gauge("moving_blocks", "Blocks being moved", "source", "target")
        speed = _gauge(
            "bytes_per_second", "Measured speed of a path; 0 if unknown", "source", "target"
        )
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
        onboarding, write_through = manager.onboarding, manager.write_through
        restored = manager.store.restored
        for name, text, value in (
            ("requests", "Requests of workers and peers", self._server.requests),
            ("malformed_requests", "Requests that could not be decoded", self._server.malformed),
            ("offered_blocks", "Offered blocks that the arena did not have", counts.offered),
            ("written_blocks", "Blocks written by workers", counts.written),
            ("corrupt_blocks", "Blocks dropped for a wrong checksum", counts.corrupt),
            ("declined_blocks", "Blocks not loaded as computing them is faster", counts.declined),
            (
                "outwaited_blocks",
                "Blocks no longer waited for as computing them was faster",
                counts.outwaited,
            ),
            ("lent_blocks", "Blocks lent to other nodes", counts.lent),
            ("prepared_blocks", "Blocks made ready for other nodes", counts.prepared),
            ("restored_bytes", "Bytes loaded into memory before a return", restored.bytes),
            ("restored_read_bytes", "Restored bytes that were read", restored.read_bytes),
            ("restored_lost_bytes", "Restored bytes evicted unread", restored.lost_bytes),
            ("waits", "Fetches that waited for another worker of the node", counts.waits),
            ("peer_waits", "Fetches that waited for another node", counts.peer_waits),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in (
            (
                "lookups_pending",
                "Fetches with a pending lookup beyond the node",
                onboarding.pending_lookups,
            ),
            ("workers", "Workers attached", len(manager.attachments.workers)),
            ("sessions", "Sessions with recorded prompts", manager.retention.sessions),
            ("read_tickets", "Tickets of workers that read", len(onboarding.tickets)),
            ("write_tickets", "Tickets of workers that write", len(write_through.tickets)),
            (
                "restores",
                "1 while blocks are restored before returns: they are mostly read",
                manager.restoring.mode == "on",
            ),
            ("staged_bytes", "Bytes that workers are writing", write_through.staged),
            (
                "in_progress_blocks",
                "Blocks that workers compute now",
                len(manager.in_progress),
            ),
            ("claims", "Published claims of prompts that this node computes", len(manager.claims)),
            (
                "peer_claims",
                "Received claims of prompts that peers compute",
                len(manager.peer_claims),
            ),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)

    def _reasons(self) -> Iterator[Metric]:
        refused = _counter("refused_blocks", "Offered blocks that the kvbm refused", "reason")
        for reason, count in self._manager.store.counts.refused.items():
            refused.add_metric([reason], count)
        outcomes = _counter(
            "retention_outcomes", "Outcomes of explicit retention", "tier", "outcome"
        )
        for number, tier in self._manager.store.tiers.items():
            for outcome, count in tier.budget.outcomes.counts.items():
                outcomes.add_metric([str(number), outcome], count)
        text = "Other nodes that share no blocks of a model as their layouts differ"
        incompatible = _gauge("incompatible_layout_nodes", text, "model")
        for model, nodes in self._compatibility.incompatible_layouts.items():
            incompatible.add_metric([model], nodes)
        yield from (refused, outcomes, incompatible)
        text = "Other nodes that share no blocks at all as their keys differ"
        nodes = self._compatibility.incompatible_keys
        yield GaugeMetricFamily(PREFIX + "incompatible_key_nodes", text, value=nodes)

    def _returns(self) -> Iterator[Metric]:
        manager = self._manager
        forecasts = _counter(
            "return_forecasts", "Forecasts of returns by what came of them", "result"
        )
        for result, count in manager.returns.forecasts.items():
            forecasts.add_metric([result], count)
        returns = _counter(
            "returns",
            "Prompts with a forecast that returned: all blocks held, or some lost",
            "blocks",
        )
        for blocks, count in manager.returns.returns.items():
            returns.add_metric([blocks], count)
        kept_off = _counter(
            "not_offloaded_blocks", "Blocks not written to a tier, as that would not pay", "tier"
        )
        for tier, offload in manager.offloads.items():
            kept_off.add_metric([str(tier)], offload.not_worth)
        yield from (forecasts, returns, kept_off)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)
