"""What is beyond a node: the store that all nodes share, and the arenas of the others."""

import asyncio
from collections.abc import Callable, Iterable

from kvmesh.kvbm.core.blocks.block import REMOTE
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.peers.claims_exchange import PAUSE_S, ClaimsExchange
from kvmesh.kvbm.peers.reader import PeerReader
from kvmesh.kvbm.tiers.remote.mover import RemoteMover
from kvmesh.runtime.background import BackgroundTasks


class RemoteSources:
    """Either may be missing. `found` and `moved` are told what came of lookups and moves.

    `neighbours` make ready what is read from either, so there are some unless both are missing.
    """

    def __init__(
        self,
        courier: RemoteMover | None,
        peers: PeerReader | None,
        neighbours: ClaimsExchange | None,
        found: Callable[[Lookup, int, PeerSource | None], None],
        moved: Callable[[list[tuple[Move, MoveEnd]]], None],
    ) -> None:
        self._courier = courier
        self._peers = peers
        self._neighbours = neighbours
        self._found = found
        self._moved = moved
        self._tasks = BackgroundTasks()

    async def open(self) -> None:
        if self._neighbours is not None:
            await self._neighbours.open()
        if self._courier is not None:
            self._tasks.start(self._courier.tend())

    async def close(self) -> None:
        await self._tasks.close()
        if self._peers is not None:
            await self._peers.close()
        if self._courier is not None:
            await self._courier.close()
        if self._neighbours is not None:
            await self._neighbours.close()

    def look_up(self, lookups: Iterable[Lookup]) -> None:
        """Begin lookups, all of which are answered in the end."""
        for lookup in lookups:
            self._tasks.start(self._look_up(lookup))

    def start(self, moves: Iterable[Move]) -> None:
        """Begin moves to and from tier 3, all of which are told of in the end."""
        stored: list[Move] = []
        lent: list[Move] = []
        for move in moves:
            from_peer = move.source.tier == REMOTE and self._has_peer(move.source.block.digest)
            (lent if from_peer else stored).append(move)
        if self._peers is not None:
            self._peers.start(lent)
        if self._courier is not None:
            self._courier.start(stored)
        elif stored:
            self._moved([(move, MoveEnd.UNREADABLE) for move in stored])

    def drop(self, digests: list[bytes]) -> None:
        """Have the store drop blocks."""
        if self._courier is not None:
            self._courier.drop(digests)

    def _has_peer(self, digest: bytes) -> bool:
        return self._peers is not None and self._peers.knows(digest)

    async def _look_up(self, lookup: Lookup) -> None:
        if lookup.further is not None:
            self._found(lookup, *await self._prepare(lookup, lookup.further))
            return
        count, further = 0, None
        if self._courier is not None:
            count = await self._courier.find(lookup.digests)
        if self._peers is not None:
            more, further = await self._peers.find(lookup, count)
            count += more
        self._found(lookup, count, further)

    async def _prepare(self, lookup: Lookup, further: PeerSource) -> tuple[int, PeerSource | None]:
        """How many blocks another node has made ready, and whom to ask for more."""
        peers = self._peers
        if self._neighbours is None:
            return 0, None
        if peers is not None and peers.opening:
            await asyncio.sleep(PAUSE_S)
            return 0, further
        stored = peers is None or peers.region is None
        ready, more = await self._neighbours.prepare(lookup, further, stored)
        if peers is not None and not stored:
            peers.note(ready, further.owner)
        return len(ready), more
