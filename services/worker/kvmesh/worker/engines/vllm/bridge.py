"""From vLLM's processes to the block manager of the node: a thread with an event loop of its own.

vLLM's scheduler asks what there is of a prompt; that is checked and held in the arena until the
model runner, which may be another process, has copied it. The model runner writes blocks through
from copies, so that vLLM may do with its blocks what it likes.
"""

import asyncio
import logging
import os
import threading
import time
from array import array
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from kvmesh._native import xxh3
from kvmesh.blocks.attachment import Tenant
from kvmesh.blocks.digests import DigestChain
from kvmesh.blocks.kvbm_client import (
    FetchedPart,
    KvbmPrompt,
    PendingWrite,
    StoreClient,
    TierSpeeds,
    digest_of,
)
from kvmesh.blocks.layout import KvLayout
from kvmesh.blocks.write_through import WriteThrough
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import Retain
from kvmesh.bus.streams import StreamLimits
from kvmesh.hashing import block_hashes
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.throughput import Throughput, combined_throughput

log = logging.getLogger(__name__)
T = TypeVar("T")
BUS_OPTIONS_VARIABLE = "KVMESH_BUS"
START_S = 10.0
DEADLINE_S = 30.0
UNCLAIMED_S = 60.0
WRITE_GRACE_S = 1.0


class BridgeOptions(Struct, frozen=True, kw_only=True):
    """Options of the connector: its name on the bus, and bounds as in `[worker]`.

    vLLM logs it: how to connect is in the environment.
    """

    weights: str
    node: str
    instance: str
    model: str
    lease_s: float
    wait_s: float
    queue: int


def export_bus_options(options: BusOptions) -> None:
    """Let connectors in this process, and in those that it starts, connect in the same way."""
    os.environ[BUS_OPTIONS_VARIABLE] = msgspec.json.encode(options).decode()


def inherited_bus_options() -> BusOptions:
    """The options that `export_bus_options` was given."""
    return msgspec.json.decode(os.environ[BUS_OPTIONS_VARIABLE], type=BusOptions)


class RequestOrigin(Struct, frozen=True, kw_only=True):
    """What a request says of its prompt's blocks; see `Work`."""

    request: str
    salt: int
    adapter: str = ""
    tenant: str = ""
    session: str | None = None
    retention: list[Retain] = []


class KvbmBridge:
    """A client of the block manager in a thread; raises BusError if there is no bus.

    Calls come from vLLM's thread, and those of its subclasses return at once.
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
        """Give everything back; waits."""
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    async def _open(self, instance: str) -> tuple[Bus, StoreClient]:
        options = self._options
        bus = await Bus.connect(inherited_bus_options(), instance, START_S)
        limits = StreamLimits(lease_s=options.lease_s)
        tenant = Tenant(
            node=options.node, instance=instance, model=options.model, layout=self._layout
        )
        client = StoreClient(bus, limits, tenant, self._arenas)
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
            digests=chain.upto(key, tokens, len(sequence) // 8),
            sequence_hashes=sequence,
            local=local,
            salt=origin.salt,
            tenant=origin.tenant,
            session=origin.session,
            retention=origin.retention,
        )


class LookupResult(Struct):
    """Blocks `first` … of a prompt, at these offsets of the arena of that name.

    `tiers` says where each was, `asked` when vLLM last asked for them (monotonic seconds), and
    `taken` whether they are to be copied.
    """

    first: int
    arena: str
    offsets: "array[int]"
    tiers: bytearray
    asked: float = 0.0
    taken: bool = False

    def after(self, held: int) -> tuple["array[int]", bytearray]:
        """Offsets and tiers of the blocks that follow the `held` leading ones."""
        if held < self.first:
            return array("Q"), bytearray()
        skipped = held - self.first
        return self.offsets[skipped:], self.tiers[skipped:]


class SchedulerBridge(KvbmBridge):
    """The scheduler's bridge: what there is of prompts, held until it has been copied."""

    def __init__(self, options: BridgeOptions, layout: KvLayout) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, LookupResult | None] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._checking = Throughput()
        self._speeds = TierSpeeds()
        self.corrupt = 0
        super().__init__(options, "scheduler", layout, torch.device("cpu"))

    def find(self, request: str, origin: RequestOrigin, tokens: list[int], held: int) -> int | None:
        """Blocks after the `held` ones that can be loaded; None: not known yet, ask again."""
        with self._lock:
            if request in self._found:
                found = self._found[request]
                if found is None:
                    return 0
                found.asked = time.monotonic()
                return len(found.after(held)[0])
            if request in self._ends:
                return None
            if self._client.key is None:
                return 0
            end = self._ends[request] = asyncio.Event()
        looking = self._look_up(request, origin, array("I", tokens), held, end)
        asyncio.run_coroutine_threadsafe(looking, self._loop)
        return None

    def measured(self, compute_tps: float, copy_bps: float) -> None:
        """What the model runner has measured."""
        load_bps = combined_throughput(copy_bps, self._checking.value)
        self._speeds = TierSpeeds(compute_tps=compute_tps, load_bps=load_bps)

    def take(self, request: str) -> LookupResult | None:
        """What has been found; it stays until `finish`. None if it has been given back."""
        with self._lock:
            found = self._found.get(request)
            if found is not None:
                found.taken = True
            return found

    def finish(self, request: str) -> None:
        """Nothing of what was found is needed any more."""
        with self._lock:
            self._found.pop(request, None)
            end = self._ends.pop(request, None)
        if end is not None:
            self._loop.call_soon_threadsafe(end.set)

    def end(self, request: str) -> None:
        """The request computes no more; what it has computed is written a little later."""
        self.finish(request)
        computed = self._client.computed
        self._loop.call_soon_threadsafe(self._loop.call_later, WRITE_GRACE_S, computed, request)

    async def _look_up(
        self,
        request: str,
        origin: RequestOrigin,
        tokens: "array[int]",
        held: int,
        end: asyncio.Event,
    ) -> None:
        try:
            await self._hold(request, origin, tokens, held, end)
        except (RuntimeError, ValueError, OSError) as error:
            log.error("cannot look for the blocks of request %s: %s", request, error)
        finally:
            with self._lock:
                if self._ends.get(request) is end:
                    self._found.setdefault(request, None)

    async def _hold(
        self,
        request: str,
        origin: RequestOrigin,
        tokens: "array[int]",
        held: int,
        end: asyncio.Event,
    ) -> None:
        key = self._client.key
        if key is None:
            return
        prompt = self._prompt(request, origin, self._chain(origin), tokens, key)
        loading = self._client.load(prompt, held, self._speeds, self._options.wait_s, DEADLINE_S)
        async with aclosing(loading) as parts:
            found = await self._gather(prompt, held, parts)
            with self._lock:
                if found is None or self._ends.get(request) is not end:
                    return
                found.asked = time.monotonic()
                self._found[request] = found
            await self._copied(request, found, end)

    async def _gather(
        self, prompt: KvbmPrompt, held: int, parts: AsyncIterator[FetchedPart]
    ) -> LookupResult | None:
        """All blocks that come and are what they should be; they stay while `parts` is open."""
        found: LookupResult | None = None
        async for part in parts:
            found = found or LookupResult(held, part.arena.path.name, array("Q"), bytearray())
            good = await self._check(part)
            found.offsets.extend(part.offsets[:good])
            found.tiers.extend(part.tiers[:good])
            if good < len(part.offsets):
                self.corrupt += 1
                log.warning("a block of request %s has a wrong checksum", prompt.request)
                self._client.corrupt(part, digest_of(prompt, part.first + good))
                break
            if held + len(found.offsets) == prompt.blocks:
                break
        return found

    async def _check(self, part: FetchedPart) -> int:
        """How many leading blocks of a part are what they should be."""
        host, size = self._arenas.of(part.arena), self._layout.block_bytes
        start = time.perf_counter()
        good = await asyncio.to_thread(_matching, part, host, size)
        self._checking.record(good * size, time.perf_counter() - start)
        return good

    async def _copied(self, request: str, found: LookupResult, end: asyncio.Event) -> None:
        """Return once it has been copied, or vLLM has not asked for it for UNCLAIMED_S.

        What is to be copied is held for as long as that takes: no timer says when a slow copy has
        ended (docs/adr/0007).
        """
        while not end.is_set():
            try:
                async with asyncio.timeout(UNCLAIMED_S / 4):
                    await end.wait()
            except TimeoutError:
                if self._is_forgotten(request, found):
                    log.warning("what was found of request %s has not been asked for", request)
                    return

    def _is_forgotten(self, request: str, found: LookupResult) -> bool:
        """Whether nobody asks for it any more; who does so later has it looked for again."""
        with self._lock:
            if found.taken or time.monotonic() - found.asked < UNCLAIMED_S:
                return False
            if self._found.get(request) is found:
                del self._found[request], self._ends[request]
            return True


class StagedBlocks:
    """A request's tokens, and the content of those of its blocks that are not written yet."""

    def __init__(self, request: str, origin: RequestOrigin, chain: DigestChain) -> None:
        self.request = request
        self.origin = origin
        self.chain = chain
        self.tokens = array("I")
        self.rows: dict[int, Tensor] = {}


class WorkerBridge(KvbmBridge):
    """The model runner's bridge: the arena to copy from, and blocks that are written through."""

    def __init__(self, options: BridgeOptions, layout: KvLayout, device: torch.device) -> None:
        self._waiting = 0
        self._skipped = 0
        self._staged: dict[str, StagedBlocks] = {}
        super().__init__(options, "worker", layout, device)
        self._writer = self._wait(self._start())

    def arena(self, name: str) -> Tensor | None:
        """All bytes of the arena of that name, if it is the one in use."""
        return self._arenas.named(name)

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks that were written through, and that were not, to wait for none."""
        return self._writer.written, self._writer.skipped + self._skipped

    def skip(self, blocks: int) -> None:
        """There was no room for these."""
        self._skipped += blocks

    def room(self, blocks: int) -> bool:
        """Whether so many more blocks may be written through."""
        return self._client.key is not None and self._waiting + blocks <= self._options.queue

    def write(
        self, request: str, origin: RequestOrigin, tokens: list[int], first: int, rows: Tensor
    ) -> None:
        """Write through the blocks from `first` on, `rows` being their content."""
        self._loop.call_soon_threadsafe(self._put, request, origin, tokens, first, rows)

    def _put(
        self, request: str, origin: RequestOrigin, tokens: list[int], first: int, rows: Tensor
    ) -> None:
        item = self._staged.get(request) or StagedBlocks(request, origin, self._chain(origin))
        end = first + len(rows)
        if self._writer.put(request, item, first, end):
            self._staged[request] = item
            item.tokens = array("I", tokens[: end * self._layout.block_size])
            item.rows.update(zip(range(first, end), rows, strict=True))
            self._waiting += len(rows)

    # what is read by the writer

    def hold(self, item: StagedBlocks, key: bytes) -> KvbmPrompt | None:
        del self._staged[item.request]
        return self._prompt(item.request, item.origin, item.chain, item.tokens, key)

    async def copy(self, item: StagedBlocks, writing: PendingWrite) -> "array[int]":
        places = zip(writing.blocks, writing.offsets, strict=True)
        rows = [(item.rows[block], offset) for block, offset in places]
        return await asyncio.to_thread(_copy_rows, rows, self._arenas.of(writing.arena))

    def release(self, item: StagedBlocks) -> None:
        self._waiting -= len(item.rows)
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


def _matching(part: FetchedPart, host: Tensor, size: int) -> int:
    """Leading blocks of a part whose checksums are right."""
    content = host.numpy().data
    pairs = zip(part.offsets, part.checksums, strict=True)
    wrong = (i for i, (at, should) in enumerate(pairs) if xxh3(content[at : at + size]) != should)
    return next(wrong, len(part.offsets))


def _copy_rows(wanted: list[tuple[Tensor, int]], host: Tensor) -> "array[int]":
    checksums = array("Q")
    for row, offset in wanted:
        host[offset : offset + len(row)].copy_(row)
        checksums.append(xxh3(row.numpy().data))
    return checksums
