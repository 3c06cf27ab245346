"""Lower tiers of the torch engine: onboards blocks during a prefill, writes full ones through.

The event loop owns all state; threads copy blocks while the model works on other sequences. Blocks
being copied are locked, so their block ids are not reused.
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
    KvbmClient,
    KvbmPrompt,
    PendingWrite,
    TierSpeeds,
    digest_of,
)
from kvmesh.blocks.write_through import WriteThrough
from kvmesh.bus.messages import Retain, Work, owner
from kvmesh.retention.claims import EvictionRank
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.lru import LruCache
from kvmesh.tracing.names import ONBOARD
from kvmesh.tracing.names import TIERS as LOADED_TIERS
from kvmesh.tracing.tracer import continued
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.backward_onboarding import BackwardOnboarding
from kvmesh.worker.adapters.throughput import MIN_MEASURED_TOKENS, Throughput
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.backward_load import LoadBatch
from kvmesh.worker.enginecore.retention_request import inherited_retention, is_tentative
from kvmesh.worker.enginecore.sequence import Sequence
from kvmesh.worker.engines.torch.blocks.block_copier import BlockCopier
from kvmesh.worker.engines.torch.blocks.block_io import HeldPrefix, lock_held_prefix
from kvmesh.worker.engines.torch.core import EngineRequest, TorchCore, TorchStep
from kvmesh.worker.engines.torch.threads import run_to_end

log = logging.getLogger(__name__)
T = TypeVar("T")
TIERS = 4
LONG_PROMPT = 4096
RECENT_SHARE = 2  # blocks of recent requests per block of the engine; they share prefixes


class LowerTierOptions(Struct, frozen=True, kw_only=True):
    """Bounds of loading and writing.

    A load waits up to `wait_s` for blocks that other workers compute, and ends after `deadline_s`.
    Up to `queue` blocks wait for write-through.
    """

    wait_s: float
    deadline_s: float
    queue: int


class FullBlocks(NamedTuple):
    """Snapshot of the hashes of a request's leading full blocks."""

    request: EngineRequest
    hashes: "array[int]"
    local_hashes: "array[int]"


class LowerTiers:
    """Moves blocks between `core` and the kvbm.

    `on_change` is called after changes of the block manager.
    """

    def __init__(
        self,
        core: TorchCore,
        client: KvbmClient,
        arenas: ArenaTensors,
        options: LowerTierOptions,
        on_change: Callable[[], None],
    ) -> None:
        self._onboarded = [0] * TIERS
        self._corrupt = 0
        self.writer: WriteThrough[FullBlocks] = WriteThrough(client, self, options.queue)
        self._core = core
        self._client = client
        self._arenas = arenas
        self._options = options
        self._on_change = on_change
        self._copier = BlockCopier(core.model.pool)
        self._threads = ThreadPoolExecutor(2, "blocks")
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}
        self._onboarding = BackwardOnboarding(core.scheduler, client, self, on_change)
        self._touches = BackgroundTasks()
        self._recent: LruCache[str, FullBlocks] = LruCache(
            RECENT_SHARE * core.blocks.capacity, lambda _, item: len(item.hashes)
        )
        self._compute_speed = Throughput()
        self._load_speed = Throughput()

    @property
    def counts(self) -> TierCounts:
        return TierCounts(
            loaded=self._onboarded,
            written=self.writer.written,
            skipped=self.writer.skipped,
            corrupt=self._corrupt,
        )

    @property
    def available(self) -> bool:
        """True while attached to a kvbm."""
        return self._client.key is not None

    async def open(self) -> None:
        await self._client.open()
        self.writer.start()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._onboarding.close()
        await self._touches.close()
        await self.writer.close()
        await self._client.close()
        self._threads.shutdown()
        self._copier.close()

    def on_step(self, step: TorchStep, deltas: list[OutputDelta], seconds: float) -> None:
        """Measure the prefill speed; report computed prompts to the writer."""
        tokens = sum(len(entry.row.tokens) for entry in step.entries if not entry.is_decode)
        if tokens >= MIN_MEASURED_TOKENS:
            self._compute_speed.record(tokens, seconds)
            self._core.scheduler.backward.token_s = 1 / self._compute_speed.value
        for delta in deltas:
            if delta.cached is not None:
                self.writer.end(delta.request)

    # onboarding

    def poll(self) -> None:
        """Start onboarding for sequences that wait; end it for those that need no more blocks."""
        over = self._onboarding.ended()
        for sequence in [s for s in self._tasks if s in over or not s.awaits_blocks]:
            self._tasks.pop(sequence).cancel()
        for sequence in self._core.scheduler.loading:
            if sequence not in self._tasks:
                task = asyncio.create_task(self._onboard(sequence), name="onboarding")
                self._tasks[sequence] = task
        self._onboarding.move()
        if self.available:
            for sequence in self._core.scheduler.prefilling:
                self._touch(sequence, self._core.request(sequence))

    def _touch(self, sequence: Sequence, request: EngineRequest) -> None:
        """Let lower tiers record the use of a prompt that did not wait for them."""
        if request.looked_up:
            return
        request.looked_up = True
        self._touches.start(self._send_touch(sequence, request), "touch")

    async def _send_touch(self, sequence: Sequence, request: EngineRequest) -> None:
        hashes = sequence.reusable
        prompt = await self._describe_prompt(request, hashes, sequence.local_hashes[: len(hashes)])
        if prompt is not None:
            loading = self._client.load(prompt, len(hashes), self.speeds, 0.0, 0.0)
            async with aclosing(loading) as parts:
                async for _ in parts:
                    break

    async def _onboard(self, sequence: Sequence) -> None:
        request, hashes = self._core.request(sequence), sequence.reusable
        request.looked_up = True
        span = continued(request.work.traceparent, ONBOARD)
        try:
            local = sequence.local_hashes[: len(hashes)]
            prompt = await self._describe_prompt(request, hashes, local)
            if prompt is not None:
                wait_s, deadline_s = self._options.wait_s, self._options.deadline_s
                await self._onboarding.load(sequence, prompt, self.speeds, wait_s, deadline_s)
        except (RuntimeError, ValueError, OSError) as error:
            log.error("request %s: cannot load blocks: %s", request.work.request, error)
            span.fail("load")
        finally:
            span.set(LOADED_TIERS, sequence.cached or [])
            span.end()
            if self._tasks.get(sequence) is asyncio.current_task():
                del self._tasks[sequence]
                self._core.finish_loading(sequence)
            self._on_change()

    async def copy_in(
        self, sequence: Sequence, batch: LoadBatch, prompt: KvbmPrompt, part: FetchedPart
    ) -> int:
        core, size = self._core, self._core.model.layout.block_bytes
        places = range(batch.first - part.first, batch.end - part.first)[::-1]
        self._on_change()
        if core.physical_blocks.allocatable < len(batch):
            return 0
        block_ids, valid = core.physical_blocks.allocate(len(batch)), 0
        try:
            valid = await self._fill(block_ids, part, places)
            if valid:
                core.scheduler.backward.block_s = size / self._load_speed.value
        finally:
            used = 0 if batch.abandoned else valid
            core.physical_blocks.return_unused(block_ids[used:])
            if used:
                loaded = block_ids[:used][::-1]
                core.physical_blocks.add_ahead(sequence, batch.end - used, loaded)
        for place in places[:used]:
            self._onboarded[part.tiers[place]] += 1
        if valid < len(batch):
            self._on_corrupt(prompt, part, batch.end - valid - 1)
        return valid

    async def prefetch(self, work: Work, prefix: HeldPrefix) -> None:
        """Onboard the available prefix of a prompt before its request."""
        key, chain = self._client.key, self._chain(work)
        if key is not None:
            tokens, blocks = array("I", work.tokens), len(prefix.hashes)
            digests = await self._copy(chain.upto, key, tokens, blocks)
            prompt = _make_prompt(work, digests, prefix.hashes, prefix.local_hashes, work.retention)
            await self._load_parts(prompt, prefix)

    async def _load_parts(self, prompt: KvbmPrompt, prefix: HeldPrefix) -> None:
        held, wait_s, deadline_s = prefix.held, self._options.wait_s, self._options.deadline_s
        loading = self._client.load(prompt, held, self.speeds, wait_s, deadline_s, computes=False)
        async with aclosing(loading) as parts:
            async for part in parts:
                skipped, loaded = await self._load_part(prompt, part, prefix)
                for tier in part.tiers[skipped : skipped + loaded]:
                    self._onboarded[tier] += 1
                if loaded and part.retention:
                    core = self._core
                    retention = inherited_retention(
                        part.retention, core.limits.block_size, owner(prompt.tenant)
                    )
                    core.blocks.retention.claim_inherited(
                        prefix.hashes[: prefix.held], retention, core.blocks.now
                    )
                if not prefix.covers(part.first + len(part.offsets)):
                    break

    async def _load_part(
        self, prompt: KvbmPrompt, part: FetchedPart, prefix: HeldPrefix
    ) -> tuple[int, int]:
        """Load the missing blocks of a part; returns how many it skipped and how many it loaded."""
        skipped = prefix.extend(part.first) - part.first
        if skipped < 0:
            return 0, 0
        block_ids, valid = prefix.reserve(len(part.offsets[skipped:])), 0
        try:
            valid = await self._fill(block_ids, part, range(skipped, skipped + len(block_ids)))
        finally:
            prefix.commit(block_ids, valid)
        if valid < len(block_ids):
            self._on_corrupt(prompt, part, part.first + skipped + valid)
        return skipped, valid

    async def _fill(self, block_ids: list[int], part: FetchedPart, places: range) -> int:
        """Copy the blocks at these places of a part; returns how many of the first are valid."""
        start = time.perf_counter()
        valid = await self._copy(
            self._copier.onboard,
            block_ids,
            self._arenas.of(part.arena),
            [part.offsets[place] for place in places],
            [part.checksums[place] for place in places],
        )
        size = valid * self._core.model.layout.block_bytes
        self._load_speed.record(size, time.perf_counter() - start)
        return valid

    def _on_corrupt(self, prompt: KvbmPrompt, part: FetchedPart, block: int) -> None:
        self._corrupt += 1
        log.warning("request %s: block %d has a wrong checksum", prompt.request, block)
        self._client.report_corrupt(part, digest_of(prompt, block))

    @property
    def speeds(self) -> TierSpeeds:
        return TierSpeeds(compute_tps=self._compute_speed.value, load_bps=self._load_speed.value)

    @property
    def load_ratio(self) -> float:
        """The time to load a block over the time to compute it; 0 if unknown."""
        return self.speeds.load_ratio(self._client.worker.layout)

    async def _describe_prompt(
        self, request: EngineRequest, hashes: "array[int]", local: "array[int]"
    ) -> KvbmPrompt | None:
        key = self._client.key
        if key is None:
            return None
        if request.digest_chain is None and len(request.tokens) > LONG_PROMPT:
            chain = self._chain(request.work)
            await self._copy(chain.upto, key, request.tokens[:], len(hashes))
            request.digest_chain = chain
        return self._kvbm_prompt(FullBlocks(request, hashes, local), key)

    # write-through

    def on_filled(self, request: EngineRequest, sequence: Sequence) -> None:
        if request.work.ephemeral:
            return
        held = sequence.full_blocks
        item = FullBlocks(request, sequence.sequence_hashes[:held], sequence.local_hashes[:held])
        if request.attachment != self._client.attachments:
            request.attachment, request.offered_blocks = self._client.attachments, 0
        if self.writer.put(request.work.request, item, request.offered_blocks, held):
            request.offered_blocks = held
        self._recent.put(request.work.request, item)

    async def hand_down(self, timeout_s: float) -> int:
        """Write what waits and what was skipped, in the reverse order of eviction.

        A kvbm that was attached later gets the blocks of recent requests again, and keeps those
        that it lacks. Returns the number of blocks that are not written after `timeout_s` seconds.
        """
        if not self.available:
            return 0
        missed: dict[str, tuple[FullBlocks, int]] = {}
        for name in reversed(list(self._recent)):
            item = self._recent.peek(name)
            if item is None or self._is_offered(item):
                continue
            held = self._core.blocks.match_prefix(item.hashes).matched
            if held:
                hashes, local = item.hashes[:held], item.local_hashes[:held]
                missed[name] = FullBlocks(item.request, hashes, local), held
        return await self.writer.flush(missed, self._value, timeout_s)

    def _is_offered(self, item: FullBlocks) -> bool:
        request = item.request
        if request.attachment != self._client.attachments:
            return False
        return request.offered_blocks >= len(item.hashes)

    def _value(self, item: FullBlocks) -> EvictionRank:
        return self._core.blocks.eviction_rank(item.hashes)

    def hold(self, item: FullBlocks, key: bytes) -> KvbmPrompt | None:
        fingerprints = item.request.fingerprints.upto(item.request.tokens, len(item.hashes))
        held, _ = lock_held_prefix(self._core, item.hashes, fingerprints)
        if len(held) < len(item.hashes):
            self._core.blocks.unlock(held)
            return None
        return self._kvbm_prompt(item, key)

    async def copy(self, item: FullBlocks, writing: PendingWrite) -> "array[int]":
        block_ids = self._core.physical_blocks.block_ids(
            [item.hashes[block] for block in writing.blocks]
        )
        host = self._arenas.of(writing.arena)
        return await self._copy(self._copier.offload, block_ids, host, writing.offsets)

    def release(self, item: FullBlocks) -> None:
        self._core.blocks.unlock(item.hashes)
        self._on_change()

    def drop(self, item: FullBlocks) -> None:
        pass

    def _kvbm_prompt(self, item: FullBlocks, key: bytes) -> KvbmPrompt:
        request, work = item.request, item.request.work
        if request.digest_chain is None:
            request.digest_chain = self._chain(work)
        retention = work.retention
        if work.decode is not None:
            retention = [*retention, replace(work.decode, start=request.prompt_length, end=None)]
        digests = request.digest_chain.upto(key, request.tokens, len(item.hashes))
        return _make_prompt(work, digests, item.hashes, item.local_hashes, retention)

    def _chain(self, work: Work) -> DigestChain:
        worker = self._client.worker
        return DigestChain(worker.model, work.adapter or "", work.tenant, worker.layout)

    async def _copy(self, function: Callable[..., T], *arguments: object) -> T:
        return await run_to_end(self._threads, function, *arguments)


def _make_prompt(
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
        traceparent=work.traceparent,
        ephemeral=work.ephemeral,
        conversation=work.conversation,
        tentative=is_tentative(work),
    )
