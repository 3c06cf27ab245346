"""Prefetches in slices of a prompt: requests for one token, paced beside the others.

vLLM schedules running requests before waiting ones of any priority, so a whole prompt as one
request would delay all that arrive meanwhile. It keeps all full blocks that an aborted request has
computed. With the block manager's connector, a slice loads the blocks that lower tiers hold.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from msgspec.structs import replace

from kvmesh.bus.messages import Prefetch, Work
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.prefetching.pacer import PrefetchPacer
from kvmesh.worker.adapters.prefetching.queue import prefetch_work
from kvmesh.worker.adapters.request_streams import StreamOutput

log = logging.getLogger(__name__)
POLL_S = 0.01
EVENT_LAG_S = 0.1
SETBACKS = 2
LOOKUP_BLOCKS = 16


class SlicePrefetcher:
    """Implements `PrefetchLoader`; `generate` runs a request and reports its cached tokens.

    One `ledger` and `pacer` per rank. `context` is in tokens; `tiered`: there is a connector to a
    block manager.
    """

    def __init__(
        self,
        ledgers: list[CacheLedger],
        pacers: list[PrefetchPacer],
        generate: Callable[[Work], AsyncGenerator[StreamOutput, None]],
        is_live: Callable[[str], bool],
        block_size: int,
        context: int,
        tiered: bool,
    ) -> None:
        self._ledgers = ledgers
        self._pacers = pacers
        self._generate = generate
        self._is_live = is_live
        self._block_size = block_size
        self._max_blocks = (context - 2) // block_size  # the filler and the output follow
        self._tiered = tiered
        self._turns = [asyncio.Lock() for _ in ledgers]

    def is_live(self, request: str, rank: int) -> bool:
        return self._is_live(request)

    def estimate_seconds(self, command: Prefetch, hashes: "array[int]") -> float:
        pacer = self._pacers[command.rank]
        return pacer.seconds(min(len(hashes), -(-command.compute // self._block_size)))

    async def load(self, command: Prefetch, hashes: "array[int]", local: "array[int]") -> int:
        # a speculative prefill begins before the events of the answer that it follows have come
        await asyncio.sleep(EVENT_LAG_S)
        work = prefetch_work(command, command.tokens)
        held = self._ledgers[work.rank].cached_tokens(work) // self._block_size
        return await self._load(work, held) if self._tiered else held

    async def compute(self, work: Work, held: int) -> None:
        total, setbacks = self._blocks(work), 0
        while held < total:
            end = min(held + self._pacers[work.rank].blocks, total)
            reused = await self._run_slice(work, end, end == total)
            setbacks += reused < held
            if setbacks == SETBACKS:
                log.info("prefetch %s ends: the engine evicts what it computed", work.request)
                return
            held = end

    async def _load(self, work: Work, held: int) -> int:
        """Load the blocks of lower tiers; return the number held then.

        The first blocks that no tier holds are computed, LOOKUP_BLOCKS at most.
        """
        total, count = self._blocks(work), 1
        while held < total:
            end = min(held + count, total)
            reused = await self._run_slice(work, end, end == total)
            held = end
            if reused < end:
                return held
            count = min(2 * count, LOOKUP_BLOCKS)
        return held

    async def _run_slice(self, work: Work, end: int, last: bool) -> int:
        """Have the engine hold the first `end` blocks; return how many it did not compute."""
        pacer, reused = self._pacers[work.rank], 0
        async with self._turns[work.rank]:
            started = await self._wait_for_turn(pacer)
            async with aclosing(self._generate(self._slice(work, end, last))) as outputs:
                async for output in outputs:
                    reused = (output.cached or 0) // self._block_size
            now = asyncio.get_running_loop().time()
            pacer.record_slice(now - started, now)
        return reused

    def _slice(self, work: Work, end: int, last: bool) -> Work:
        """A request for one token after the first `end` blocks.

        vLLM computes the last token of every prompt: a filler in a block that it does not cache.
        """
        size = end * self._block_size * TOKEN_BYTES
        return replace(
            work,
            request=f"{work.request}.{end}",
            tokens=work.tokens[:size] + work.tokens[:TOKEN_BYTES],
            retention=work.retention if last else [],
        )

    async def _wait_for_turn(self, pacer: PrefetchPacer) -> float:
        clock = asyncio.get_running_loop().time
        while (pause := pacer.pause(clock())) != 0.0:
            await asyncio.sleep(POLL_S if pause is None else min(pause, POLL_S))
        return clock()

    def _blocks(self, work: Work) -> int:
        return min(len(work.tokens) // TOKEN_BYTES // self._block_size, self._max_blocks)
