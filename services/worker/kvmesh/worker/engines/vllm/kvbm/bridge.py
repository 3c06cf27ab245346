"""Clients of the node's kvbm for vLLM's scheduler and worker, each with an event loop in a thread.

The scheduler's bridge looks up prompts; blocks found are verified and held in the arena until the
worker, which may be another process, has copied them. The worker's bridge writes blocks through
from copies, so that vLLM may reuse its own blocks at once.
"""

import asyncio
import logging
import os
import threading
import time
from array import array
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from kvmesh._native import xxh3
from kvmesh.blocks.attachment import WorkerIdentity
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
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import KvLayout
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.hashing import HASH_BYTES, block_hashes
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.adapters.throughput import Throughput, combined_throughput

log = logging.getLogger(__name__)
T = TypeVar("T")
BUS_OPTIONS_VARIABLE = "KVMESH_BUS"
START_S = 10.0
DEADLINE_S = 30.0
UNCLAIMED_S = 60.0
WRITE_GRACE_S = 1.0


class BridgeOptions(Struct, frozen=True, kw_only=True):
    """Options of the connector: its identity on the node, and bounds as in `[worker]`.

    vLLM logs these options, so credentials of the bus are passed in the environment instead.
    """

    weights: str
    node: str
    instance: str
    model: str
    lease_s: float
    wait_s: float
    queue: int


def export_bus_options(options: BusOptions) -> None:
    """Export bus options to the connectors in this process and its child processes."""
    # str and Path convert the files of TLS, the only fields that JSON has no type for
    os.environ[BUS_OPTIONS_VARIABLE] = msgspec.json.encode(options, enc_hook=str).decode()


def inherited_bus_options() -> BusOptions:
    """The options given to `export_bus_options`, from the environment."""
    text = os.environ[BUS_OPTIONS_VARIABLE]
    return msgspec.json.decode(text, type=BusOptions, dec_hook=lambda _, path: Path(path))


class KvbmBridge:
    """A client of the kvbm in a thread; raises BusError if the bus is unreachable.

    vLLM's thread calls the methods; those of the subclasses do not block.
    """

    def __init__(
        self, options: BridgeOptions, part: str, layout: KvLayout, device: torch.device
    ) -> None:
        self._options = options
        self._layout = layout
        self._arenas = ArenaTensors(device)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmesh", daemon=True)
        self._thread.start()
        opening = self._open(f"{options.instance}-{part}")
        self._bus, self._client = self._wait(opening)

    def close(self) -> None:
        """Release everything and stop the thread; blocks until done."""
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    async def _open(self, instance: str) -> tuple[Bus, KvbmClient]:
        options = self._options
        bus = await Bus.connect(inherited_bus_options(), instance, START_S)
        limits = StreamLimits(lease_s=options.lease_s)
        identity = WorkerIdentity(
            node=options.node, instance=instance, model=options.model, layout=self._layout
        )
        client = KvbmClient(bus, limits, identity, self._arenas)
        await client.open()
        return bus, client

    async def _close(self) -> None:
        await self._client.close()
        await self._bus.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * START_S)

    def _chain(self, origin: RequestOrigin) -> DigestChain:
        return DigestChain(self._options.model, origin.adapter, origin.tenant, self._layout)

    def _prompt(
        self,
        request: str,
        origin: RequestOrigin,
        chain: DigestChain,
        tokens: "array[int]",
        key: bytes,
    ) -> KvbmPrompt:
        local, sequence = block_hashes(tokens.tobytes(), self._layout.block_size, origin.salt)
        return KvbmPrompt(
            request=request,
            digests=chain.upto(key, tokens, len(sequence) // HASH_BYTES),
            sequence_hashes=sequence,
            local=local,
            salt=origin.salt,
            tenant=origin.tenant,
            session=origin.session,
            retention=origin.ranges,
        )


class LookupResult(Struct):
    """Blocks of a prompt from `first` on, at these offsets of the named arena.

    `tiers` has the source tier of each block, `polled_at` the time of the scheduler's last lookup
    (monotonic seconds). `copying`: vLLM has allocated blocks for them.
    """

    first: int
    arena: str
    offsets: "array[int]"
    tiers: bytearray
    polled_at: float = 0.0
    copying: bool = False

    def blocks_after(self, held: int) -> tuple["array[int]", bytearray]:
        """Offsets and tiers of the blocks that follow the `held` leading ones."""
        if held < self.first:
            return array("Q"), bytearray()
        skipped = held - self.first
        return self.offsets[skipped:], self.tiers[skipped:]


class SchedulerBridge(KvbmBridge):
    """The scheduler's bridge: looks up prompts and holds the blocks found until they are copied."""

    def __init__(self, options: BridgeOptions, layout: KvLayout) -> None:
        self._lock = threading.Lock()
        self._lookups: dict[str, LookupResult | None] = {}
        self._released: dict[str, asyncio.Event] = {}
        self._check_speed = Throughput()
        self._speeds = TierSpeeds()
        self.corrupt = 0
        super().__init__(options, "scheduler", layout, torch.device("cpu"))

    def lookup(
        self, request: str, origin: RequestOrigin, tokens: list[int], held: int
    ) -> int | None:
        """Number of loadable blocks after the `held` ones; None while the lookup is in progress."""
        with self._lock:
            if request in self._lookups:
                found = self._lookups[request]
                if found is None:
                    return 0
                found.polled_at = time.monotonic()
                return len(found.blocks_after(held)[0])
            if request in self._released:
                return None
            if self._client.key is None:
                return 0
            released = self._released[request] = asyncio.Event()
        task = self._run_lookup(request, origin, array("I", tokens), held, released)
        asyncio.run_coroutine_threadsafe(task, self._loop)
        return None

    def update_speeds(self, compute_tps: float, copy_bps: float) -> None:
        """Set the speeds measured by the worker."""
        load_bps = combined_throughput(copy_bps, self._check_speed.value)
        self._speeds = TierSpeeds(compute_tps=compute_tps, load_bps=load_bps)

    def begin_copy(self, request: str) -> LookupResult | None:
        """Hold the result of a lookup until `release_lookup`; None if it has expired."""
        with self._lock:
            found = self._lookups.get(request)
            if found is not None:
                found.copying = True
            return found

    def release_lookup(self, request: str) -> None:
        """Release the blocks found for a request."""
        with self._lock:
            self._lookups.pop(request, None)
            released = self._released.pop(request, None)
        if released is not None:
            self._loop.call_soon_threadsafe(released.set)

    def finish_request(self, request: str) -> None:
        """Report the request as computed, after WRITE_GRACE_S for its last writes."""
        self.release_lookup(request)
        computed = self._client.report_computed
        self._loop.call_soon_threadsafe(self._loop.call_later, WRITE_GRACE_S, computed, request)

    async def _run_lookup(
        self,
        request: str,
        origin: RequestOrigin,
        tokens: "array[int]",
        held: int,
        released: asyncio.Event,
    ) -> None:
        try:
            await self._load_and_wait(request, origin, tokens, held, released)
        except (RuntimeError, ValueError, OSError) as error:
            log.error("request %s: lookup failed: %s", request, error)
        finally:
            with self._lock:
                if self._released.get(request) is released:
                    self._lookups.setdefault(request, None)

    async def _load_and_wait(
        self,
        request: str,
        origin: RequestOrigin,
        tokens: "array[int]",
        held: int,
        released: asyncio.Event,
    ) -> None:
        key = self._client.key
        if key is None:
            return
        prompt = self._prompt(request, origin, self._chain(origin), tokens, key)
        loading = self._client.load(prompt, held, self._speeds, self._options.wait_s, DEADLINE_S)
        async with aclosing(loading) as parts:
            found = await self._collect(prompt, held, parts)
            with self._lock:
                if found is None or self._released.get(request) is not released:
                    return
                found.polled_at = time.monotonic()
                self._lookups[request] = found
            await self._wait_until_copied(request, found, released)

    async def _collect(
        self, prompt: KvbmPrompt, held: int, parts: AsyncIterator[FetchedPart]
    ) -> LookupResult | None:
        """Collect the blocks with right checksums; they are held while `parts` is open."""
        found: LookupResult | None = None
        async for part in parts:
            found = found or LookupResult(held, part.arena.path.name, array("Q"), bytearray())
            valid = await self._verify(part)
            found.offsets.extend(part.offsets[:valid])
            found.tiers.extend(part.tiers[:valid])
            if valid < len(part.offsets):
                self.corrupt += 1
                log.warning("request %s: a block has a wrong checksum", prompt.request)
                self._client.report_corrupt(part, digest_of(prompt, part.first + valid))
                break
            if held + len(found.offsets) == prompt.blocks:
                break
        return found

    async def _verify(self, part: FetchedPart) -> int:
        """Number of leading blocks of a part with right checksums."""
        host, size = self._arenas.of(part.arena), self._layout.block_bytes
        start = time.perf_counter()
        valid = await asyncio.to_thread(_count_valid, part, host, size)
        self._check_speed.record(valid * size, time.perf_counter() - start)
        return valid

    async def _wait_until_copied(
        self, request: str, found: LookupResult, released: asyncio.Event
    ) -> None:
        """Wait until the blocks are copied, or not polled by vLLM for UNCLAIMED_S.

        Blocks being copied are held without a time limit: no timer can detect the end of a
        slow copy (docs/adr/0007).
        """
        while not released.is_set():
            try:
                async with asyncio.timeout(UNCLAIMED_S / 4):
                    await released.wait()
            except TimeoutError:
                if self._drop_if_unclaimed(request, found):
                    log.warning("request %s: lookup expired, vLLM did not poll for it", request)
                    return

    def _drop_if_unclaimed(self, request: str, found: LookupResult) -> bool:
        """Drop an expired result; False if it is still in use. A later `lookup` starts again."""
        with self._lock:
            if found.copying or time.monotonic() - found.polled_at < UNCLAIMED_S:
                return False
            if self._lookups.get(request) is found:
                del self._lookups[request], self._released[request]
            return True


class StagedBlocks:
    """A request's tokens, and the content of its blocks that wait for write-through."""

    def __init__(self, request: str, origin: RequestOrigin, chain: DigestChain) -> None:
        self.request = request
        self.origin = origin
        self.chain = chain
        self.tokens = array("I")
        self.rows: dict[int, Tensor] = {}


class WorkerBridge(KvbmBridge):
    """The worker's bridge: maps the arena to load from, and writes blocks through."""

    def __init__(self, options: BridgeOptions, layout: KvLayout, device: torch.device) -> None:
        self._queued_blocks = 0
        self._skipped = 0
        self._staged: dict[str, StagedBlocks] = {}
        super().__init__(options, "worker", layout, device)
        self._writer = self._wait(self._start())

    def arena(self, name: str) -> Tensor | None:
        """All bytes of the named arena, if attached."""
        return self._arenas.named(name)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of blocks written through and skipped."""
        return self._writer.written, self._writer.skipped + self._skipped

    def count_skipped(self, blocks: int) -> None:
        """Count blocks not written because the queue is full."""
        self._skipped += blocks

    def has_capacity(self, blocks: int) -> bool:
        """True if the queue can hold `blocks` more blocks."""
        return self._client.key is not None and self._queued_blocks + blocks <= self._options.queue

    def write_through(
        self, request: str, origin: RequestOrigin, tokens: list[int], first: int, rows: Tensor
    ) -> None:
        """Queue the blocks from `first` on, with content `rows`, for write-through."""
        self._loop.call_soon_threadsafe(self._enqueue, request, origin, tokens, first, rows)

    def _enqueue(
        self, request: str, origin: RequestOrigin, tokens: list[int], first: int, rows: Tensor
    ) -> None:
        item = self._staged.get(request) or StagedBlocks(request, origin, self._chain(origin))
        end = first + len(rows)
        if self._writer.put(request, item, first, end):
            self._staged[request] = item
            item.tokens = array("I", tokens[: end * self._layout.block_size])
            item.rows.update(zip(range(first, end), rows, strict=True))
            self._queued_blocks += len(rows)

    # BlockSource of the writer

    def hold(self, item: StagedBlocks, key: bytes) -> KvbmPrompt | None:
        del self._staged[item.request]
        return self._prompt(item.request, item.origin, item.chain, item.tokens, key)

    async def copy(self, item: StagedBlocks, pending: PendingWrite) -> "array[int]":
        pairs = zip(pending.blocks, pending.offsets, strict=True)
        rows = [(item.rows[block], offset) for block, offset in pairs]
        return await asyncio.to_thread(_copy_rows, rows, self._arenas.of(pending.arena))

    def release(self, item: StagedBlocks) -> None:
        self._queued_blocks -= len(item.rows)
        item.rows.clear()

    def drop(self, item: StagedBlocks) -> None:
        del self._staged[item.request]
        self.release(item)

    async def _start(self) -> "WriteThrough[StagedBlocks]":
        writer = WriteThrough(self._client, self, self._options.queue)
        writer.start()
        return writer

    async def _close(self) -> None:
        await self._writer.close()
        await super()._close()


def _count_valid(part: FetchedPart, host: Tensor, size: int) -> int:
    """Number of leading blocks of a part with right checksums."""
    content = host.numpy().data
    pairs = zip(part.offsets, part.checksums, strict=True)
    wrong = (
        i
        for i, (offset, expected) in enumerate(pairs)
        if xxh3(content[offset : offset + size]) != expected
    )
    return next(wrong, len(part.offsets))


def _copy_rows(rows_and_offsets: list[tuple[Tensor, int]], host: Tensor) -> "array[int]":
    checksums = array("Q")
    for row, offset in rows_and_offsets:
        host[offset : offset + len(row)].copy_(row)
        checksums.append(xxh3(row.numpy().data))
    return checksums
