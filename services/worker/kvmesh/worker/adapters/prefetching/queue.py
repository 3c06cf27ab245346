"""Prefetches of an engine: prompts whose blocks are loaded or computed before a request."""

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from kvmesh.bus.errors import cause
from kvmesh.bus.messages import Prefetch, Sampling, Work, owner
from kvmesh.tracing.names import BLOCKS, PREFETCH
from kvmesh.tracing.tracer import continued
from kvmesh.worker.engine import OutputDelta, Rejected
from kvmesh.worker.enginecore.retention_request import PREFETCH_PRIORITY
from kvmesh.worker.enginecore.sequence import hash_prompt

log = logging.getLogger(__name__)
MAX_PREFETCHES = 256
MIN_LEAD_S = 0.2


class PrefetchLoader(Protocol):
    """The part of a prefetch that depends on the engine."""

    def is_live(self, request: str, rank: int) -> bool:
        """True if a request has this id."""
        ...

    def estimate_seconds(self, command: Prefetch, hashes: "array[int]") -> float:
        """Expected duration of loading and computing."""
        ...

    async def load(self, command: Prefetch, hashes: "array[int]", local: "array[int]") -> int:
        """Load a prompt's blocks from lower tiers; return the number of blocks held then."""
        ...

    async def compute(self, work: Work, held: int) -> None:
        """Compute a prompt, of which `held` blocks were held; raises Rejected.

        Drops the rest if cancelled.
        """
        ...


class HiddenRequests:
    """Requests whose output nobody receives; `submit` queues work in the engine, `abort` drops it.

    `submit` raises Rejected.
    """

    def __init__(self, submit: Callable[[Work], None], abort: Callable[[Work], None]) -> None:
        self._submit = submit
        self._abort = abort
        self._ended: dict[str, asyncio.Event] = {}

    async def run(self, work: Work) -> None:
        """Submit work and wait for its end; drop it if cancelled."""
        ended = self._ended[work.request] = asyncio.Event()
        try:
            self._submit(work)
            await ended.wait()
        finally:
            self._abort(work)
            del self._ended[work.request]

    def visible(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Return `deltas` without those of hidden requests."""
        if not self._ended:
            return deltas
        for delta in deltas:
            if delta.finish and delta.request in self._ended:
                self._ended[delta.request].set()
        return [delta for delta in deltas if delta.request not in self._ended]


class PrefetchQueue:
    """Prefetches in progress, by id.

    Each first loads blocks from lower tiers, then computes as many more as requested behind all
    requests.
    """

    def __init__(self, loader: PrefetchLoader, block_size: int) -> None:
        self._loader = loader
        self._block_size = block_size
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._prompts: dict[str, array[int]] = {}
        self._commands: dict[str, Prefetch] = {}

    def start(self, command: Prefetch) -> str:
        """Start a prefetch, or replace the one with the same id.

        Returns the reason if it is refused.
        """
        self.cancel(command.id)
        if self._loader.is_live(command.id, command.rank):
            return "a request has this id"
        local, sequence, _ = hash_prompt(command.tokens, self._block_size, command.salt)
        if not sequence:
            return "the prompt has no full block"
        if len(self._tasks) >= MAX_PREFETCHES and not self._evict_for(command):
            return f"{MAX_PREFETCHES} prefetches are in progress"
        hashes = array("Q", sequence)
        running = asyncio.create_task(
            self._run(command, hashes, array("Q", local)), name="prefetch"
        )
        self._tasks[command.id], self._prompts[command.id] = running, hashes
        self._commands[command.id] = command
        running.add_done_callback(lambda task: self._on_done(command.id, task))
        return ""

    def cancel(self, prefetch: str) -> bool:
        """Stop a prefetch; False if it is not in progress."""
        task = self._tasks.pop(prefetch, None)
        if task is None:
            return False
        del self._prompts[prefetch], self._commands[prefetch]
        return task.cancel()

    def on_request(self, work: Work) -> None:
        """Stop prefetches that share a prefix with a new request, which computes it itself."""
        if not self._prompts:
            return
        prompt = array("Q", hash_prompt(work.tokens, self._block_size, work.salt)[1])
        for prefetch, hashes in list(self._prompts.items()):
            shared = min(len(hashes), len(prompt))
            if shared and hashes[:shared] == prompt[:shared]:
                self.cancel(prefetch)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for prefetch in list(self._tasks):
            self.cancel(prefetch)
        if tasks:
            await asyncio.wait(tasks)

    def _evict_for(self, command: Prefetch) -> bool:
        """Cancel the last prefetch of the owner with the most; False if this one has as many."""
        counts = Counter(owner(known.tenant) for known in self._commands.values())
        highest = max(counts.values())
        if counts[owner(command.tenant)] >= highest:
            return False
        theirs = (w for w in self._commands.values() if counts[owner(w.tenant)] == highest)
        last = max(theirs, key=lambda known: known.at or 0.0)
        log.info("prefetch %s cancelled in favour of an owner with fewer", last.id)
        return self.cancel(last.id)

    def _on_done(self, prefetch: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(prefetch) is task:
            del self._tasks[prefetch], self._prompts[prefetch], self._commands[prefetch]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("prefetch %s failed: %s", prefetch, cause(error))

    async def _run(self, command: Prefetch, hashes: "array[int]", local: "array[int]") -> None:
        now = time.time()
        at = command.at if command.at is not None else now
        lead = MIN_LEAD_S + 2 * self._loader.estimate_seconds(command, hashes)
        async with asyncio.timeout(max(0.0, at + command.deadline_s - now)):
            await asyncio.sleep(at - lead - now)
            span = continued(command.traceparent, PREFETCH)
            try:
                held = await self._loader.load(command, hashes, local)
                span.set(BLOCKS, held)
                if command.compute:
                    await self._compute(command, held)
            finally:
                span.end()

    async def _compute(self, command: Prefetch, held: int) -> None:
        size = self._block_size
        tokens = min(held * size + command.compute, len(command.tokens) // 4) // size * size
        if tokens <= held * size:
            return
        try:
            await self._loader.compute(prefetch_work(command, command.tokens[: 4 * tokens]), held)
        except Rejected as rejected:
            log.warning("prefetch %s not computed: %s", command.id, rejected.reason)


def prefetch_work(command: Prefetch, tokens: bytes) -> Work:
    """A prefetch as work for one token."""
    return Work(
        request=command.id,
        frontend="",
        tokens=tokens,
        sampling=Sampling(max_tokens=1, temperature=0.0),
        salt=command.salt,
        adapter=command.adapter,
        rank=command.rank,
        priority=PREFETCH_PRIORITY,
        session=command.session,
        conversation=command.conversation,
        tenant=command.tenant,
        retention=command.retention,
        traceparent=command.traceparent,
    )
