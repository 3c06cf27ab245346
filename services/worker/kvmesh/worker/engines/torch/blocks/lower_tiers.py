"""Lower tiers of the torch engine: onboards blocks during a prefill, writes full ones through.

The event loop owns all state; threads copy blocks while the model works on other sequences. Blocks
being copied are locked, so their block ids are not reused.
"""

import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from kvmesh.blocks.digests import DigestChain
from kvmesh.blocks.kvbm_client import FetchedPart, KvbmClient, KvbmPrompt, PendingWrite
from kvmesh.bus.messages import Retain, Work, owner
from kvmesh.retention.claims import EvictionRank
from kvmesh.runtime.lru import LruCache
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.backward_load import LoadBatch
from kvmesh.worker.enginecore.retention_request import inherited_retention, is_tentative
from kvmesh.worker.enginecore.sequence import Sequence
from kvmesh.worker.engines.engine_tiers import EngineTiers, TierLimits
from kvmesh.worker.engines.torch.blocks.block_copier import BlockCopier
from kvmesh.worker.engines.torch.blocks.block_io import HeldPrefix, lock_held_prefix
from kvmesh.worker.engines.torch.core import EngineRequest, TorchCore, TorchStep
from kvmesh.worker.engines.torch.threads import run_to_end

T = TypeVar("T")
LONG_PROMPT = 4096
RECENT_SHARE = 2  # blocks of recent requests per block of the engine; they share prefixes


class FullBlocks(NamedTuple):
    """Snapshot of the hashes of a request's leading full blocks."""

    request: EngineRequest
    hashes: "array[int]"
    local_hashes: "array[int]"


class LowerTiers(EngineTiers[FullBlocks]):
    """Moves blocks between `core` and the kvbm."""

    def __init__(
        self,
        core: TorchCore,
        client: KvbmClient,
        arenas: ArenaTensors,
        limits: TierLimits,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(core.scheduler, client, limits, on_change)
        self._core = core
        self._arenas = arenas
        self._copier = BlockCopier(core.model.pool)
        self._threads = ThreadPoolExecutor(2, "blocks")
        self._recent: LruCache[str, FullBlocks] = LruCache(
            RECENT_SHARE * core.blocks.capacity, lambda _, item: len(item.hashes)
        )

    async def close(self) -> None:
        await super().close()
        self._threads.shutdown()
        self._copier.close()

    def on_step(self, step: TorchStep, deltas: list[OutputDelta], seconds: float) -> None:
        """Measure the prefill speed; report computed prompts to the writer."""
        tokens = sum(len(entry.row.tokens) for entry in step.entries if not entry.is_decode)
        self.measure(tokens, seconds)
        for delta in deltas:
            if delta.cached is not None:
                self.writer.end(delta.request)

    # onboarding

    def poll(self) -> None:
        super().poll()
        if self.available:
            for sequence in self._core.scheduler.prefilling:
                if not self._core.request(sequence).looked_up:
                    self.looked_up(sequence)
                    self.touch(sequence)

    def looked_up(self, sequence: Sequence) -> None:
        self._core.request(sequence).looked_up = True

    def traceparent(self, sequence: Sequence) -> str:
        return self._core.request(sequence).work.traceparent

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
            self._loaded[part.tiers[place]] += 1
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
        held, (wait_s, deadline_s, _) = prefix.held, self._limits
        loading = self._client.load(prompt, held, self.speeds, wait_s, deadline_s, computes=False)
        async with aclosing(loading) as parts:
            async for part in parts:
                skipped, loaded = await self._load_part(prompt, part, prefix)
                for tier in part.tiers[skipped : skipped + loaded]:
                    self._loaded[tier] += 1
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

    async def describe(self, sequence: Sequence, hashes: "array[int]") -> KvbmPrompt | None:
        request, local = self._core.request(sequence), sequence.local_hashes[: len(hashes)]
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
