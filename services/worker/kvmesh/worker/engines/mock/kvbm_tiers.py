"""Blocks of a mock engine in the kvbm of its node: a small stand-in for each, in modelled time.

A stand-in has `STORED_BYTES` that follow from the block's digest. Copying one between engine and
arena takes as long as the KV of the block would, so the kvbm decides as it does for real blocks.
"""

import asyncio
from array import array
from hashlib import blake2b
from typing import NamedTuple

from kvmesh._native import xxh3
from kvmesh.blocks.arena import ArenaView
from kvmesh.blocks.digests import root_digest
from kvmesh.blocks.kvbm_client import FetchedPart, KvbmClient, KvbmPrompt, PendingWrite, digest_of
from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.hashing import DIGEST_BYTES, HASH_BYTES
from kvmesh.worker.enginecore.backward_load import LoadBatch
from kvmesh.worker.enginecore.sequence import Sequence
from kvmesh.worker.enginecore.simulated_tiers import Link
from kvmesh.worker.engines.engine_tiers import EngineTiers, TierLimits
from kvmesh.worker.engines.mock.node_tiers import retained
from kvmesh.worker.engines.mock.rank import MockRank

STORED_BYTES = 4096


class MockBlocks(NamedTuple):
    """Leading full blocks of a request."""

    request: str
    hashes: "array[int]"
    local: "array[int]"
    sequence: Sequence


class NoArenaUser:
    """Uses an arena without preparation."""

    async def adopt(self, arena: ArenaView) -> None:
        pass

    async def release(self, arena: ArenaView) -> None:
        pass


def stand_in_layout(block_size: int) -> KvLayout:
    """The layout of stand-ins for blocks of `block_size` tokens."""
    token = LayerLayout(heads=1, key_size=max(1, STORED_BYTES // block_size), value_size=0)
    return KvLayout(
        weights="mock", dtype="mock", item_bytes=1, block_size=block_size, layers=[token]
    )


class KvbmTiers(EngineTiers[MockBlocks]):
    """Moves blocks between a rank and its node's kvbm; implements `NodeTiers` for the rank's core.

    `client` is connected with `stand_in_layout`.
    """

    def __init__(self, rank: MockRank, client: KvbmClient, limits: TierLimits) -> None:
        super().__init__(rank.core.scheduler, client, limits, self._publish_changes)
        self._rank = rank
        self._core = rank.core
        options = rank.core.options
        speed = options.tiers.host_bytes_per_s * options.speedup
        self._to_engine, self._from_engine = Link(speed), Link(speed)
        self._stored_bytes = client.worker.layout.block_bytes
        self._filled: dict[str, MockBlocks] = {}
        self._offered: dict[str, int] = {}
        self._prompted: list[str] = []
        self._looked_up: set[str] = set()
        self._attachments = 0
        self._computed_tokens = 0

    async def open(self) -> None:
        await super().open()
        self._core.node_tiers = self

    # the core's side

    def on_filled(self, sequence: Sequence) -> None:
        request, full = sequence.request.id, sequence.full_blocks
        if self.available and request not in self._looked_up:
            self._looked_up.add(request)
            self.touch(sequence)
        if sequence.request.ephemeral:
            return
        hashes, local = sequence.sequence_hashes[:full], sequence.local_hashes[:full]
        self._filled[request] = MockBlocks(request, hashes, local, sequence)

    def on_prompt(self, sequence: Sequence) -> None:
        self._prompted.append(sequence.request.id)

    def settle(self, seconds: float) -> None:
        """Offer the blocks that became full in steps of `seconds`, which have ended."""
        computed = self._core.counters.computed_tokens
        tokens, self._computed_tokens = computed - self._computed_tokens, computed
        self.measure(tokens, seconds)
        if self._attachments != self._client.attachments:
            self._attachments = self._client.attachments
            self._offered.clear()
        filled, self._filled = self._filled, {}
        for request, item in filled.items():
            first, end = self._offered.get(request, 0), len(item.hashes)
            if end > first and self.writer.put(request, item, first, end):
                self._offered[request] = end
        prompted, self._prompted = self._prompted, []
        for request in prompted:
            self.writer.end(request)

    def ended(self, request: str) -> None:
        """Forget a request that has left the engine."""
        self._offered.pop(request, None)
        self._looked_up.discard(request)

    # onboarding

    def looked_up(self, sequence: Sequence) -> None:
        self._looked_up.add(sequence.request.id)

    async def describe(self, sequence: Sequence, hashes: "array[int]") -> KvbmPrompt | None:
        local = sequence.local_hashes[: len(hashes)]
        return self._describe(MockBlocks(sequence.request.id, hashes, local, sequence))

    async def copy_in(
        self, sequence: Sequence, batch: LoadBatch, prompt: KvbmPrompt, part: FetchedPart
    ) -> int:
        clock = asyncio.get_running_loop().time
        start = clock()
        await self._pass_time(self._to_engine, len(batch))
        valid = self._count_valid(prompt, part, batch)
        self._load_speed.record(valid * self._stored_bytes, clock() - start)
        if self._load_speed.value:
            self._core.scheduler.backward.block_s = self._stored_bytes / self._load_speed.value
        first = batch.end - valid - part.first
        if not batch.abandoned:
            for tier in part.tiers[first : batch.end - part.first]:
                self._loaded[tier] += 1
        if valid < len(batch):
            self._on_corrupt(prompt, part, batch.end - valid - 1)
        return valid

    def _count_valid(self, prompt: KvbmPrompt, part: FetchedPart, batch: LoadBatch) -> int:
        """Number of a batch's last blocks whose content is that of their digests."""
        for block in range(batch.end - 1, batch.first - 1, -1):
            view = part.arena.view(part.offsets[block - part.first], self._stored_bytes)
            if view != self._content(digest_of(prompt, block)):
                return batch.end - 1 - block
        return len(batch)

    def _publish_changes(self) -> None:
        self._rank.publish_events()
        self._rank.wake()

    async def _pass_time(self, link: Link, blocks: int) -> None:
        """Wait as long as the KV of `blocks` takes over a link, behind other transfers."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(link.reserve(now, blocks * self._core.tiers.block_bytes) - now)

    # write-through, as `BlockSource`

    async def hand_down(self, timeout_s: float) -> int:
        """Write the blocks that wait; returns the number of those left after `timeout_s`."""
        if not self.available:
            return 0
        return await self.writer.flush({}, lambda item: len(item.hashes), timeout_s)

    def hold(self, item: MockBlocks, key: bytes) -> KvbmPrompt | None:
        held = self._core.blocks.lock_prefix(item.hashes)
        if held < len(item.hashes):
            self._core.blocks.unlock(item.hashes[:held])
            return None
        return self._describe(item)

    async def copy(self, item: MockBlocks, writing: PendingWrite) -> "array[int]":
        await self._pass_time(self._from_engine, len(writing.blocks))
        digests = self._digests(item)
        checksums = array("Q")
        for block, offset in zip(writing.blocks, writing.offsets, strict=True):
            content = self._content(digests[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)])
            writing.arena.view(offset, self._stored_bytes)[:] = content
            checksums.append(xxh3(content))
        return checksums

    def release(self, item: MockBlocks) -> None:
        self._core.blocks.unlock(item.hashes)
        self._rank.wake()

    def _describe(self, item: MockBlocks) -> KvbmPrompt | None:
        if self._client.key is None:
            return None
        request, claims = item.sequence.request, item.sequence.request.retention
        return KvbmPrompt(
            request=item.request,
            digests=self._digests(item),
            sequence_hashes=item.hashes.tobytes(),
            local=item.local.tobytes(),
            salt=request.salt,
            tenant=request.tenant,
            session=claims.session if claims is not None else None,
            retention=retained(item.sequence),
            ephemeral=request.ephemeral,
            conversation=claims.conversation if claims is not None else 0,
            tentative=claims.tentative if claims is not None else False,
        )

    def _digests(self, item: MockBlocks) -> bytes:
        """Packed digests: the sequence hash of each block, and a keyed digest of its namespace.

        They are no stronger than the hashes, by which the mock matches blocks in its own memory,
        too: its answers depend on no block.
        """
        worker = self._client.worker
        tenant = item.sequence.request.tenant
        root = root_digest(self._client.key or b"", worker.model, "", tenant, worker.layout)
        rest = root[: DIGEST_BYTES - HASH_BYTES]
        return b"".join([value.to_bytes(HASH_BYTES, "little") + rest for value in item.hashes])

    def _content(self, digest: bytes) -> bytes:
        """The bytes of a block's stand-in."""
        seed = blake2b(digest, digest_size=32).digest()
        return (seed * (self._stored_bytes // len(seed) + 1))[: self._stored_bytes]
