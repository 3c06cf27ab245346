"""The indexer process: follows KV events, serves overlap queries, requests dumps after gaps."""

import asyncio
import logging
import random
import time
from dataclasses import asdict

import msgspec
from prometheus_client import REGISTRY

from kvmesh.bus.discovery.directory import READY, Directory
from kvmesh.bus.discovery.leases import STATE, Lease
from kvmesh.bus.discovery.worker_reports import follow_loads
from kvmesh.bus.errors import BusError, BusUnavailable, cause
from kvmesh.bus.messages import ControlReply, Dump, Instance, Load, MessageDecoder, RankKey, Role
from kvmesh.bus.ticks import next_tick
from kvmesh.index import create_index
from kvmesh.indexer.checker import IndexChecker, questions
from kvmesh.indexer.feed import Feed
from kvmesh.indexer.metrics import StateCollector
from kvmesh.indexer.queries.query_server import SHARD, QueryServer
from kvmesh.indexer.rank_state import MAX_BLOCKS, WHOLE_INDEX, RankStates
from kvmesh.indexer.readiness import IndexerReadiness
from kvmesh.indexer.removed_blocks import RemovedBlocks
from kvmesh.indexer.shards import Shard
from kvmesh.indexer.shortfall import Shortfall
from kvmesh.indexer.snapshots.snapshotter import Snapshotter, SnapshotThresholds
from kvmesh.runtime.service import VERSION, Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import publish_warnings

log = logging.getLogger(__name__)
_replies = MessageDecoder(ControlReply)
TICK_S, LAG_S, REST_S = 0.05, 0.5, 1.0  # while ranks are unknown, behind the stream, otherwise
SWEEP_S = 1.0
CAPACITY_CHECK_S = 10.0
DUMP_TIMEOUT_S = 10.0  # a machine with a thousand engines takes seconds
OPEN_S = 5.0
MAX_DUMP_REQUESTS = 64


class IndexerService:
    """One replica; it is ready and in the queue group only while its state is current."""

    def __init__(self, service: Service) -> None:
        settings = service.settings.indexer
        self._service = service
        self._bus = service.bus
        self.shard = _shard(service)
        removed = RemovedBlocks(settings.removed_blocks, time.time)
        self.states = RankStates(create_index(), self.shard, removed)
        self.feed = Feed(service.bus, self.states)
        self.queries = QueryServer(
            service.bus, self.states, self.feed, settings.shard_timeout_s, service.instance
        )
        thresholds = SnapshotThresholds.of(settings, service.limits)
        self.snapshotter = Snapshotter(service.bus, self.states, self.feed, thresholds)
        self.readiness = IndexerReadiness(settings.lag_limit_s)
        self.checker = IndexChecker(service.bus, self.states)
        self.shortfall = Shortfall()
        self._directory = Directory(service.bus, service.limits, self._joined, self._left)
        self._lease = Lease(service.bus, self._card("catching up"), service.limits)
        self._unknown = asyncio.Event()
        self.states.on_unknown = self._unknown.set
        self._dump_slots = asyncio.Semaphore(MAX_DUMP_REQUESTS)
        self._asked: set[RankKey] = set()

    def _joined(self, card: Instance) -> None:
        self.states.joined(card)
        self.queries.joined(card)

    def _left(self, card: Instance) -> None:
        self.states.left(card)
        self.queries.left(card)
        self.shortfall.forget(card.instance)

    def _card(self, state: str) -> Instance:
        service = self._service
        return Instance(
            instance=service.instance,
            role=Role.INDEXER,
            name=service.name,
            version=VERSION,
            started=time.time(),
            labels={STATE: state, SHARD: self.shard.label},
            completes_prompts=True,
        )

    @property
    def ready(self) -> bool:
        return self.queries.is_open

    def figures(self) -> dict[str, float]:
        """Every figure that `metrics` names."""
        feed, queries, snapshotter = self.feed, self.queries, self.snapshotter
        stats = self.states.index.stats()
        return {
            **asdict(self.states.counts),
            **asdict(feed.counts),
            **asdict(queries.counts),
            **asdict(snapshotter.counts),
            **asdict(self.checker.counts),
            "blocks": stats.blocks,
            "entries": stats.entries,
            "memory_bytes": stats.bytes,
            "ranks": self.states.ranks,
            "unknown_ranks": self.states.unknown,
            "pending": feed.pending,
            "lag_seconds": feed.lag,
            "applied_seq": feed.applied,
            "snapshot_seq": snapshotter.covered,
            "snapshot_bytes": snapshotter.size,
            "ready": float(queries.is_open),
        }

    async def run(self) -> None:
        """Serve until the service is stopped; raises BusUnavailable if the start fails."""
        stopping = self._service.stopping
        try:
            await self._start()
        except (BusError, OSError, TimeoutError) as error:
            raise BusUnavailable(self._bus.options.url, error) from error
        if not stopping.is_set():
            self._service.start_watchdog()
            self._service.spawn(self._update_readiness(), "readiness")
            self._service.spawn(self._repair(), "repair")
            warnings = publish_warnings(lambda: self._lease, self._service.warnings)
            self._service.spawn(warnings, "warnings")
            self._service.spawn(self.snapshotter.run(self._is_leader), "snapshots")
            # Answer operators' questions about the index, and check it by itself
            subject = self._bus.subjects.ask(self._service.instance)
            await self._bus.serve(subject, questions, self.checker.answer)
            interval_s = self._service.settings.indexer.check_interval_s
            if interval_s and self.shard == WHOLE_INDEX:
                self._service.spawn(self.checker.run(interval_s), "checks")
            await stopping.wait()
        await self.queries.close()
        await self.feed.close()
        await self._directory.close()
        await self._lease.close()

    async def _start(self) -> None:
        """Restore the newest snapshot and replay the stream from there."""
        await self._lease.open()
        if self._service.settings.indexer.reset_states:
            await self.snapshotter.reset()
        covered, stored = await self.snapshotter.restore()
        await self._directory.open()
        await self.feed.open(covered, stored)
        if self.shard == WHOLE_INDEX:  # a shard does not know its share of a rank's blocks
            await follow_loads(self._bus, self._on_load)
        await self.feed.catch_up(self._service.stopping)
        self.states.reconcile()

    def _on_load(self, load: Load) -> None:
        if load.instance in self.states.incarnations:
            self.shortfall.record(load)

    # --- readiness

    async def _update_readiness(self) -> None:
        """Join the queue group while current; leave it while lagging."""
        while not self._service.stopping.is_set():
            ready = self.readiness.update(self.feed.lag)
            if ready and not self.queries.is_open:
                await self._serve_queries()
            elif self.queries.is_open and not ready:
                await self.queries.close()
                await self._publish_state("lagging")
                log.warning("not ready: %.1f s behind the KV stream", self.feed.lag)
            await next_tick(LAG_S if self.feed.lag or not self.queries.is_open else REST_S)

    async def _serve_queries(self) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                await self.queries.open()
        except (BusError, TimeoutError) as error:
            log.warning("cannot serve queries yet, retrying: %s", cause(error))
            await self.queries.close()
            return
        await self._publish_state(READY)
        blocks = self.states.index.stats().blocks
        log.info("ready: %d blocks, %d ranks", blocks, self.states.ranks)

    async def _publish_state(self, state: str) -> None:
        labels = {**self._lease.card.labels, STATE: state}
        try:
            await self._lease.update(msgspec.structs.replace(self._lease.card, labels=labels))
        except BusError as error:
            log.debug("card not updated, the next renewal does it: %s", error)

    def _is_leader(self) -> bool:
        """True if this replica writes the shard's snapshots: the oldest ready one does."""
        peers = [
            (card.started, card.instance)
            for card in self._directory.instances
            if card.role is Role.INDEXER
            and card.labels.get(SHARD) == self.shard.label
            and card.labels.get(STATE) == READY
        ]
        return self.ready and bool(peers) and min(peers)[1] == self._service.instance

    # --- repair

    async def _repair(self) -> None:
        """Request dumps, drop dead instances and check the ranks' sizes, until cancelled."""
        delay = random.uniform(0, 4 * TICK_S)  # differs by replica, as one dump serves all
        swept = checked = 0.0
        while True:
            self._unknown.clear()
            if self.states.unknown:
                await next_tick(TICK_S)
            else:
                await next_tick(REST_S, self._unknown)
            now = asyncio.get_running_loop().time()
            for key in self.states.due_dumps(now, delay):
                if key not in self._asked:
                    self._asked.add(key)
                    self._service.spawn(self._request_dump(key), "dump")
            self.queries.probe(now)
            if now > swept + SWEEP_S - TICK_S:
                swept = now
                self.states.sweep(now, self._directory.lease_s)
                self._service.warnings.update("index_full", _full(self.states.full))
                if self.ready:
                    short = self.shortfall.check(self.states.blocks_by_rank())
                    self._service.warnings.update("index_short", short)
            if now > checked + CAPACITY_CHECK_S:
                checked = now
                self._check_capacity()

    def _check_capacity(self) -> None:
        for key in self.states.mark_excessive_unknown():
            log.error("rank %d of %s reports more blocks than its capacity", key.rank, key.instance)

    async def _request_dump(self, key: RankKey) -> None:
        subject = self._bus.subjects.dump(key.instance)
        async with self._dump_slots:
            self.states.counts.dump_requests += 1
            try:
                reply = await self._bus.request(subject, Dump(key.rank), _replies, DUMP_TIMEOUT_S)
            except BusError as error:
                log.warning("no dump of rank %d of %s: %s", key.rank, key.instance, error)
                return
            finally:
                self._asked.discard(key)
        if reply.ok:
            log.info("requested a dump of rank %d of %s", key.rank, key.instance)
        else:
            log.warning("rank %d of %s refuses a dump: %s", key.rank, key.instance, reply.reason)


def _full(workers: list[str]) -> dict[str, str]:
    return {
        name: f"{name} reports more than the {MAX_BLOCKS:,} blocks that the index holds of a worker"
        for name in workers
    }


def _shard(service: Service) -> Shard:
    settings = service.settings.indexer
    try:
        return Shard(settings.shard, settings.shards, settings.shard_by)
    except ValueError as error:
        raise StartError(f"indexer: {error}", permanent=True) from error


async def main(service: Service) -> None:
    """Run an indexer until the service is stopped."""
    indexer = IndexerService(service)
    collector = StateCollector(indexer.figures)
    REGISTRY.register(collector)
    metrics = None
    try:
        settings = service.settings.indexer
        metrics = await serve_metrics(
            service.settings.process, settings.metrics_port, lambda: indexer.ready, service.warnings
        )
        await indexer.run()
    finally:
        REGISTRY.unregister(collector)
        if metrics is not None:
            await metrics.cleanup()
