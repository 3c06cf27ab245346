"""A simulated node: the block manager's own core, with moves over virtual links."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvmesh.bus.messages import (
    Attach,
    Commit,
    Computed,
    Declined,
    Fetched,
    Finish,
    Instance,
    KvEvent,
    NodeStore,
    Prepare,
    Prepared,
    ReturnForecast,
    Role,
)
from kvmesh.indexer.decoding import EventSource
from kvmesh.indexer.incarnations import ANY_MODEL
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import DISK, REMOTE
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.manager import Manager, ParkedFetch, WorkerRequest
from kvmesh.kvbm.core.transfers.mesh_claims import ClaimMessage, PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.core.transfers.restoring import CHECK_S
from kvmesh.simulator.nodes.links import VirtualLink
from kvmesh.simulator.nodes.options import NodeOptions
from kvmesh.simulator.records import WorkerRecord
from kvmesh.simulator.virtual_clock import VirtualClock

TICK_S = 0.05  # as the live process
IDLE_TICK_S = 1.0
RUN_BYTES = 4 << 20
OnReply = Callable[[object], None]


@dataclass
class NodeRecord:
    """Totals of one node: bytes by link, and what its workers loaded.

    `to_engines` and `from_engines` are bytes over the links of its workers; `network` and
    `store_read` are bytes that the node received. `disk_rewritten` are bytes of blocks that the
    disk had held before.
    """

    name: str
    to_engines: int = 0
    from_engines: int = 0
    disk_read: int = 0
    disk_written: int = 0
    disk_rewritten: int = 0
    network: int = 0
    store_read: int = 0
    store_written: int = 0
    loads: int = 0
    skipped_blocks: int = 0
    on_disk: set[bytes] = field(default_factory=set)


class BlockSources(Protocol):
    """Sources of blocks beyond a node: the remote store and other nodes."""

    def look_up(self, node: "SimulatedNode", lookup: Lookup) -> None:
        """Start a lookup, which ends in a call of the node's `on_found`."""
        ...

    def move(self, node: "SimulatedNode", moves: list[Move]) -> None:
        """Start moves to and from tier 3, which end in calls of the node's `on_moved`."""
        ...

    def drop(self, digests: list[bytes]) -> None:
        """Drop blocks from the remote store."""
        ...

    def claim(self, node: "SimulatedNode", messages: list[ClaimMessage]) -> None:
        """Pass a node's claims to the others."""
        ...


class SimulatedNode:
    """One node. `publish` passes KV events of its tiers on; it publishes as the live kvbm does."""

    def __init__(
        self,
        number: int,
        model: str,
        clock: VirtualClock,
        options: NodeOptions,
        block_size: int,
        sources: BlockSources,
        publish: Callable[["SimulatedNode", list[KvEvent]], None],
    ) -> None:
        self.node = f"node-{number}"
        self.name = f"kvbm-{number}"
        self.instance = f"{self.name}.0"
        self.clock = clock
        self.options = options
        self.block_bytes = block_size * options.bytes_per_token
        self.manager = Manager(options.config, self.instance)
        self.record = WorkerRecord(self.name)
        self.totals = NodeRecord(self.node)
        self.source = EventSource(ANY_MODEL, self.name)
        self.event_id = 0
        links = options.links
        self.disk = VirtualLink(links.disk)
        self.network_in, self.network_out = VirtualLink(links.network), VirtualLink(links.network)
        self.store_in, self.store_out = VirtualLink(links.store), VirtualLink(links.store)
        self._model = model
        self._sources = sources
        self._publish = publish
        self._parked: dict[int, OnReply] = {}
        self._attached = 0
        self._ticking_at = 0.0

    @property
    def card(self) -> Instance:
        sizes = [self.options.host_bytes, self.options.disk_bytes, self.options.remote_bytes]
        blocks = self.manager.attachments.max_blocks
        return Instance(
            instance=self.instance,
            role=Role.KVBM,
            name=self.name,
            version="simulated",
            started=0.0,
            node=self.node,
            expects_returns=self.manager.returns.enabled,
            store=NodeStore(
                directory="",
                tier_bytes=sizes,
                tier_blocks=blocks,
                models=[self._model],
                key="" if self.manager.store.remote is None else "simulated",
            ),
        )

    def dump(self) -> list[KvEvent]:
        """All blocks of the model as events."""
        return self.manager.dump(0)

    # workers

    def attach(self, message: Attach) -> AttachedWorker | Declined:
        self._attached += 1
        return self.manager.attach(message, self._attached)

    def detach(self, attachment: int) -> None:
        """Detach a worker that is gone."""
        worker = self.manager.attachments.workers.get(attachment)
        if worker is not None:
            self.manager.detach(worker, self.clock.now)
            self.settle()

    def ask(self, message: WorkerRequest, on_reply: OnReply) -> None:
        """Pass the reply to a worker's message to `on_reply`, once it is due."""
        reply = self.manager.answer(message, self.clock.now)
        self.settle()
        if isinstance(reply, ParkedFetch):
            self._parked[reply.ticket] = on_reply
        else:
            self._send(reply, on_reply)
        self._send_due()

    def tell(self, message: Commit | Finish | Computed) -> None:
        """A worker's message whose reply does not matter."""
        self.manager.answer(message, self.clock.now)
        self.settle()
        self._send_due()

    def release(self, session: str) -> None:
        self.manager.release([session], self.clock.now)
        self.settle()
        self._send_due()

    def expect_returns(self, forecasts: list[ReturnForecast]) -> None:
        """A router's forecasts of returns."""
        self.manager.expect_returns(forecasts, self.clock.now)
        self.settle()

    # other nodes

    def prepare(self, message: Prepare, on_reply: OnReply) -> None:
        """Pass the reply to another node's message to `on_reply`, once it is due."""
        reply = self.manager.prepare(message, self.clock.now)
        self.settle()
        if isinstance(reply, ParkedFetch):
            self._parked[reply.ticket] = on_reply
        else:
            self._send(reply, on_reply)
        self._send_due()

    def receive_claim(self, instance: str, message: ClaimMessage) -> None:
        until = self.clock.now + self.options.config.patience_s
        self.manager.peer_claims.receive(instance, message.number, message.digests, until)
        self._plan_tick()

    # results

    def on_moved(self, ends: list[tuple[Move, MoveEnd]]) -> None:
        self.manager.end_moves(ends, self.clock.now)
        self.settle()
        self._send_due()

    def on_found(self, lookup: Lookup, count: int, peer: PeerSource | None) -> None:
        self.manager.end_lookup(lookup, count, self.clock.now, peer)
        self.settle()
        self._send_due()

    def settle(self) -> None:
        """Carry out what the manager decided: moves, lookups, claims and events."""
        store = self.manager.store
        moves = store.drain_moves()
        if moves:
            self._start(moves)
        drops = store.drain_remote_drops()
        if drops:
            self._sources.drop(drops)
        for lookup in self.manager.onboarding.drain_lookups():
            self._sources.look_up(self, lookup)
        claims = self.manager.claims.drain()
        if claims:
            self._sources.claim(self, claims)
        for events in store.drain_events().values():
            self._publish(self, events)
        store.drain_disk_changes()
        self._plan_tick()

    def _start(self, moves: list[Move]) -> None:
        remote: list[Move] = []
        reads: list[Move] = []
        writes: list[Move] = []
        for move in moves:
            if REMOTE in (move.source.tier, move.target.tier):
                remote.append(move)
            else:
                (writes if move.target.tier == DISK else reads).append(move)
        self.totals.disk_read += self._use_disk(reads)
        self.totals.disk_written += self._use_disk(writes)
        self._count_rewritten(writes)
        if remote:
            self._sources.move(self, remote)

    def _use_disk(self, moves: list[Move]) -> int:
        """Move blocks from or to the disk; returns their bytes."""
        total = 0
        for batch in batched(moves, RUN_BYTES):
            size = bytes_of(batch)
            total += size
            ends = [(move, MoveEnd.DONE) for move in batch]
            self.clock.at(self.disk.reserve(self.clock.now, size), partial(self.on_moved, ends))
        return total

    def _count_rewritten(self, batch: list[Move]) -> None:
        held, totals = self.totals.on_disk, self.totals
        for move in batch:
            block = move.source.block
            if block.digest in held:
                totals.disk_rewritten += block.space.block_bytes
            held.add(block.digest)

    def _send(self, reply: object, on_reply: OnReply) -> None:
        self.clock.after(self.options.message_s, partial(on_reply, reply))

    def _send_due(self) -> None:
        """Send the replies to parked requests that are due or whose tickets have ended."""
        if not self._parked:
            return
        replies: dict[int, Fetched | Prepared | None] = {}
        replies |= self.manager.drain_replies(self.clock.now)
        ended = self._parked.keys() - self.manager.onboarding.tickets.keys() - replies.keys()
        for ticket in sorted(ended):
            replies[ticket] = None
        for ticket, reply in replies.items():
            on_reply = self._parked.pop(ticket, None)
            if on_reply is not None:
                self._send(reply, on_reply)
        self.settle()

    # time

    def _plan_tick(self) -> None:
        """Tick while something may expire, and often while workers wait."""
        manager = self.manager
        remote = manager.store.remote
        waiting = (manager.in_progress, manager.claims, manager.peer_claims, remote or ())
        if manager.onboarding.tickets:
            delay = TICK_S
        elif manager.restoring.due:
            delay = CHECK_S
        elif any(map(len, waiting)):
            delay = IDLE_TICK_S
        else:
            return
        at = self.clock.now + delay
        if self._ticking_at <= self.clock.now or at < self._ticking_at:
            self._ticking_at = at
            self.clock.at(at, partial(self._tick, at))

    def _tick(self, at: float) -> None:
        if at != self._ticking_at:
            return
        self._ticking_at = 0.0
        self.manager.tick(self.clock.now)
        self.settle()
        self._send_due()


def batched(moves: Iterable[Move], most_bytes: int) -> Iterable[list[Move]]:
    """Moves in batches of up to `most_bytes`, or of one larger block."""
    batch: list[Move] = []
    size = 0
    for move in moves:
        block_bytes = move.source.block.space.block_bytes
        if batch and size + block_bytes > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(move)
        size += block_bytes
    if batch:
        yield batch


def bytes_of(moves: Iterable[Move]) -> int:
    return sum(move.source.block.space.block_bytes for move in moves)
