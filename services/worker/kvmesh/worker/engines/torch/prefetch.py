"""What the torch engine does for prefetches: blocks from the kvbm, or computed behind requests."""

from array import array
from collections.abc import Callable

from kvmesh.bus.messages import Prefetch, Work
from kvmesh.worker.adapters.prefetch import prefetch_work
from kvmesh.worker.engines.torch.blocks.block_io import Prefix
from kvmesh.worker.engines.torch.blocks.lower_tiers import LowerTiers
from kvmesh.worker.engines.torch.core import TorchCore


class TorchLoader:
    """`submit` gives work to the engine, `told` as in `Prefix`."""

    def __init__(
        self,
        core: TorchCore,
        lower: LowerTiers | None,
        submit: Callable[[Work], None],
        told: Callable[[], None],
    ) -> None:
        self._core = core
        self._lower = lower
        self.compute = submit
        self._told = told

    def prompt_hashes(self, request: str, _: int) -> "array[int] | None":
        sequence = self._core.scheduler.live.get(request)
        return sequence.sequence_hashes if sequence is not None else None

    def estimate_seconds(self, wish: Prefetch, hashes: "array[int]") -> float:
        if self._lower is None:
            return 0.0
        speeds, seconds = self._lower.speeds, 0.0
        if speeds.load_bps:
            seconds += len(hashes) * self._core.model.layout.block_bytes / speeds.load_bps
        if speeds.compute_tps:
            seconds += wish.compute / speeds.compute_tps
        return seconds

    async def load(self, wish: Prefetch, hashes: "array[int]", local: "array[int]") -> int:
        work = prefetch_work(wish, wish.tokens)
        prints = self._core.guard.prints(work).upto(array("I", work.tokens), len(hashes))
        prefix = Prefix(self._core, hashes, local, prints, wish.salt, wish.tenant, self._told)
        try:
            if self._lower is not None:
                await self._lower.prefetch(work, prefix)
            return prefix.held
        finally:
            prefix.release()
            self._told()

    def cancel(self, work: Work) -> None:
        self._core.abort(work.request)
        self._told()
