"""A worker for tests of a kvbm: a lock, a mapping of the arena, and the protocol's messages.

`python -m support.kvbm` runs one as a process that holds a ticket until it is killed.
"""

import asyncio
import fcntl
import mmap
import os
import sys
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvmesh._native import xxh3
from kvmesh.blocks.digests import chain_digests, root_digest
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import (
    Attach,
    Attached,
    Await,
    Commit,
    Computed,
    Corrupt,
    Detach,
    Done,
    Fetch,
    Fetched,
    Finish,
    Instance,
    KvbmReply,
    KvLayout,
    LayerLayout,
    MessageDecoder,
    Offer,
    Role,
    Wanted,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.hashing import block_hashes
from support.wait import eventually

T = TypeVar("T")
_replies: MessageDecoder[KvbmReply] = MessageDecoder(KvbmReply)
SIZE = 4
SALT = 5


def layout(block_bytes: int = 8192, weights: str = "w") -> KvLayout:
    """A layout whose blocks have this many bytes."""
    item = block_bytes // (2 * SIZE)
    return KvLayout(
        weights=weights,
        dtype="uint8",
        item_bytes=1,
        block_size=SIZE,
        layers=[LayerLayout(1, item, item)],
    )


def tokens(blocks: int, seed: int = 0) -> bytes:
    """A prompt of full blocks; prompts with equal seeds share their prefixes."""
    return array("I", [seed * 100_000 + n for n in range(blocks * SIZE)]).tobytes()


@dataclass(frozen=True)
class Names:
    """Digests and hashes of a prompt's blocks."""

    digests: bytes
    sequence: bytes
    local: bytes

    @classmethod
    def of(cls, key: bytes, shape: KvLayout, prompt: bytes, tenant: str = "") -> "Names":
        root = root_digest(key, "m", "", tenant, shape)
        local, sequence = block_hashes(prompt, SIZE, SALT)
        return cls(chain_digests(key, root, prompt, SIZE), sequence, local)

    def __len__(self) -> int:
        return len(self.sequence) // 8

    def digest(self, index: int) -> bytes:
        return self.digests[16 * index : 16 * index + 16]

    def prefix(self, count: int) -> "Names":
        return Names(
            self.digests[: 16 * count], self.sequence[: 8 * count], self.local[: 8 * count]
        )

    def after(self, shared: int, of: int) -> dict[str, Any]:
        """Fields of a delta after the first `shared` blocks, based on the first `of`."""
        return {
            "digests": self.digests[16 * shared :],
            "sequence_hashes": self.sequence[8 * shared :],
            "local": self.local[8 * shared :],
            "base": self.digest(of - 1),
            "shared": shared,
        }


def content(digest: bytes, size: int) -> bytes:
    """The bytes of a block."""
    return (digest * (size // 16 + 1))[:size]


@dataclass
class FetchResult:
    """Result of a fetch: bytes and source tiers of all its blocks, and its ticket."""

    ticket: int
    blocks: list[bytes] = field(default_factory=list)
    tiers: list[int] = field(default_factory=list)
    bad: int = 0


class TestWorker:
    """An attached worker in this process, with its own lock."""

    __test__ = False
    _numbers = count()

    def __init__(self, bus: Bus, card: Instance, shape: KvLayout) -> None:
        assert card.store is not None
        self.bus = bus
        self.card = card
        self.shape = shape
        self.directory = Path(card.store.directory)
        name = f"worker-{os.getpid()}-{next(self._numbers)}"
        self.name = name
        self._lock = os.open(self.directory / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.attached: Attached | None = None
        self._map: mmap.mmap | None = None

    async def request(self, message: object, reply: type[T], timeout: float = 10.0) -> T:
        subject = self.bus.subjects.kvbm(self.card.instance)
        answer = await self.bus.request(subject, message, _replies, timeout)
        assert isinstance(answer, reply), answer
        return answer

    async def attach(self) -> Attached:
        message = Attach(self.name, "m", self.shape, f"{self.name}.lock")
        self.attached = await self.request(message, Attached)
        file = os.open(self.directory / self.attached.arena, os.O_RDWR)
        self._map = mmap.mmap(file, self.attached.arena_bytes)
        os.close(file)
        return self.attached

    @property
    def id(self) -> int:
        assert self.attached is not None
        return self.attached.attachment

    def names(self, prompt: bytes, tenant: str = "") -> Names:
        assert self.attached is not None
        return Names.of(self.attached.key, self.shape, prompt, tenant)

    async def offer(self, names: Names, first: int = 0, **more: object) -> Wanted:
        message = Offer(self.id, first, names.digests, names.sequence, names.local, SALT)
        return await self.request(msgspec.structs.replace(message, **more), Wanted)

    def write(self, names: Names, wanted: Wanted) -> bytes:
        """Copy blocks into the arena; return their checksums."""
        assert self._map is not None
        sums = array("Q")
        for index, offset in zip(
            array("I", wanted.blocks), array("Q", wanted.offsets), strict=True
        ):
            data = content(names.digest(index), self.shape.block_bytes)
            self._map[offset : offset + len(data)] = data
            sums.append(xxh3(data))
        return sums.tobytes()

    async def put(self, names: Names, first: int = 0, **more: object) -> int:
        """Offer, write and commit; return the number of written blocks."""
        wanted = await self.offer(names, first, **more)
        if not wanted.ticket:
            return 0
        sums = self.write(names, wanted)
        return (await self.request(Commit(self.id, wanted.ticket, sums), Done)).blocks

    async def fetch(self, names: Names, held: int = 0, **more: object) -> Fetched:
        message = Fetch(
            self.id, "r", held, names.digests, names.sequence, names.local, SALT, 0.0, 0.0, 0.0
        )
        fetch = msgspec.structs.replace(message, **more)
        return await self.request(fetch, Fetched, 30.0 + fetch.wait_s)

    def read(self, names: Names, first: int, fetched: Fetched, result: FetchResult) -> None:
        """Read and verify the blocks of a reply."""
        assert self._map is not None
        offsets, sums = array("Q", fetched.offsets), array("Q", fetched.checksums)
        for index, (offset, checksum) in enumerate(zip(offsets, sums, strict=True)):
            data = self._map[offset : offset + self.shape.block_bytes]
            if xxh3(data) != checksum:
                result.bad += 1
            assert result.bad or data == content(names.digest(first + index), len(data))
            result.blocks.append(data)
        result.tiers += fetched.tiers

    async def get(self, names: Names, held: int = 0, **more: object) -> FetchResult:
        """Fetch all available blocks and finish the ticket."""
        fetched = await self.fetch(names, held, **more)
        result = FetchResult(fetched.ticket)
        while True:
            self.read(names, held + len(result.blocks), fetched, result)
            if not fetched.pending:
                break
            fetched = await self.request(Await(self.id, result.ticket, 5.0), Fetched)
        if result.ticket:
            await self.request(Finish(self.id, result.ticket), Done)
        return result

    async def corrupt(self, ticket: int, digests: bytes) -> None:
        await self.request(Corrupt(self.id, ticket, digests), Done)

    async def computed(self, request: str) -> None:
        await self.request(Computed(self.id, request), Done)

    async def detach(self) -> None:
        await self.request(Detach(self.id), Done)

    def close(self) -> None:
        os.close(self._lock)
        if self._map is not None:
            self._map.close()


async def find_kvbm(bus: Bus, limits: StreamLimits, excluded: Collection[str] = ()) -> Instance:
    """The card of a kvbm other than these instances."""
    directory = Directory(bus, limits)
    await directory.open()

    def other_kvbm() -> Instance | None:
        cards = directory.instances
        return next((c for c in cards if c.role is Role.KVBM and c.instance not in excluded), None)

    try:
        found = await eventually(other_kvbm, what="a kvbm")
        assert found is not None
        return found
    finally:
        await directory.close()


async def hold_ticket(url: str, namespace: str, act: str) -> None:
    """Attach, open a write (`offer`) or read (`fetch`) ticket, print it, and wait."""
    bus = await Bus.connect(BusOptions(url=url, namespace=namespace), "victim")
    worker = TestWorker(bus, await find_kvbm(bus, StreamLimits()), layout())
    await worker.attach()
    names = worker.names(tokens(8, seed=77 if act == "offer" else 1))
    reply = await (worker.offer(names) if act == "offer" else worker.fetch(names))
    print(reply.ticket, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(hold_ticket(*sys.argv[1:4]))
