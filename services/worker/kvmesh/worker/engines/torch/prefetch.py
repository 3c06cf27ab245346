"""Prefetches of the torch engine: loads blocks from the kvbm, or computes them behind requests."""

from array import array
from collections.abc import Callable

from kvmesh.bus.messages import Prefetch, Work
from kvmesh.worker.adapters.prefetching.queue import HiddenRequests, prefetch_work
from kvmesh.worker.engines.torch.blocks.block_io import HeldPrefix
from kvmesh.worker.engines.torch.blocks.lower_tiers import LowerTiers
from kvmesh.worker.engines.torch.core import TorchCore


class TorchPrefetcher:
    """Implements `PrefetchLoader`; `submit` queues work in the engine."""

    def __init__(
        self,
        core: TorchCore,
        lower_tiers: LowerTiers | None,
        submit: Callable[[Work], None],
        on_change: Callable[[], None],
    ) -> None:
        self._core = core
        self._lower_tiers = lower_tiers
        self.hidden = HiddenRequests(submit, self._abort)
        self._on_change = on_change

    def is_live(self, request: str, _: int) -> bool:
        return request in self._core.scheduler.live

    def estimate_seconds(self, command: Prefetch, hashes: "array[int]") -> float:
        if self._lower_tiers is None:
            return 0.0
        speeds, seconds = self._lower_tiers.speeds, 0.0
        if speeds.load_bps:
            seconds += len(hashes) * self._core.model.layout.block_bytes / speeds.load_bps
        if speeds.compute_tps:
            seconds += command.compute / speeds.compute_tps
        return seconds

    async def load(
        self, command: Prefetch, hashes: "array[int]", local_hashes: "array[int]"
    ) -> int:
        work = prefetch_work(command, command.tokens)
        fingerprints = self._core.guard.fingerprints(work).upto(
            array("I", work.tokens), len(hashes)
        )
        prefix = HeldPrefix(
            self._core,
            hashes,
            local_hashes,
            fingerprints,
            command.salt,
            command.tenant,
            self._on_change,
        )
        try:
            if self._lower_tiers is not None:
                await self._lower_tiers.prefetch(work, prefix)
            return prefix.held
        finally:
            prefix.release()
            self._on_change()

    async def compute(self, work: Work, held: int) -> None:
        await self.hidden.run(work)

    def _abort(self, work: Work) -> None:
        self._core.abort(work.request)
        self._on_change()
