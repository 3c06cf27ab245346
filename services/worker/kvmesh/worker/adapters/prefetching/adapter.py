"""Base class of the streaming engines that prefetch in slices."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvmesh.bus.messages import Prefetch, Work
from kvmesh.hashing import has_image_tokens
from kvmesh.worker.adapters.base import StreamingAdapter
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.prefetching.pacer import PrefetchPacer
from kvmesh.worker.adapters.prefetching.queue import PrefetchQueue
from kvmesh.worker.adapters.prefetching.slices import SlicePrefetcher
from kvmesh.worker.adapters.request_streams import RequestStreams, StreamOutput


class PrefetchingAdapter(StreamingAdapter):
    """Subclasses call `_open_prefetches` when the engine has started, and run requests `_paced`."""

    def __init__(self) -> None:
        super().__init__()
        self._pacers: list[PrefetchPacer] = []
        self._prefetches: PrefetchQueue | None = None

    def prefetch(self, command: Prefetch) -> str:
        if self._prefetches is None:
            return "the engine has not started"
        if not 0 <= command.rank < len(self._pacers):
            return f"there is no rank {command.rank}"
        if has_image_tokens(command.tokens):
            return "unsupported: the prompt has images"
        return self._prefetches.start(command)

    def abort(self, request: str) -> bool:
        if self._prefetches is not None and self._prefetches.cancel(request):
            return True
        return super().abort(request)

    def _open_prefetches(
        self,
        streams: RequestStreams,
        ledgers: list[CacheLedger],
        generate: Callable[[Work], AsyncGenerator[StreamOutput, None]],
        block_size: int,
        context: int,
        step_tokens: int,
        tiered: bool,
    ) -> None:
        """Prefetch by `generate`, in slices of one step at most; see `SlicePrefetcher`."""
        self._pacers = [PrefetchPacer(step_tokens // block_size) for _ in ledgers]
        loader = SlicePrefetcher(
            ledgers, self._pacers, generate, streams.is_live, block_size, context, tiered
        )
        self._prefetches = PrefetchQueue(loader, block_size)

    def _end_prefetches_of(self, work: Work) -> None:
        """Stop prefetches of a prompt whose request has come."""
        if self._prefetches is not None:
            self._prefetches.on_request(work)

    def _paced(
        self, rank: int, outputs: AsyncGenerator[StreamOutput, None]
    ) -> AsyncGenerator[StreamOutput, None]:
        """The outputs of a caller's request, to whose speed prefetches adapt."""
        return _timed(self._pacers[rank], outputs) if self._pacers else outputs

    async def _pause_streams(self) -> None:
        if self._prefetches is not None:
            await self._prefetches.close()
        await super()._pause_streams()


async def _timed(
    pacer: PrefetchPacer, stream: AsyncGenerator[StreamOutput, None]
) -> AsyncGenerator[StreamOutput, None]:
    clock = asyncio.get_running_loop().time
    started, has_token = clock(), False
    pacer.begin()
    try:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                if not has_token:
                    has_token = True
                    pacer.record_first_token(clock() - started)
                yield output
    finally:
        pacer.end(has_token)
