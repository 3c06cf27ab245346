"""Prefetches of the mock engine: blocks from its lower tiers, or computed after all requests."""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from kvmesh.bus.messages import Prefetch, Work, owner
from kvmesh.worker.adapters.prefetching.queue import HiddenRequests
from kvmesh.worker.engine import Rejected
from kvmesh.worker.enginecore.sequence import Request
from kvmesh.worker.engines.mock.core import MockCore
from kvmesh.worker.engines.mock.rank import MockRank

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


class MockLoader:
    """Loads and computes on `ranks`; `request` converts work for the core or raises ValueError."""

    def __init__(self, ranks: Sequence[MockRank], request: Callable[[Work], Request]) -> None:
        self._ranks = ranks
        self._request = request
        self.hidden = HiddenRequests(self._submit, self._abort)

    def is_live(self, request: str, rank: int) -> bool:
        return request in self._ranks[rank].core.scheduler.live

    def estimate_seconds(self, command: Prefetch, hashes: "array[int]") -> float:
        core = self._ranks[command.rank].core
        held = core.blocks.match_prefix(hashes).matched
        loading = core.tiers.load_seconds(core.tiers.match_prefix(hashes, held))
        return loading + core.options.model.prefill(command.compute) / core.options.speedup

    async def load(self, command: Prefetch, hashes: "array[int]", local: "array[int]") -> int:
        rank = self._ranks[command.rank]
        clock = asyncio.get_running_loop().time
        prefix = PrefixLoad(rank.core, hashes, local, command.salt, command.tenant)
        try:
            while (ready_at := prefix.start_next(clock())) is not None:
                rank.publish_events()
                await asyncio.sleep(ready_at - clock())
                prefix.finish_part(clock())
                rank.publish_events()
            return prefix.held
        finally:
            prefix.close()

    async def compute(self, work: Work, held: int) -> None:
        await self.hidden.run(work)

    def _submit(self, work: Work) -> None:
        try:
            self._ranks[work.rank].submit(self._request(work))
        except ValueError as error:
            raise Rejected(str(error)) from error

    def _abort(self, work: Work) -> None:
        self._ranks[work.rank].abort(work.request)
