"""A worker as its kvbm sees it: a lock, a mapping of the arena, and the messages between them.

`python -m support.kvbm` runs one as a process that does one thing and then waits to be killed.
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
from kvmesh.blocks.layout import KvLayout, LayerLayout
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.discovery import Directory
from kvmesh.bus.kvbm import (
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
    KvbmReply,
    Offer,
    Wanted,
)
from kvmesh.bus.messages import Instance, Role
from kvmesh.bus.streams import StreamLimits
from kvmesh.hashing import block_hashes
from support.wait import eventually

T = TypeVar("T")
SIZE = 4
SALT = 5


def layout(block_bytes: int = 8192, weights: str = "w") -> KvLayout:
    """One whose blocks have this many bytes."""
    item = block_bytes // (2 * SIZE)
    return KvLayout(
        weights=weights,
        dtype="uint8",
        item_bytes=1,
        block_size=SIZE,
        layers=[LayerLayout(1, item, item)],
    )


def tokens(blocks: int, seed: int = 0) -> bytes:
    """A prompt of full blocks; those of equal seeds begin alike."""
    return array("I", [seed * 100_000 + n for n in range(blocks * SIZE)]).tobytes()


@dataclass(frozen=True)
class Names:
    """What a prompt's blocks are called."""

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

    def upto(self, count: int) -> "Names":
        return Names(
            self.digests[: 16 * count], self.sequence[: 8 * count], self.local[: 8 * count]
        )

    def after(self, shared: int, of: int) -> dict[str, Any]:
        """What follows the first `shared` blocks, for one who knows the first `of`."""
        return {
            "digests": self.digests[16 * shared :],
            "sequence_hashes": self.sequence[8 * shared :],
            "local": self.local[8 * shared :],
            "base": self.digest(of - 1),
            "shared": shared,
        }


def content(digest: bytes, size: int) -> bytes:
    """What a block's bytes are."""
    return (digest * (size // 16 + 1))[:size]


@dataclass
class Taken:
    """What a fetch got: all its blocks' bytes, where they were, and its ticket."""

    ticket: int
    blocks: list[bytes] = field(default_factory=list)
    tiers: list[int] = field(default_factory=list)
    bad: int = 0


class TestWorker:
    """One attached worker, in this process, with a lock of its own."""

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

    async def ask(self, message: object, reply: type[T], timeout: float = 10.0) -> T:
        subject = self.bus.subjects.kvbm(self.card.instance)
        either: type[KvbmReply] = KvbmReply  # type: ignore[assignment]
        answer = await self.bus.request(subject, message, either, timeout)
        assert isinstance(answer, reply), answer
        return answer

    async def attach(self) -> Attached:
        message = Attach(self.name, "m", self.shape, f"{self.name}.lock")
        self.attached = await self.ask(message, Attached)
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
        return await self.ask(msgspec.structs.replace(message, **more), Wanted)

    def write(self, names: Names, wanted: Wanted) -> bytes:
        """Copy blocks into the arena; returns the checksums."""
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
        """Offer, write and commit; returns how many blocks were taken."""
        wanted = await self.offer(names, first, **more)
        if not wanted.ticket:
            return 0
        sums = self.write(names, wanted)
        return (await self.ask(Commit(self.id, wanted.ticket, sums), Done)).blocks

    async def fetch(self, names: Names, held: int = 0, **more: object) -> Fetched:
        message = Fetch(
            self.id, "r", held, names.digests, names.sequence, names.local, SALT, 0.0, 0.0, 0.0
        )
        fetch = msgspec.structs.replace(message, **more)
        return await self.ask(fetch, Fetched, 30.0 + fetch.wait_s)

    def read(self, names: Names, first: int, fetched: Fetched, taken: Taken) -> None:
        """Read and verify what a reply gives."""
        assert self._map is not None
        offsets, sums = array("Q", fetched.offsets), array("Q", fetched.checksums)
        for place, (offset, checksum) in enumerate(zip(offsets, sums, strict=True)):
            data = self._map[offset : offset + self.shape.block_bytes]
            if xxh3(data) != checksum:
                taken.bad += 1
            assert taken.bad or data == content(names.digest(first + place), len(data))
            taken.blocks.append(data)
        taken.tiers += fetched.tiers

    async def get(self, names: Names, held: int = 0, **more: object) -> Taken:
        """Fetch all that there is, to the end of the ticket."""
        fetched = await self.fetch(names, held, **more)
        taken = Taken(fetched.ticket)
        while True:
            self.read(names, held + len(taken.blocks), fetched, taken)
            if not fetched.pending:
                break
            fetched = await self.ask(Await(self.id, taken.ticket, 5.0), Fetched)
        if taken.ticket:
            await self.ask(Finish(self.id, taken.ticket), Done)
        return taken

    async def corrupt(self, ticket: int, digests: bytes) -> None:
        await self.ask(Corrupt(self.id, ticket, digests), Done)

    async def computed(self, request: str) -> None:
        await self.ask(Computed(self.id, request), Done)

    async def detach(self) -> None:
        await self.ask(Detach(self.id), Done)

    def close(self) -> None:
        os.close(self._lock)
        if self._map is not None:
            self._map.close()


async def find_kvbm(bus: Bus, limits: StreamLimits, but: Collection[str] = ()) -> Instance:
    """The card of a kvbm that is there and is not one of these instances."""
    directory = Directory(bus, limits)
    await directory.open()

    def there() -> Instance | None:
        cards = directory.instances
        return next((c for c in cards if c.role is Role.KVBM and c.instance not in but), None)

    try:
        found = await eventually(there, what="a kvbm")
        assert found is not None
        return found
    finally:
        await directory.close()


async def stand_still(url: str, namespace: str, act: str) -> None:
    """Attach, begin to write (`offer`) or to read (`fetch`) a prompt, say so, and wait."""
    bus = await Bus.connect(BusOptions(url=url, namespace=namespace), "victim")
    worker = TestWorker(bus, await find_kvbm(bus, StreamLimits()), layout())
    await worker.attach()
    names = worker.names(tokens(8, seed=77 if act == "offer" else 1))
    reply = await (worker.offer(names) if act == "offer" else worker.fetch(names))
    print(reply.ticket, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(stand_still(*sys.argv[1:4]))
