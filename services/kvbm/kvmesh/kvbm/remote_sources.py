"""Sources of blocks beyond the node: the store that all nodes share, and the arenas of peers."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable

from kvmesh.kvbm.core.blocks.block import REMOTE
from kvmesh.kvbm.core.blocks.store import Move
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.peers.claims_exchange import PAUSE_S, ClaimsExchange, NoClaimsExchange
from kvmesh.kvbm.peers.reader import NoPeerReader, PeerReader
from kvmesh.kvbm.tiers.remote.mover import NoRemote, RemoteMover


class RemoteSources:
    """Runs lookups in store and peers, and dispatches moves of tier 3 to one of them.

    Calls `on_found` with the result of each lookup.
    """

    def __init__(
        self,
        store: RemoteMover | NoRemote,
        reader: PeerReader | NoPeerReader,
        exchange: ClaimsExchange | NoClaimsExchange,
        on_found: Callable[[Lookup, int, PeerSource | None], None],
    ) -> None:
        self._store = store
        self._reader = reader
        self._exchange = exchange
        self._on_found = on_found
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self._exchange.open()
        self._spawn(self._store.tend())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._reader.close()
        await self._store.close()
        await self._exchange.close()

    def look_up(self, lookups: Iterable[Lookup]) -> None:
        """Start lookups, each of which ends in a call of `on_found`."""
        for lookup in lookups:
            self._spawn(self._look_up(lookup))

    def start(self, moves: Iterable[Move]) -> None:
        """Start moves to and from tier 3, each of which ends in a report to `on_moved`."""
        store_moves: list[Move] = []
        peer_moves: list[Move] = []
        for move in moves:
            source = move.source
            from_peer = source.tier == REMOTE and self._reader.has_holder(source.block.digest)
            (peer_moves if from_peer else store_moves).append(move)
        self._reader.start(peer_moves)
        self._store.start(store_moves)

    def drop(self, digests: list[bytes]) -> None:
        """Drop blocks from the store."""
        self._store.drop(digests)

    async def is_empty(self) -> bool:
        """True if the store has no blocks, or there is none."""
        return await self._store.is_empty()

    async def undropped(self, timeout_s: float) -> int:
        """The number of blocks that the store still has to drop, once all is done or time is up."""
        return await self._store.undropped(timeout_s)

    async def _look_up(self, lookup: Lookup) -> None:
        if lookup.peer is not None:
            self._on_found(lookup, *await self._prepare(lookup, lookup.peer))
            return
        count = await self._store.find(lookup.digests)
        more, peer = await self._reader.find(lookup, count)
        self._on_found(lookup, count + more, peer)

    async def _prepare(self, lookup: Lookup, peer: PeerSource) -> tuple[int, PeerSource | None]:
        """Number of blocks that a peer has made ready, and the peer to query for more."""
        if self._reader.opening:
            await asyncio.sleep(PAUSE_S)
            return 0, peer
        stored = self._reader.region is None
        ready, more = await self._exchange.prepare(lookup, peer, stored)
        if not stored:
            self._reader.add_holder(ready, peer.instance, lookup.prompt.traceparent)
        return len(ready), more

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
