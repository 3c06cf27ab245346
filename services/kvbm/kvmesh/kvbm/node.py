"""One kvbm on the mesh: composes servers, tiers and peers around the block manager."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvmesh.blocks.digests import fingerprint
from kvmesh.bus.client import Subscription, returning
from kvmesh.bus.messages import ControlReply, Instance
from kvmesh.kvbm import control_server as control
from kvmesh.kvbm.core.blocks.block import REMOTE
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.peers.claims_exchange import ClaimsExchange, NoClaimsExchange
from kvmesh.kvbm.peers.compatibility import PeerCompatibility
from kvmesh.kvbm.peers.lender import Lender
from kvmesh.kvbm.peers.reader import NoPeerReader, PeerReader
from kvmesh.kvbm.presence import Presence
from kvmesh.kvbm.remote_sources import RemoteSources
from kvmesh.kvbm.tiers.disk import LocalDisk, NoDisk
from kvmesh.kvbm.tiers.remote.mover import NoRemote, RemoteMover
from kvmesh.kvbm.tiers.remote.seal import Seal
from kvmesh.kvbm.tiers.storage import Storage
from kvmesh.kvbm.worker_server import WorkerServer
from kvmesh.runtime.service import Service

log = logging.getLogger(__name__)
TICK_S = 0.05
RECLAIM_S = 0.5
LEAVE_S = 2.0
DETACH_S = 0.5


class KvbmNode:
    """Joins the mesh with `open`, leaves it with `close`."""

    def __init__(self, service: Service, manager: Manager, storage: Storage, key: bytes) -> None:
        self._service = service
        self._bus = service.bus
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._storage = storage
        self._subscriptions: list[Subscription] = []
        self._replies_due = asyncio.Event()
        self._tiers_closed = False
        self._unseen_until = 0.0
        self.manager = manager
        self.compatibility = PeerCompatibility(fingerprint(key))
        self._disk = self._make_disk(key)
        self._exchange = self._make_exchange(key)
        self._reader = self._make_reader(self._exchange)
        self._sources = RemoteSources(
            self._make_remote(key), self._reader, self._exchange, self._on_found
        )
        self._presence = Presence(service, manager, storage, self._exchange.key, self._dump)
        self.worker_server = WorkerServer(
            service.bus,
            manager,
            storage.directory,
            storage.arena,
            key,
            self._settle,
            Lender(manager, self._reader, service.settings.transfer.lend_s, self._clock),
            self._clock,
        )
        self._control = control.ControlServer(
            manager,
            self._settle,
            self._clock,
            self._dump,
            service.stopping.set,
            self._sources.undropped,
            self._unseen_s,
        )

    # optional parts

    def _make_disk(self, key: bytes) -> LocalDisk | NoDisk:
        storage = self._storage
        if storage.disk is None:
            return NoDisk()
        return LocalDisk(
            storage.disk, storage.arena, self.manager, key, self._clock, self._on_moved
        )

    def _make_remote(self, key: bytes) -> RemoteMover | NoRemote:
        storage = self._storage
        if storage.remote is None:
            return NoRemote(self._on_moved)
        return RemoteMover(storage.remote, storage.arena, Seal(key), self._on_moved, self._clock)

    def _make_exchange(self, key: bytes) -> ClaimsExchange | NoClaimsExchange:
        if self.manager.store.remote is None:
            return NoClaimsExchange()
        return ClaimsExchange(
            self._bus,
            self._service.limits,
            self._service.instance,
            fingerprint(key),
            self.manager.claims,
            self.manager.peer_claims,
            self._on_peer_card,
            self._on_peer_leave,
        )

    def _make_reader(
        self, exchange: ClaimsExchange | NoClaimsExchange
    ) -> PeerReader | NoPeerReader:
        if isinstance(exchange, NoClaimsExchange) or not self._service.settings.kvbm.peers:
            return NoPeerReader()
        return PeerReader(
            self._bus,
            exchange,
            self._storage.arena,
            self._service.settings.transfer,
            self._on_moved,
            self.manager.store.hold,
        )

    # start and stop

    @property
    def ready(self) -> bool:
        return bool(self._subscriptions) and not self.manager.closing

    async def open(self) -> None:
        """Restore the disk tier, then serve. Raises DiskError or a bus error."""
        await self._disk.open()
        subjects, instance = self._bus.subjects, self._service.instance
        await self.worker_server.open(subjects.kvbm(instance))
        self._subscriptions = [
            await self._bus.serve(
                subjects.ctl(instance),
                control.decoder,
                self._control.obey,
                on_malformed=_malformed,
            ),
            await self._bus.subscribe(
                subjects.returns(instance), control.returns_decoder, self._control.expect
            ),
            await self._bus.serve(
                subjects.dump(instance),
                control.dumps,
                returning(self._control.dump),
                on_malformed=_malformed,
            ),
        ]
        await self._sources.open()
        if not await self._sources.is_empty():
            self._unseen_until = self._clock() + self._service.settings.kvbm.remote_lease_s
        await self._presence.open()
        self._settle()
        spawn = self._service.spawn
        spawn(self._tick(), "tick")
        spawn(self._reclaim(), "reclaim")
        spawn(self._disk.save_periodically(), "save")
        spawn(self._disk.fit_periodically(self._on_resized), "fit")
        spawn(self._send_replies(), "send")
        card = self._presence.card
        log.info("serving blocks of node %s in %s", card.node, self._storage.directory.path)

    async def close(self) -> None:
        """Decline new requests, wait a limited time for workers to finish, and leave the mesh."""
        self.manager.closing = True
        await self._presence.leave()
        workers = self.manager.attachments.workers
        if not await _within(LEAVE_S, lambda: not any(w.tickets for w in workers.values())):
            log.warning("leaving while workers use blocks")
        await _within(DETACH_S, lambda: not workers)
        await self.worker_server.close()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self._control.close()
        await self._presence.close()

    async def close_tiers(self) -> None:
        """Return once no move runs between tiers and the journal is complete."""
        self._tiers_closed = True
        await self._sources.close()
        await self._disk.close()

    # results of the manager

    def _settle(self) -> None:
        """Carry out what the manager decided: moves, lookups, claims, events and the card."""
        if self._tiers_closed:
            return
        store = self.manager.store
        if self._presence.outdated:
            # Publish new layouts and workers, and compare them with those of peers
            models = self._presence.introduce()
            self._service.spawn(self._follow_and_renew(models), "card")
            for card in self._exchange.cards:
                self.compatibility.compare(self.manager.attachments.layouts_in_use, card)
        moves = store.drain_moves()
        if moves:
            remote, local = partition(moves)
            self._sources.start(remote)
            self._disk.start(local)
        self._sources.drop(store.drain_remote_drops())
        self._sources.look_up(self.manager.onboarding.drain_lookups())
        self._exchange.publish(self.manager.claims.drain())
        for rank, events in store.drain_events().items():
            self._presence.publish(rank, events)

    def _on_found(self, lookup: Lookup, count: int, peer: PeerSource | None) -> None:
        self.manager.end_lookup(lookup, count, self._clock(), peer)
        self._settle()
        self._replies_due.set()

    def _on_moved(self, ends: list[tuple[Move, MoveEnd]]) -> None:
        corrupt = sum(end is MoveEnd.CORRUPT for _, end in ends)
        if corrupt:
            log.warning("dropped %d blocks that did not match their checksums", corrupt)
        self.manager.end_moves(ends, self._clock())
        self._settle()
        self._replies_due.set()

    async def _on_resized(self) -> None:
        self._settle()
        await self._presence.renew_card()

    def _dump(self, rank: int) -> None:
        self._settle()
        self._presence.publish(rank, self.manager.dump(rank))

    # loops

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.manager.tick(self._clock())
            self._settle()
            self._replies_due.set()

    async def _send_replies(self) -> None:
        while True:
            await self._replies_due.wait()
            self._replies_due.clear()
            self.worker_server.send_due()

    async def _reclaim(self) -> None:
        while True:
            await asyncio.sleep(RECLAIM_S)
            self.worker_server.reclaim()

    # peers

    async def _follow_and_renew(self, models: list[str]) -> None:
        """Follow new models, then publish the card, to which peers reply with their claims."""
        for model in models:
            await self._exchange.follow(model)
        if self.ready:
            await self._presence.renew_card()

    def _on_peer_card(self, card: Instance) -> None:
        self.compatibility.compare(self.manager.attachments.layouts_in_use, card)
        self._reader.open_transport()

    def _unseen_s(self) -> float:
        """Seconds for which the remote store may have blocks of block managers that have left."""
        return max(self._unseen_until - self._clock(), 0.0)

    def _on_peer_leave(self, card: Instance) -> None:
        if self._storage.remote is not None:
            self._unseen_until = self._clock() + self._service.settings.kvbm.remote_lease_s
        self.compatibility.remove(card)
        self._reader.forget(card.instance)


def _malformed(reason: str) -> ControlReply:
    return ControlReply(False, reason)


async def _within(seconds: float, done: Callable[[], bool]) -> bool:
    """True if `done` becomes true within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not done():
                await asyncio.sleep(TICK_S)
    except TimeoutError:
        return False
    return True


def partition(moves: Iterable[Move]) -> tuple[list[Move], list[Move]]:
    """Moves to and from the remote tier, and moves between arena and disk."""
    remote: list[Move] = []
    local: list[Move] = []
    for move in moves:
        (remote if REMOTE in (move.source.tier, move.target.tier) else local).append(move)
    return remote, local
