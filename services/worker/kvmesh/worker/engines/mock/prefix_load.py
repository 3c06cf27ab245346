"""A prompt's blocks on their way from the tiers below into a mock engine, ahead of requests."""

from array import array

from kvmesh.bus.messages import owner
from kvmesh.worker.engines.mock.core import MockCore

PART_BYTES = 64 << 20


class PrefixLoad:
    """Brings a prefix in, part by part; what is held of it stays until `close`."""

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
        """Begin to load the next part: when it will be here, None if there is no more to load."""
        core, blocks = self._core, self._core.blocks
        blocks.now = now
        if self._is_foreign():
            return None
        self._lock()
        found = core.tiers.match_prefix(self._hashes, self.held)
        most = max(1, PART_BYTES // core.tiers.block_bytes)
        part = min(found.loadable, most, blocks.available)
        if not part:
            return None
        blocks.allocate(part)
        self._loading = part
        return core.tiers.load(found.first(part), now)

    def finish_part(self, now: float) -> None:
        """The part is here."""
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
        """Refer to nothing any more, and give up what has not come."""
        self._core.blocks.free_private(self._loading)
        self._core.blocks.unlock(self._hashes[: self.held])

    def _is_foreign(self) -> bool:
        """Whether these hashes are those of another tenant's blocks: then nothing is loaded."""
        core, first = self._core, self._hashes[0]
        held = core.blocks.is_foreign(first, self._tenant)
        return held or core.tiers.is_foreign(first, self._tenant)

    def _lock(self) -> None:
        """Refer to all that is held by now."""
        before, self.held = self.held, self._core.blocks.lock_prefix(self._hashes)
        self._core.blocks.unlock(self._hashes[:before])
