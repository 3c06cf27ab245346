"""A prefetch from the lower tiers of a mock engine."""

from array import array

from kvmesh.bus.messages import owner
from kvmesh.worker.engines.mock.core import MockCore

PART_BYTES = 64 << 20


class PrefixLoad:
    """Loads a prefix part by part; the held part of it stays locked until `close`."""

    def __init__(
        self, core: MockCore, hashes: "array[int]", local: "array[int]", salt: int, tenant: str
    ) -> None:
        self._core = core
        self._hashes = hashes
        self._local = local
        self._salt = salt
        self._tenant = tenant
        self._loading = 0
        self.held = 0 if self._is_foreign() else core.blocks.lock_prefix(hashes)

    def start_next(self, now: float) -> float | None:
        """Start to load the next part.

        Returns its arrival time, or None if nothing is left to load.
        """
        core, blocks = self._core, self._core.blocks
        blocks.now = now
        if self._is_foreign():
            return None
        self._lock()
        found = core.tiers.match_prefix(self._hashes, self.held)
        limit = max(1, PART_BYTES // core.tiers.block_bytes)
        part = min(found.loadable, limit, blocks.available)
        if not part:
            return None
        blocks.allocate(part)
        self._loading = part
        return core.tiers.load(found.first(part), now)

    def finish_part(self, now: float) -> None:
        """Promote the blocks of the part that has arrived."""
        blocks, first = self._core.blocks, self.held
        blocks.now = now
        new = slice(first, first + self._loading)
        parent = self._hashes[first - 1] if first else None
        if self._is_foreign():
            blocks.free_private(self._loading)
            self._loading = 0
            return
        blocks.promote(parent, self._salt, self._hashes[new], self._local[new], self._tenant)
        self.held += self._loading
        self._loading = 0
        self._core.tiers.hand_over_retention(self._hashes[: self.held], owner(self._tenant), blocks)

    def close(self) -> None:
        """Unlock the prefix and free blocks that have not arrived."""
        self._core.blocks.free_private(self._loading)
        self._core.blocks.unlock(self._hashes[: self.held])

    def _is_foreign(self) -> bool:
        """True if another tenant's blocks have these hashes; nothing is loaded then."""
        core, first = self._core, self._hashes[0]
        held = core.blocks.is_foreign(first, self._tenant)
        return held or core.tiers.is_foreign(first, self._tenant)

    def _lock(self) -> None:
        """Lock all blocks of the prefix that are held by now."""
        before, self.held = self.held, self._core.blocks.lock_prefix(self._hashes)
        self._core.blocks.unlock(self._hashes[:before])
