"""Each tenant's share of a bucket that all share."""

import asyncio
from collections import OrderedDict
from hashlib import blake2b

from kvmesh.bus.buckets import bucket_sizes
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import owner
from kvmesh.runtime.lru import LruCache

FRESH_S = 60.0
MOST_OWNERS = 10_000


def owner_of(tenant: str) -> str:
    """The first token of the keys of a tenant: those that it divides itself into share one."""
    return named(owner(tenant))


def named(text: str) -> str:
    """A text as one token of a key."""
    return blake2b(text.encode(), digest_size=12).hexdigest()


class Holding:
    """The bytes of one owner, by entry, oldest first. Pure. An entry's keys differ in the last

    token only.
    """

    def __init__(self, sizes: dict[str, int], now: float) -> None:
        self._entries: OrderedDict[str, int] = OrderedDict()
        self.total = 0
        self.read_at = now
        for key, size in sizes.items():
            self.add(key.rpartition(".")[0], size)

    def add(self, entry: str, size: int) -> None:
        self._entries[entry] = self._entries.get(entry, 0) + size
        self.total += size

    def drop(self, most: int) -> list[str]:
        """Forget the oldest entries until no more than `most` bytes are left; which they were."""
        dropped = []
        while self.total > most and self._entries:
            entry, size = self._entries.popitem(last=False)
            self.total -= size
            dropped.append(entry)
        return dropped


class BucketQuota:
    """Drops the oldest of an owner for what it adds.

    What an owner adds through other frontends is seen when its entries are read again, which
    happens once a minute at most, and only where it has half of its share.
    """

    def __init__(self, bus: Bus, bucket: str, most: int) -> None:
        self._bus = bus
        self._bucket = bucket
        self.most = most
        self._held: LruCache[str, Holding] = LruCache(MOST_OWNERS)

    async def make_room(self, entry: str, size: int) -> None:
        """Before an entry of so many bytes is written; raises the server's errors."""
        owner, now = entry.partition(".")[0], asyncio.get_running_loop().time()
        held = self._held.get(owner)
        if held is None or (held.total > self.most // 2 and now - held.read_at > FRESH_S):
            sizes = await bucket_sizes(self._bus, self._bucket, f"{owner}.>")
            held = Holding(sizes, now)
            self._held.put(owner, held)
        held.add(entry, size)
        for old in held.drop(self.most):
            await self.purge(old)

    async def purge(self, entry: str) -> None:
        """Remove all of an entry at once."""
        stream, subject = f"KV_{self._bucket}", f"$KV.{self._bucket}.{entry}.>"
        await self._bus.js.purge_stream(stream, subject=subject)
