"""Prompts whose blocks are to be in the engine before anybody asks for an answer to them."""

import asyncio
import logging
import time
from array import array
from collections import Counter
from typing import Protocol

from kvmesh.bus.errors import cause
from kvmesh.bus.messages import Prefetch, Sampling, Work, owner
from kvmesh.worker.engine import OutputDelta, Rejected
from kvmesh.worker.enginecore.sequence import hash_prompt

log = logging.getLogger(__name__)
MAX_PREFETCHES = 256
MIN_LEAD_S = 0.2
PREFETCH_PRIORITY = -1


class PrefetchLoader(Protocol):
    """What an engine does for its prefetches."""

    def prompt_hashes(self, request: str, rank: int) -> "array[int] | None":
        """The block hashes of a live request's prompt."""
        ...

    def estimate_seconds(self, wish: Prefetch, hashes: "array[int]") -> float:
        """How long loading and computing may take."""
        ...

    async def load(self, wish: Prefetch, hashes: "array[int]", local: "array[int]") -> int:
        """Take in what the tiers below have of a prompt; how many blocks are held then."""
        ...

    def compute(self, work: Work) -> None:
        """Queue work whose answer goes to `Prefetches.keep_back` alone; raises Rejected."""
        ...

    def cancel(self, work: Work) -> None:
        """Forget such work, which may be over."""
        ...


class PrefetchQueue:
    """Those under way, by their ids.

    First blocks are loaded from below; then, as far as is asked, what comes after them is computed
    behind all requests, as one whose answer nobody gets.
    """

    def __init__(self, loader: PrefetchLoader, block_size: int) -> None:
        self._loader = loader
        self._block_size = block_size
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._prompts: dict[str, array[int]] = {}
        self._commands: dict[str, Prefetch] = {}
        self._computing: dict[str, asyncio.Event] = {}

    def start(self, wish: Prefetch) -> str:
        """Begin in time; returns why not if so. The same id replaces."""
        self.cancel(wish.id)
        if self._loader.prompt_hashes(wish.id, wish.rank) is not None:
            return "a request has this id"
        local, sequence, _ = hash_prompt(wish.tokens, self._block_size, wish.salt)
        if not sequence:
            return "the prompt has no full block"
        if len(self._tasks) >= MAX_PREFETCHES and not self._evict_for(wish):
            return f"{MAX_PREFETCHES} prefetches are under way"
        hashes = array("Q", sequence)
        running = asyncio.create_task(self._run(wish, hashes, array("Q", local)), name="prefetch")
        self._tasks[wish.id], self._prompts[wish.id] = running, hashes
        self._commands[wish.id] = wish
        running.add_done_callback(lambda task: self._on_done(wish.id, task))
        return ""

    def cancel(self, wish: str) -> bool:
        """Stop one; False if it is not under way."""
        task = self._tasks.pop(wish, None)
        if task is None:
            return False
        del self._prompts[wish], self._commands[wish]
        return task.cancel()

    def on_request(self, work: Work) -> None:
        """A request is here: if its prompt begins alike, it does the rest by itself."""
        prompt = self._loader.prompt_hashes(work.request, work.rank) if self._prompts else None
        if prompt is None:
            return
        for wish, hashes in list(self._prompts.items()):
            shared = min(len(hashes), len(prompt))
            if shared and hashes[:shared] == prompt[:shared]:
                self.cancel(wish)

    def without_prefetches(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """All news but that of prefetches."""
        for delta in deltas:
            if delta.finish and delta.request in self._computing:
                self._computing[delta.request].set()
        return [delta for delta in deltas if delta.request not in self._computing]

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for wish in list(self._tasks):
            self.cancel(wish)
        if tasks:
            await asyncio.wait(tasks)

    def _evict_for(self, wish: Prefetch) -> bool:
        """End what begins last of the owner with the most, if that has more than this one's."""
        counts = Counter(owner(known.tenant) for known in self._commands.values())
        most = max(counts.values())
        if counts[owner(wish.tenant)] >= most:
            return False
        theirs = (w for w in self._commands.values() if counts[owner(w.tenant)] == most)
        last = max(theirs, key=lambda known: known.at or 0.0)
        log.info("prefetch %s gives way to one of an owner that has fewer", last.id)
        return self.cancel(last.id)

    def _on_done(self, wish: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(wish) is task:
            del self._tasks[wish], self._prompts[wish], self._commands[wish]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("prefetch %s has failed: %s", wish, cause(error))

    async def _run(self, wish: Prefetch, hashes: "array[int]", local: "array[int]") -> None:
        now = time.time()
        at = wish.at if wish.at is not None else now
        lead = MIN_LEAD_S + 2 * self._loader.estimate_seconds(wish, hashes)
        async with asyncio.timeout(max(0.0, at + wish.deadline_s - now)):
            await asyncio.sleep(at - lead - now)
            held = await self._loader.load(wish, hashes, local)
            if wish.compute:
                await self._compute(wish, held)

    async def _compute(self, wish: Prefetch, held: int) -> None:
        size = self._block_size
        tokens = min(held * size + wish.compute, len(wish.tokens) // 4) // size * size
        if tokens <= held * size:
            return
        work = prefetch_work(wish, wish.tokens[: 4 * tokens])
        done = self._computing[wish.id] = asyncio.Event()
        try:
            self._loader.compute(work)
            await done.wait()
        except Rejected as rejected:
            log.warning("prefetch %s is not computed: %s", wish.id, rejected.reason)
        finally:
            self._loader.cancel(work)
            del self._computing[wish.id]


def prefetch_work(wish: Prefetch, tokens: bytes) -> Work:
    """A prefetch as work of one token."""
    return Work(
        request=wish.id,
        frontend="",
        tokens=tokens,
        sampling=Sampling(max_tokens=1, temperature=0.0),
        salt=wish.salt,
        adapter=wish.adapter,
        rank=wish.rank,
        priority=PREFETCH_PRIORITY,
        session=wish.session,
        tenant=wish.tenant,
        retention=wish.retention,
    )
