"""Prefetches of the mock engine: blocks from its lower tiers, or computed after all requests."""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from kvmesh.bus.messages import Prefetch, Work
from kvmesh.worker.adapters.prefetching.queue import HiddenRequests
from kvmesh.worker.engine import Rejected
from kvmesh.worker.enginecore.sequence import Request
from kvmesh.worker.engines.mock.prefix_load import PrefixLoad
from kvmesh.worker.engines.mock.rank import MockRank


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
