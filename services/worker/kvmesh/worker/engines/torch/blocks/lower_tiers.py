"""The tiers below the torch engine: blocks that come up before a prefill, and go down after it.

Books are kept on the event loop; blocks are copied in a thread of their own, while the model goes
on with other sequences. What is on its way is referred to, so that nobody else gets its place.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.blocks.digests import DigestChain
from kvmesh.blocks.kvbm_client import (
    FetchedPart,
    KvbmPrompt,
    PendingWrite,
    StoreClient,
    TierSpeeds,
    digest_of,
)
from kvmesh.blocks.write_through import WriteThrough
from kvmesh.bus.messages import Retain, Work, owner
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.throughput import MIN_MEASURED_TOKENS, Throughput
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.retention_request import inherited_retention
from kvmesh.worker.enginecore.sequence import Sequence, SequenceState
from kvmesh.worker.engines.torch.blocks.block_copier import BlockCopier
from kvmesh.worker.engines.torch.blocks.block_io import Prefix, hold
from kvmesh.worker.engines.torch.core import EngineRequest, TorchCore, TorchStep
from kvmesh.worker.engines.torch.threads import completed

log = logging.getLogger(__name__)
T = TypeVar("T")
TIERS = 4
LONG_PROMPT = 4096


class LowerOptions(Struct, frozen=True, kw_only=True):
    """`wait_s`: longest wait for what others compute, `deadline_s` for all that comes up.

    `queue` blocks at most wait to be written.
    """

    wait_s: float
    deadline_s: float
    queue: int


class Filled(NamedTuple):
    """The leading full blocks of a job, by their hashes, as they were when it was made."""

    job: EngineRequest
    hashes: "array[int]"
    local: "array[int]"


class LowerTiers:
    """Moves the blocks of `core` up and down. `told` is called when the books have changed."""

    def __init__(
        self,
        core: TorchCore,
        client: StoreClient,
        arenas: ArenaTensors,
        options: LowerOptions,
        told: Callable[[], None],
    ) -> None:
        self._counted = [0] * TIERS
        self._corrupt = 0
        self.writer: WriteThrough[Filled] = WriteThrough(client, self, options.queue)
        self._core = core
        self._client = client
        self._arenas = arenas
        self._options = options
        self._told = told
        self._copier = BlockCopier(core.model.memory)
        self._threads = ThreadPoolExecutor(2, "blocks")
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}
        self._touches: set[asyncio.Task[None]] = set()
        self._computing = Throughput()
        self._loading = Throughput()

    @property
    def counts(self) -> TierCounts:
        return TierCounts(
            loaded=self._counted,
            written=self.writer.written,
            skipped=self.writer.skipped,
            corrupt=self._corrupt,
        )

    @property
    def present(self) -> bool:
        """Whether there is a kvbm to ask."""
        return self._client.key is not None

    async def open(self) -> None:
        await self._client.open()
        self.writer.start()

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._touches]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.writer.close()
        await self._client.close()
        self._threads.shutdown()
        self._copier.close()

    def stepped(self, step: TorchStep, deltas: list[OutputDelta], seconds: float) -> None:
        """A step has computed parts of prompts, and ended some."""
        tokens = sum(len(turn.row.tokens) for turn in step.turns if not turn.decodes)
        if tokens >= MIN_MEASURED_TOKENS:
            self._computing.record(tokens, seconds)
        for delta in deltas:
            if delta.cached is not None:
                self.writer.end(delta.request)

    # up

    def look(self) -> None:
        """Begin to fetch for sequences that wait for it, and end it for those that do no more."""
        for sequence in [s for s in self._tasks if s.state is not SequenceState.LOADING]:
            self._tasks.pop(sequence).cancel()
        for sequence in self._core.scheduler.loading:
            if sequence not in self._tasks:
                fetching = asyncio.create_task(self._fetch(sequence), name="onboarding")
                self._tasks[sequence] = fetching
        if self.present:
            for sequence in self._core.scheduler.prefilling:
                self._touch(sequence, self._core.job(sequence))

    def _touch(self, sequence: Sequence, job: EngineRequest) -> None:
        """Have the tiers below note that a prompt is in use which the engine holds already."""
        if job.asked:
            return
        job.asked = True
        touching = asyncio.create_task(self._ask(sequence, job), name="touch")
        self._touches.add(touching)
        touching.add_done_callback(self._touches.discard)

    async def _ask(self, sequence: Sequence, job: EngineRequest) -> None:
        hashes = sequence.reusable
        prompt = await self._describe(job, hashes, sequence.local_hashes[: len(hashes)])
        if prompt is not None:
            loading = self._client.load(prompt, len(hashes), self.speeds, 0.0, 0.0)
            async with aclosing(loading) as parts:
                async for _ in parts:
                    break

    async def _fetch(self, sequence: Sequence) -> None:
        job, arrived = self._core.job(sequence), [0] * TIERS
        hashes = sequence.reusable
        local = sequence.local_hashes[: len(hashes)]
        prints = job.prints.upto(job.tokens, len(hashes))
        request = sequence.request
        prefix = Prefix(self._core, hashes, local, prints, request.salt, request.tenant, self._told)
        job.asked = True
        try:
            prompt = await self._describe(job, prefix.hashes, prefix.local)
            if prompt is not None:
                await self._bring_all(prompt, prefix, arrived)
        except (RuntimeError, ValueError, OSError) as error:
            log.error("cannot load blocks of request %s: %s", job.work.request, error)
        finally:
            if self._tasks.get(sequence) is asyncio.current_task():
                del self._tasks[sequence]
                self._core.settle(sequence, arrived)
            prefix.release()
            self._told()

    async def prefetch(self, work: Work, prefix: Prefix) -> None:
        """Bring in what there is of a prompt that nobody asks for yet."""
        key, chain = self._client.key, self._chain(work)
        if key is not None:
            tokens, blocks = array("I", work.tokens), len(prefix.hashes)
            digests = await self._copy(chain.upto, key, tokens, blocks)
            prompt = _prompt(work, digests, prefix.hashes, prefix.local, work.retention)
            await self._bring_all(prompt, prefix, [0] * TIERS, computes=False)

    async def _bring_all(
        self, prompt: KvbmPrompt, prefix: Prefix, arrived: list[int], computes: bool = True
    ) -> None:
        held, wait_s, deadline_s = prefix.held, self._options.wait_s, self._options.deadline_s
        loading = self._client.load(prompt, held, self.speeds, wait_s, deadline_s, computes)
        async with aclosing(loading) as parts:
            async for part in parts:
                wanted, loaded = await self._bring(prompt, part, prefix)
                for tier in part.tiers[wanted : wanted + loaded]:
                    arrived[tier] += self._core.limits.block_size
                    self._counted[tier] += 1
                if loaded and part.retention:
                    self._inherit(prompt, part, prefix)
                if not prefix.reaches(part.first + len(part.offsets)):
                    break

    async def _bring(
        self, prompt: KvbmPrompt, part: FetchedPart, prefix: Prefix
    ) -> tuple[int, int]:
        """Load what is missing of a part; from which of its blocks on, and how many."""
        wanted = prefix.extend(part.first) - part.first
        if wanted < 0:
            return 0, 0
        offsets, checksums = part.offsets[wanted:], part.checksums[wanted:]
        places = prefix.reserve(len(offsets))
        good = 0
        try:
            start = time.perf_counter()
            good = await self._copy(
                self._copier.up,
                places,
                self._arenas.of(part.arena),
                offsets[: len(places)],
                checksums[: len(places)],
            )
            size = good * self._core.model.layout.block_bytes
            self._loading.record(size, time.perf_counter() - start)
        finally:
            prefix.fill(places, good)
        if good < len(places):
            self._on_corrupt(prompt, part, part.first + wanted + good)
        return wanted, good

    def _inherit(self, prompt: KvbmPrompt, part: FetchedPart, prefix: Prefix) -> None:
        core = self._core
        asked = inherited_retention(part.retention, core.limits.block_size, owner(prompt.tenant))
        core.blocks.retention.claim_inherited(prefix.hashes[: prefix.held], asked, core.blocks.now)

    def _on_corrupt(self, prompt: KvbmPrompt, part: FetchedPart, block: int) -> None:
        self._corrupt += 1
        log.warning("block %d of request %s has a wrong checksum", block, prompt.request)
        self._client.corrupt(part, digest_of(prompt, block))

    @property
    def speeds(self) -> TierSpeeds:
        return TierSpeeds(compute_tps=self._computing.value, load_bps=self._loading.value)

    async def _describe(
        self, job: EngineRequest, hashes: "array[int]", local: "array[int]"
    ) -> KvbmPrompt | None:
        key = self._client.key
        if key is None:
            return None
        if job.chain is None and len(job.tokens) > LONG_PROMPT:
            chain = self._chain(job.work)
            await self._copy(chain.upto, key, job.tokens[:], len(hashes))
            job.chain = chain
        return self._named(Filled(job, hashes, local), key)

    # down

    def filled(self, job: EngineRequest, sequence: Sequence) -> None:
        """The leading `sequence.held` blocks of a job are full."""
        held = sequence.full_blocks
        item = Filled(job, sequence.sequence_hashes[:held], sequence.local_hashes[:held])
        if self.writer.put(job.work.request, item, job.offered, held):
            job.offered = held

    def hold(self, item: Filled, key: bytes) -> KvbmPrompt | None:
        prints = item.job.prints.upto(item.job.tokens, len(item.hashes))
        held, _ = hold(self._core, item.hashes, prints)
        if len(held) < len(item.hashes):
            self._core.blocks.unlock(held)
            return None
        return self._named(item, key)

    async def copy(self, item: Filled, writing: PendingWrite) -> "array[int]":
        places = self._core.slots.places([item.hashes[block] for block in writing.blocks])
        host = self._arenas.of(writing.arena)
        return await self._copy(self._copier.down, places, host, writing.offsets)

    def release(self, item: Filled) -> None:
        self._core.blocks.unlock(item.hashes)
        self._told()

    def drop(self, item: Filled) -> None:
        pass

    def _named(self, item: Filled, key: bytes) -> KvbmPrompt:
        job, work = item.job, item.job.work
        if job.chain is None:
            job.chain = self._chain(work)
        retention = work.retention
        if work.decode is not None:
            retention = [*retention, replace(work.decode, start=job.base, end=None)]
        digests = job.chain.upto(key, job.tokens, len(item.hashes))
        return _prompt(work, digests, item.hashes, item.local, retention)

    def _chain(self, work: Work) -> DigestChain:
        tenant = self._client.tenant
        return DigestChain(tenant.model, work.adapter or "", work.tenant, tenant.layout)

    async def _copy(self, function: Callable[..., T], *arguments: object) -> T:
        return await completed(self._threads, function, *arguments)


def _prompt(
    work: Work,
    digests: bytes,
    hashes: "array[int]",
    local: "array[int]",
    retention: list[Retain],
) -> KvbmPrompt:
    return KvbmPrompt(
        request=work.request,
        digests=digests,
        sequence_hashes=hashes.tobytes(),
        local=local.tobytes(),
        salt=work.salt,
        tenant=work.tenant,
        session=work.session,
        retention=retention,
    )
