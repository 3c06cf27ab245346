"""Use of the blocks that were restored to the arena ahead of a return, by tenant."""

from collections import Counter
from math import inf
from typing import Literal, TypeAlias

from kvmesh.bus.messages import owner
from kvmesh.runtime.lru import LruCache

TRIAL_BLOCKS = 64
MEMORY_BLOCKS = 512.0
LEAST_READ = 0.5
ENOUGH_READ = 0.6
RETRY_S = 60.0
MAX_TENANTS = 1024  # the latest
RestoreMode: TypeAlias = Literal["trial", "on", "off"]


class RestoredUse:
    """Blocks of one tenant that were restored: those read, and those that left the arena unread.

    Restoring is a trial until TRIAL_BLOCKS have been read or lost. Then it is on until less than
    LEAST_READ of the last about MEMORY_BLOCKS were read, and off until ENOUGH_READ of them are. Up
    to TRIAL_BLOCKS are tried meanwhile, one batch per RETRY_S. `ahead`: the tenant's blocks are
    likely to be restored, as of the last `RestoredBlocks.review`.
    """

    def __init__(self) -> None:
        self.unread = 0
        self.ahead = True
        self._ended = 0
        self._pays = True
        self._read = 0.0
        self._lost = 0.0
        self._retry_at = -inf

    @property
    def mode(self) -> RestoreMode:
        if self._ended < TRIAL_BLOCKS:
            return "trial"
        return "on" if self._pays else "off"

    def allowance(self, now: float) -> float:
        """The most blocks that may be restored at once."""
        if now < self._retry_at:
            return 0.0
        return inf if self.mode == "on" else float(TRIAL_BLOCKS - self.unread)

    def wait(self, now: float) -> None:
        """Restore no further blocks for RETRY_S."""
        self._retry_at = now + RETRY_S

    def end(self, read: bool) -> None:
        """Count a block that was read first, or lost unread."""
        self.unread = max(self.unread - 1, 0)
        self._ended += 1
        fade = 1.0 - 1.0 / MEMORY_BLOCKS
        self._read = fade * self._read + read
        self._lost = fade * self._lost + (not read)
        least = LEAST_READ if self._pays else ENOUGH_READ
        if self._ended >= TRIAL_BLOCKS:
            self._pays = self._read >= least * (self._read + self._lost)


class RestoredBlocks:
    """The use of restored blocks by tenant, and their bytes in all.

    Callers decide whether their sessions return, so each tenant is judged for itself. At most
    MAX_TENANTS are remembered.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.read_bytes = 0
        self.lost_bytes = 0
        self._uses: LruCache[str, RestoredUse] = LruCache(MAX_TENANTS)
        self._modes: Counter[RestoreMode] = Counter()
        self._changed: set[RestoredUse] = set()

    @property
    def mode(self) -> RestoreMode:
        """The state of the tenant for which most is known to pay."""
        if self._modes["on"]:
            return "on"
        return "trial" if self._modes["trial"] or not self._modes["off"] else "off"

    def of(self, tenant: str) -> RestoredUse:
        """The use of a tenant's blocks, all of its parts together."""
        name = owner(tenant)
        use = self._uses.get(name)
        if use is None:
            if len(self._uses) >= MAX_TENANTS:
                self._modes[self._uses.evict()[1].mode] -= 1
            use = RestoredUse()
            self._uses.put(name, use)
            self._modes[use.mode] += 1
        return use

    def review(self) -> None:
        """Decide from now on for which tenants blocks are lowered in order to be restored."""
        for use in self._changed:
            use.ahead = use.mode != "off"
        self._changed.clear()

    def start(self, tenant: str, size: int) -> None:
        """Count a block of `size` bytes whose restore has started."""
        self.bytes += size
        self.of(tenant).unread += 1

    def end(self, tenant: str, size: int, read: bool) -> None:
        """Count a block that was read first, or lost unread."""
        use = self.of(tenant)
        self._modes[use.mode] -= 1
        use.end(read)
        self._modes[use.mode] += 1
        self._changed.add(use)
        if read:
            self.read_bytes += size
        else:
            self.lost_bytes += size
