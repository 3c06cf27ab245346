"""One kvbm on the mesh: its lease, the subjects on which it answers, and the loops of its tiers."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from kvmesh.blocks.digests import fingerprint
from kvmesh.bus.client import Subscription, returning
from kvmesh.bus.discovery import Lease
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import ControlReply, Instance, NodeStore, Role
from kvmesh.bus.publisher import KvPublisher
from kvmesh.kvbm import control_server as control
from kvmesh.kvbm.core.blocks.block import REMOTE, TIERS
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.peers.beyond_node import RemoteSources
from kvmesh.kvbm.peers.claims_exchange import ClaimsExchange
from kvmesh.kvbm.peers.compatibility import PeerCompatibility
from kvmesh.kvbm.peers.lender import Lender
from kvmesh.kvbm.peers.reader import PeerReader
from kvmesh.kvbm.tiers.disk_mover import DiskMover
from kvmesh.kvbm.tiers.disk_tier import DiskTier
from kvmesh.kvbm.tiers.remote.mover import RemoteMover
from kvmesh.kvbm.tiers.remote.seal import Seal
from kvmesh.kvbm.tiers.storage import Storage, node_name
from kvmesh.kvbm.worker_server import WorkerServer
from kvmesh.runtime.service import VERSION, Service

log = logging.getLogger(__name__)
TICK_S = 0.05
RECLAIM_S = 0.5
SAVE_S = 0.1
FIT_S = 2.0
EVENTS_S = 0.003
LEAVE_S = 2.0
DETACH_S = 0.5


class KvbmNode:
    """Joins the mesh with `open`, leaves it with `close`."""

    def __init__(self, service: Service, manager: Manager, storage: Storage, key: bytes) -> None:
        self._service = service
        self._bus = service.bus
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._storage = storage
        self._publishers: list[KvPublisher] = []
        self._introduced: tuple[int, frozenset[int]] = (0, frozenset())
        self._subscriptions: list[Subscription] = []
        self._mover: DiskMover | None = None
        self._shelf: DiskTier | None = None
        self._sending = asyncio.Event()
        self._settled = False
        self.manager = manager
        if storage.disk is not None:
            self._shelf = DiskTier(storage.disk, manager, key, self._clock)
            self._mover = DiskMover(
                storage.arena,
                storage.disk,
                service.settings.kvbm.disk_threads,
                self._moved,
                self._shelf.shrink,
                manager.give_up_disk,
            )
        self._key = fingerprint(key)
        self.divisions = PeerCompatibility(self._key)
        self._neighbours: ClaimsExchange | None = None
        self._peers: PeerReader | None = None
        if manager.store.far is not None:
            self._neighbours = ClaimsExchange(
                service.bus,
                service.limits,
                service.instance,
                self._key,
                manager.claims,
                manager.others,
                self._on_neighbour,
                self._on_leave,
            )
        if service.settings.kvbm.peers and self._neighbours is not None:
            self._peers = self._make_peers(self._neighbours)
        courier = None
        if storage.remote is not None:
            courier = RemoteMover(
                storage.remote, storage.arena, Seal(key), self._moved, self._clock
            )
        self._outside = RemoteSources(
            courier, self._peers, self._neighbours, self._found, self._moved
        )
        lender = Lender(manager, self._peers, service.settings.transfer.lend_s, self._clock)
        self.desk = WorkerServer(
            service.bus,
            manager,
            storage.directory,
            storage.arena,
            key,
            self._settle,
            lender,
            self._clock,
        )
        self._control = control.ControlServer(
            manager, self._settle, self._clock, self._dump, service.stopping.set
        )
        self._lease = Lease(service.bus, self._card(), service.limits)

    @property
    def ready(self) -> bool:
        return bool(self._subscriptions) and not self.manager.closing

    async def open(self) -> None:
        """Take in what the disk has, then serve. Raises DiskError or a bus error."""
        if self._shelf is not None:
            await self._shelf.open()
        subjects, instance = self._bus.subjects, self._service.instance
        await self.desk.open(subjects.kvbm(instance))
        self._subscriptions = [
            await self._bus.serve(
                subjects.ctl(instance),
                control.decoder,
                returning(self._control.obey),
                on_malformed=_not_understood,
            ),
            await self._bus.serve(
                subjects.dump(instance),
                control.dumps,
                returning(self._control.dump),
                on_malformed=_not_understood,
            ),
        ]
        await self._outside.open()
        self._lease.card = self._card()
        await self._lease.open()
        self._settle()
        for loop in (self._tick, self._reclaim, self._save, self._fit, self._send):
            self._service.spawn(loop(), loop.__name__.strip("_"))
        card = self._lease.card
        log.info("keeping blocks of node %s in %s", card.node, self._storage.directory.path)

    async def close(self) -> None:
        """Take nothing new, let workers end what they do, for a while, then go."""
        self.manager.closing = True
        await self._lease.close()
        guests = self.manager.guests
        if not await _within(LEAVE_S, lambda: not any(g.tickets for g in guests.values())):
            log.warning("leaving while workers use blocks")
        await _within(DETACH_S, lambda: not guests)
        await self.desk.close()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        for publisher in self._publishers:
            await publisher.close()

    async def settle_tiers(self) -> None:
        """Return once nothing is under way between tiers, and the journal is whole."""
        self._settled = True
        await self._outside.close()
        if self._mover is not None:
            await self._mover.close()
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            await shelf.close()

    # what comes of requests

    def _settle(self) -> None:
        """Tell what has changed, do what is to be done, unless that is over."""
        if self._settled:
            return
        store = self.manager.store
        if self._known != self._introduced:
            self._introduce()
        moves = store.take_moves()
        if moves:
            self._begin(moves)
        self._outside.drop(store.take_unwanted())
        self._outside.look_up(self.manager.fetches.take_lookups())
        if self._neighbours is not None:
            self._neighbours.tell(self.manager.claims.take())
        for rank, events in store.take_events().items():
            self._publishers[rank].add(rank, events)

    def _begin(self, moves: list[Move]) -> None:
        far, near = partition(moves)
        self._outside.start(far)
        if self._mover is not None:
            self._mover.start(near)

    def _found(self, lookup: Lookup, count: int, further: PeerSource | None) -> None:
        self.manager.found(lookup, count, self._clock(), further)
        self._settle()
        self._sending.set()

    def _moved(self, ends: list[tuple[Move, MoveEnd]]) -> None:
        bad = sum(end is MoveEnd.CORRUPT for _, end in ends)
        if bad:
            log.warning("dropped %d blocks that did not match their checksums", bad)
        self.manager.moved(ends, self._clock())
        self._settle()
        self._sending.set()

    def _introduce(self) -> None:
        """New layouts and workers change the card; new models also get a publisher."""
        self._introduced = self._known
        models = self.manager.models[len(self._publishers) :]
        for model in models:
            publisher = KvPublisher(
                self._bus,
                self._bus.subjects.kv(model, self._service.name),
                self._service.name,
                self._service.instance,
                EVENTS_S,
                self._dump,
            )
            publisher.start()
            self._publishers.append(publisher)
        self._service.spawn(self._show(models), "card")
        if self._neighbours is not None:
            for card in self._neighbours.cards:
                self.divisions.compare(self.manager.in_use, card)

    async def _show(self, models: list[str]) -> None:
        """Follow new models first: who sees on the card that there are workers tells of them."""
        if self._neighbours is not None:
            for model in models:
                await self._neighbours.follow(model)
        if self.ready:
            await self._renew_card()

    @property
    def _known(self) -> tuple[int, frozenset[int]]:
        """What the card tells of: how many layouts there are blocks of, and the workers."""
        return self.manager.layouts, frozenset(self.manager.guests)

    def _dump(self, rank: int) -> None:
        self._settle()
        self._publishers[rank].add(rank, self.manager.dump(rank))

    # loops

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.manager.tick(self._clock())
            self._settle()
            self._sending.set()

    async def _send(self) -> None:
        """Answer workers whose blocks have come."""
        while True:
            await self._sending.wait()
            self._sending.clear()
            self.desk.send_due()

    async def _reclaim(self) -> None:
        while True:
            await asyncio.sleep(RECLAIM_S)
            self.desk.reclaim()

    async def _save(self) -> None:
        while self._shelf is not None:
            await asyncio.sleep(SAVE_S)
            await self._shelf.save()

    async def _fit(self) -> None:
        """Keep the disk tier as large as the disk allows."""
        while self._shelf is not None:
            try:
                if await self._shelf.fit():
                    self._settle()
                    await self._renew_card()
            except OSError as error:
                log.warning("cannot see how much of the disk is free: %s", error)
            await asyncio.sleep(FIT_S)

    # the card and the peers

    def _on_neighbour(self, card: Instance) -> None:
        self.divisions.compare(self.manager.in_use, card)
        if self._peers is not None:
            self._peers.begin()

    def _on_leave(self, card: Instance) -> None:
        self.divisions.leave(card)
        if self._peers is not None:
            self._peers.leave(card.instance)

    def _make_peers(self, neighbours: ClaimsExchange) -> PeerReader:
        service = self._service
        return PeerReader(
            service.bus,
            neighbours,
            self._storage.arena,
            service.settings.transfer,
            self._moved,
            self.manager.store.hold,
        )

    def _card(self) -> Instance:
        tiers = self.manager.store.tiers
        sizes = [tiers[n].slots.capacity if n in tiers else 0 for n in TIERS]
        if self._service.settings.kvbm.remote_url.startswith("file:"):
            sizes[-1] = self._service.settings.kvbm.remote_bytes
        return Instance(
            instance=self._service.instance,
            role=Role.KVBM,
            name=self._service.name,
            version=VERSION,
            started=time.time(),
            node=node_name(self._service.settings.kvbm),
            store=NodeStore(
                directory=str(self._storage.directory.path),
                tier_bytes=sizes,
                tier_blocks=self.manager.most_blocks,
                models=list(self.manager.models),
                layouts=self.manager.in_use if self._neighbours is not None else {},
                key=self._key if self._neighbours is not None else "",
            ),
        )

    async def _renew_card(self) -> None:
        card = replace(self._lease.card, store=self._card().store)
        try:
            await self._lease.update(card)
        except BusError as error:
            log.debug("the card will change with the next renewal: %s", error)


def _not_understood(reason: str) -> ControlReply:
    return ControlReply(False, reason)


async def _within(seconds: float, done: Callable[[], bool]) -> bool:
    """Whether it is so in time."""
    try:
        async with asyncio.timeout(seconds):
            while not done():
                await asyncio.sleep(TICK_S)
    except TimeoutError:
        return False
    return True


def partition(moves: Iterable[Move]) -> tuple[list[Move], list[Move]]:
    """Those to and from the remote store, and those between memory and disk."""
    far: list[Move] = []
    near: list[Move] = []
    for move in moves:
        (far if REMOTE in (move.source.tier, move.target.tier) else near).append(move)
    return far, near
