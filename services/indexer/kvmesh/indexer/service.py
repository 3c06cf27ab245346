"""The indexer process: follows the KV events, answers overlap queries, repairs what was missed."""

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import asdict

import msgspec
from prometheus_client import REGISTRY

from kvmesh.bus.discovery import READY, STATE, Directory, Lease
from kvmesh.bus.engine_loads import follow_loads
from kvmesh.bus.errors import BusError, BusUnavailable
from kvmesh.bus.messages import ControlReply, Dump, Instance, Load, RankKey, Role
from kvmesh.index import create_index
from kvmesh.indexer.feed import Feed
from kvmesh.indexer.metrics import StateCollector
from kvmesh.indexer.queries.query_server import SHARD, QueryServer
from kvmesh.indexer.queries.shards import Shard
from kvmesh.indexer.rank_state import WHOLE, RankStates
from kvmesh.indexer.readiness import IndexerReadiness
from kvmesh.indexer.shortfall import Shortfall
from kvmesh.indexer.snapshots.snapshotter import Snapshotter, SnapshotThresholds
from kvmesh.runtime.service import VERSION, Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.runtime.warnings import publish_warnings

log = logging.getLogger(__name__)
_replies = msgspec.msgpack.Decoder(ControlReply)
TICK_S = 0.05
SWEEP_S = 1.0
CURB_S = 10.0
DUMP_TIMEOUT_S = 1.0
MAX_ASKING = 64


class IndexerService:
    """One replica. Ready, and in the queue group, only while its state is current."""

    def __init__(self, service: Service) -> None:
        settings = service.settings.indexer
        self._service = service
        self._bus = service.bus
        self.shard = _shard(service)
        self.holdings = RankStates(create_index(), self.shard)
        self.feed = Feed(service.bus, self.holdings)
        self.desk = QueryServer(
            service.bus, self.holdings, self.feed, settings.shard_timeout_s, service.instance
        )
        thresholds = SnapshotThresholds.of(settings, service.limits)
        self.keeper = Snapshotter(service.bus, self.holdings, self.feed, thresholds)
        self.readiness = IndexerReadiness(settings.lag_limit_s)
        self.dump_requests = 0
        self.shortfall = Shortfall()
        self._directory = Directory(service.bus, service.limits, self._joined, self._left)
        self._lease = Lease(service.bus, self._card("catching up"), service.limits)
        self._asking = asyncio.Semaphore(MAX_ASKING)

    def _joined(self, card: Instance) -> None:
        self.holdings.joined(card)
        self.desk.joined(card)

    def _left(self, card: Instance) -> None:
        self.holdings.left(card)
        self.desk.left(card)
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
        )

    @property
    def ready(self) -> bool:
        return self.desk.is_open

    async def run(self) -> None:
        """Serve until the service is told to stop. Raises BusUnavailable if it cannot begin."""
        stopping = self._service.stopping
        try:
            await self._begin()
        except (BusError, OSError, TimeoutError) as error:
            raise BusUnavailable(self._bus.options.url, error) from error
        if not stopping.is_set():
            self._service.start_watchdog()
            self._service.spawn(self._follow(), "readiness")
            self._service.spawn(self._repair(), "repair")
            telling = publish_warnings(lambda: self._lease, self._service.warnings)
            self._service.spawn(telling, "warnings")
            self._service.spawn(self.keeper.run(self._leads), "snapshots")
            await stopping.wait()
        await self.desk.close()
        await self.feed.close()
        await self._directory.close()
        await self._lease.close()

    async def _begin(self) -> None:
        """From a snapshot and the stream to the present."""
        await self._lease.open()
        if self._service.settings.indexer.reset_states:
            await self.keeper.reset()
        covered, stored = await self.keeper.restore()
        await self._directory.open()
        await self.feed.open(covered, stored)
        if self.shard == WHOLE:  # no other replica knows how much a part of the index should hold
            await follow_loads(self._bus, self._on_load)
        await self.feed.catch_up(self._service.stopping)
        self.holdings.reconcile()

    def _on_load(self, load: Load) -> None:
        if load.instance in self.holdings.lives:
            self.shortfall.take(load)

    # --- readiness

    async def _follow(self) -> None:
        """Join the queue group while current; leave it while lagging."""
        while not self._service.stopping.is_set():
            ready = self.readiness.update(self.feed.lag)
            if ready and not self.desk.is_open:
                await self.desk.open()
                await self._tell(READY)
                blocks = self.holdings.index.stats().blocks
                log.info("ready: %d blocks, %d ranks", blocks, self.holdings.ranks)
            elif self.desk.is_open and not ready:
                await self.desk.close()
                await self._tell("lagging")
                log.warning("%.1f s behind the KV stream: not answering", self.feed.lag)
            await asyncio.sleep(TICK_S * 5)

    async def _tell(self, state: str) -> None:
        labels = {**self._lease.card.labels, STATE: state}
        try:
            await self._lease.update(msgspec.structs.replace(self._lease.card, labels=labels))
        except BusError as error:
            log.debug("the card will change with the next renewal: %s", error)

    def _leads(self) -> bool:
        """The longest-serving ready replica of a shard writes its snapshots."""
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
        """Ask for dumps and forget the dead, for as long as the service lives."""
        delay = random.uniform(0, 4 * TICK_S)  # apart from other replicas: one dump serves all
        swept = curbed = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = asyncio.get_running_loop().time()
            for key in self.holdings.due(now, delay):
                self._service.spawn(self._ask(key), "dump")
            self.desk.probe(now)
            if now > swept + SWEEP_S:
                swept = now
                self.holdings.sweep(now, self._directory.lease_s)
                if self.ready:
                    short = self.shortfall.look(self.holdings.blocks_by_rank())
                    self._service.warnings.update("index_short", short)
            if now > curbed + CURB_S:
                curbed = now
                self._curb()

    def _curb(self) -> None:
        for key in self.holdings.curb():
            log.error("rank %d of %s tells of more blocks than it has", key.rank, key.instance)

    async def _ask(self, key: RankKey) -> None:
        subject = self._bus.subjects.dump(key.instance)
        async with self._asking:
            self.dump_requests += 1
            try:
                reply = await self._bus.request(subject, Dump(key.rank), _replies, DUMP_TIMEOUT_S)
            except BusError as error:
                log.warning("rank %d of %s did not dump: %s", key.rank, key.instance, error)
                return
        if reply.ok:
            log.info("asked rank %d of %s for a dump", key.rank, key.instance)
        else:
            log.warning("rank %d of %s will not dump: %s", key.rank, key.instance, reply.reason)

    # --- metrics

    def measures(self) -> Mapping[str, float]:
        """Every figure that `metrics` names."""
        stats = self.holdings.index.stats()
        return {
            **asdict(self.holdings.counts),
            "messages": self.feed.messages,
            "malformed": self.feed.malformed,
            "holes": self.feed.holes,
            "dump_requests": self.dump_requests,
            "queries": self.desk.queries,
            "prompts": self.desk.prompts,
            "bad_queries": self.desk.bad,
            "shard_errors": self.desk.shard_errors,
            "snapshots": self.keeper.written,
            "snapshot_failures": self.keeper.failed,
            "snapshots_skipped": self.keeper.skipped,
            "snapshot_bytes": self.keeper.size,
            "snapshot_seq": self.keeper.covered,
            "applied_seq": self.feed.applied,
            "pending": self.feed.pending,
            "lag_seconds": self.feed.lag,
            "blocks": stats.blocks,
            "entries": stats.entries,
            "memory_bytes": stats.bytes,
            "ranks": self.holdings.ranks,
            "unknown_ranks": self.holdings.unknown,
            "ready": float(self.ready),
        }


def _shard(service: Service) -> Shard:
    settings = service.settings.indexer
    try:
        return Shard(settings.shard, settings.shards, settings.shard_by)
    except ValueError as error:
        raise StartError(f"indexer: {error}", permanent=True) from error


async def main(service: Service) -> None:
    """Run an indexer until the service is told to stop."""
    indexer = IndexerService(service)
    collector = StateCollector(indexer.measures)
    REGISTRY.register(collector)
    metrics = None
    try:
        settings = service.settings.indexer
        metrics = await serve_metrics(settings, lambda: indexer.ready, service.warnings)
        await indexer.run()
    finally:
        REGISTRY.unregister(collector)
        if metrics is not None:
            await metrics.cleanup()
