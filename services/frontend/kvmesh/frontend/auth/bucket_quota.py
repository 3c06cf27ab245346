"""Quota of each tenant in a bucket that all tenants share."""

import asyncio
from collections import OrderedDict
from hashlib import blake2b

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import owner
from kvmesh.bus.storage.buckets import bucket_sizes
from kvmesh.runtime.lru import LruCache

FRESH_S = 60.0
MAX_OWNERS = 10_000


def owner_of(tenant: str) -> str:
    """First token of a tenant's keys; all parts of a tenant share it."""
    return key_token(owner(tenant))


def key_token(text: str) -> str:
    """A text as one token of a bucket key."""
    return blake2b(text.encode(), digest_size=12).hexdigest()


class OwnerUsage:
    """Bytes of one owner by entry, oldest first; keys of an entry differ in the last token."""

    def __init__(self, sizes: dict[str, int], now: float) -> None:
        self._entries: OrderedDict[str, int] = OrderedDict()
        self.total = 0
        self.read_at = now
        for key, size in sizes.items():
            self.add(key.rpartition(".")[0], size)

    def add(self, entry: str, size: int) -> None:
        self._entries[entry] = self._entries.get(entry, 0) + size
        self.total += size

    def remove(self, entry: str) -> None:
        """Forget an entry that is gone."""
        self.total -= self._entries.pop(entry, 0)

    def evict(self, max_bytes: int) -> list[str]:
        """Drop the oldest entries until at most `max_bytes` are left; return the dropped ones."""
        dropped = []
        while self.total > max_bytes and self._entries:
            entry, size = self._entries.popitem(last=False)
            self.total -= size
            dropped.append(entry)
        return dropped


class BucketQuota:
    """Purges an owner's oldest entries when new ones exceed its quota.

    Entries written by other frontends are counted when sizes are read again: at most once a minute,
    and only for an owner that uses more than half of its quota.
    """

    def __init__(self, bus: Bus, bucket: str, max_bytes: int) -> None:
        self._bus = bus
        self._bucket = bucket
        self.max_bytes = max_bytes
        self._usages: LruCache[str, OwnerUsage] = LruCache(MAX_OWNERS)

    async def reserve(self, entry: str, size: int) -> None:
        """Make space for an entry of `size` bytes; raises the server's errors."""
        owner, now = entry.partition(".")[0], asyncio.get_running_loop().time()
        usage = self._usages.get(owner)
        if usage is None or (usage.total > self.max_bytes // 2 and now - usage.read_at > FRESH_S):
            sizes = await bucket_sizes(self._bus, self._bucket, f"{owner}.>")
            usage = OwnerUsage(sizes, now)
            self._usages.put(owner, usage)
        usage.add(entry, size)
        for old in usage.evict(self.max_bytes):
            await self.purge(old)

    async def purge(self, entry: str, before: int | None = None) -> None:
        """Remove all keys of an entry, or those stored `before` a revision."""
        stream, subject = f"KV_{self._bucket}", f"$KV.{self._bucket}.{entry}.>"
        await self._bus.js.purge_stream(stream, seq=before, subject=subject)
        usage = self._usages.get(entry.partition(".")[0])
        if usage is not None and before is None:
            usage.remove(entry)
