"""A manager with one attached worker for unit tests, driven by the worker's messages."""

from array import array
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.messages import (
    Attach,
    Commit,
    Fetch,
    Fetched,
    Finish,
    KvLayout,
    LayerLayout,
    Offer,
    Removed,
    Retain,
    ReturnForecast,
    Wanted,
)
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.blocks.store import MoveEnd, RemoteTierConfig
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.returns.rates import pack_rates

LAYOUT = KvLayout(
    weights="w", dtype="uint8", item_bytes=1, block_size=4, layers=[LayerLayout(1, 16384, 16384)]
)
BLOCK_BYTES = LAYOUT.block_bytes
LEASE_S = 50.0


def prompt(blocks: int, seed: int, head: int = 0) -> bytes:
    """Digests of a prompt, the first `head` of which all prompts share."""
    return b"".join(bytes([n, 0 if n < head else seed]) * 8 for n in range(blocks))


class ManagedNode:
    """A manager with one attached worker; tiers have these numbers of blocks."""

    def __init__(
        self,
        arena: int = 8,
        disk: int = 0,
        remote: int = 0,
        share: float = 0.5,
        restores: bool = False,
        frequency: float = 1.0,
    ) -> None:
        capacities = {ARENA: arena * BLOCK_BYTES} | ({DISK: disk * BLOCK_BYTES} if disk else {})
        config = KvbmConfig(
            capacities,
            share,
            disk_frequency=frequency,
            remote=RemoteTierConfig(remote, LEASE_S) if remote else None,
            shares=bool(remote),
            remote_frequency=frequency,
            restores=restores,
        )
        self.manager = Manager(config)
        self.now = 1.0
        self.removed: Counter[tuple[int, str | None, str | None]] = Counter()
        attached = self.manager.attach(Attach("w", "m", LAYOUT, "lock"), 1)
        assert isinstance(attached, AttachedWorker)

    def put(
        self,
        request: str,
        digests: bytes,
        session: str | None = None,
        retention: list[Retain] | None = None,
        tenant: str = "",
        conversation: int = 0,
    ) -> None:
        """Offer and write a prompt, two blocks at a time: more must not be staged at once."""
        names = self.names(digests)
        offer = Offer(1, 0, digests, names, names, 5, request=request)
        offer = replace(offer, session=session, retention=retention or [], tenant=tenant)
        offer = replace(offer, conversation=conversation)
        for first in range(0, len(digests) // 16, 2):
            end = first + 2
            part = replace(
                offer,
                first=first,
                digests=digests[: 16 * end],
                sequence_hashes=names[: 8 * end],
                local=names[: 8 * end],
            )
            wanted = self.manager.answer(part, self.now)
            assert isinstance(wanted, Wanted)
            sums = array("Q", [7] * (len(wanted.blocks) // 4)).tobytes()
            if wanted.ticket:
                self.manager.answer(Commit(1, wanted.ticket, sums), self.now)
            self.settle()

    def get(
        self,
        request: str,
        digests: bytes,
        session: str | None = None,
        compute_tps: float = 0.0,
        **fields: int,
    ) -> None:
        """Fetch a prompt's blocks, without a reply from elsewhere, and return them."""
        names = self.names(digests)
        fetch = Fetch(
            1, request, 0, digests, names, names, 5, compute_tps, 0.0, 0.0, session=session
        )
        fetch = replace(fetch, **fields)
        reply = self.manager.answer(fetch, self.now)
        self.settle()
        parked = list(self.manager.drain_replies(self.now).values())
        fetched = parked[0] if isinstance(reply, ParkedFetch) else reply
        assert isinstance(fetched, Fetched)
        if fetched.ticket:
            self.manager.answer(Finish(1, fetched.ticket), self.now)
        self.settle()

    def expect(self, request: str, rates: Sequence[float], since: float | None = None) -> None:
        """Forecast the returns of a request's prompt, from now on."""
        at = self.now if since is None else since
        self.manager.expect_returns([ReturnForecast(request, 0, at, pack_rates(rates))], self.now)

    def tick(self, seconds: float = 1.0) -> int:
        """Let time pass; return the number of moves that the manager starts."""
        self.now += seconds
        self.manager.tick(self.now)
        moves = self.manager.store.drain_moves()
        self.manager.end_moves([(move, MoveEnd.DONE) for move in moves], self.now)
        return len(moves)

    def held(self, digests: bytes, tier: int = ARENA) -> int:
        """The number of a prompt's blocks in a tier."""
        found = self.manager.store.find(split_digests(digests))
        return sum(block is not None and tier in block.copies for block in found)

    def settle(self, end: MoveEnd = MoveEnd.DONE) -> None:
        """End all moves and count the removed blocks by tier, reason and request."""
        while moves := self.manager.store.drain_moves():
            self.manager.end_moves([(move, end) for move in moves], self.now)
        for event in self.manager.store.drain_events().get(0, []):
            if isinstance(event, Removed):
                key = event.tier, event.reason, event.request
                self.removed[key] += len(event.engine) // 8

    def names(self, digests: bytes) -> bytes:
        return b"".join(digests[at : at + 8] for at in range(0, len(digests), 16))
