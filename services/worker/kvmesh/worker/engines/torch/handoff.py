"""KV handoff from a prefill engine to a decode engine.

The prefill engine copies the blocks of a prompt to staging memory and lends them for a time to the
holder of the descriptor. The decode engine reads them into its own staging memory and stores them
as if it had computed them. After any failure the decode engine computes the prompt.
"""

import asyncio
import heapq
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

import msgspec
import torch
from msgspec import Struct

from kvmesh.bus.messages import KvLayout, Work
from kvmesh.settings.schema import TransferSettings
from kvmesh.tracing.names import HANDOFF, STATUS
from kvmesh.tracing.tracer import continued
from kvmesh.transfer import TransferError, Transport
from kvmesh.worker.capabilities import HandoffCounts
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.sequence import hash_prompt
from kvmesh.worker.engines.torch.blocks.block_io import HeldPrefix, check_layout, lock_held_prefix
from kvmesh.worker.engines.torch.core import TorchCore
from kvmesh.worker.engines.torch.model.paged_model import PagedModel
from kvmesh.worker.engines.torch.threads import run_to_end

log = logging.getLogger(__name__)
DRAIN_S = 2.0
OFFERED, FETCHED, DONE, FAILED = "offered", "fetched", "done", "failed"


class Staging:
    """Slots 0 … `count` - 1, allocated in the order of the calls, regardless of their size."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._lock = asyncio.Lock()
        self._released = asyncio.Event()

    @property
    def free(self) -> int:
        return len(self._free)

    async def allocate(self, count: int) -> list[int]:
        """Wait for `count` free slots and allocate the lowest, which are mostly contiguous.

        Raises ValueError if `count` exceeds the number of all slots.
        """
        if count > self._count:
            raise ValueError(f"{count} blocks exceed the staging memory of {self._count}")
        async with self._lock:
            while len(self._free) < count:
                self._released.clear()
                await self._released.wait()
            return [heapq.heappop(self._free) for _ in range(count)]

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)
        self._released.set()


class HandoffDescriptor(Struct, frozen=True, kw_only=True):
    """The leading blocks of a prompt: offsets in the grant's memory, packed uint64."""

    grant: bytes
    layout: KvLayout
    offsets: bytes


def staging_memory(model: PagedModel, options: TransferSettings) -> torch.Tensor:
    """Memory for `staging_bytes` of blocks, at least one, as bytes; page-locked beside a GPU."""
    size = model.layout.block_bytes
    count = max(options.staging_bytes // size, 1)
    return torch.empty(count * size, dtype=torch.uint8, pin_memory=model.device.type == "cuda")


class Handoffs:
    """Offers and fetches the KV of prompts of `core` through `host`, its `staging_memory`.

    `on_change` is called after changes of the block manager.
    """

    def __init__(
        self,
        core: TorchCore,
        transport: Transport,
        host: torch.Tensor,
        options: TransferSettings,
        on_change: Callable[[], None],
    ) -> None:
        self._core = core
        self._transport = transport
        self._options = options
        self._on_change = on_change
        self._block = core.model.layout.block_bytes
        self._host = host
        self._region = transport.register(host.numpy().data)
        self._staging = Staging(len(host) // self._block)
        self._threads = ThreadPoolExecutor(1, "handoff")
        self._prompts: dict[str, tuple[array[int], bytes]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lent: dict[str, Callable[[], None]] = {}
        self._ended = Counter({(OFFERED, DONE): 0, (OFFERED, FAILED): 0, (FETCHED, FAILED): 0})
        self._fetched_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_progress(self) -> int:
        """Number of requests whose blocks are being copied or read."""
        return len(self._tasks)

    @property
    def counts(self) -> HandoffCounts:
        """The handoffs that ended since the start."""
        return HandoffCounts(ended=dict(self._ended), fetched_bytes=self._fetched_bytes)

    def abort(self, request: str) -> bool:
        """Cancel the handoff of a request; False if none is in progress."""
        self._prompts.pop(request, None)
        if request in self._lent:
            self._lent[request]()
        task = self._tasks.get(request)
        return task is not None and task.cancel()

    async def drain(self) -> None:
        """Wait for handoffs in progress, then up to DRAIN_S for lent blocks to be read."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._idle.wait()
        except TimeoutError:
            log.warning("stopping with lent KV that no worker has fetched")

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._threads.shutdown()
        await self._transport.close()

    # prefill side

    def expect_prefill(self, work: Work) -> None:
        """Offer the KV of this prompt once it is computed."""
        _, sequence, _ = hash_prompt(work.tokens, self._core.limits.block_size, work.salt)
        hashes = array("Q", sequence)
        self._prompts[work.request] = hashes, self._fingerprints(work, len(hashes))

    def intercept(
        self, deltas: list[OutputDelta], deliver: Callable[[list[OutputDelta]], None]
    ) -> list[OutputDelta]:
        """Start the handoff of finished prompts; returns the deltas to deliver now.

        The deltas of finished prompts are passed to `deliver` once their KV can be read.
        """
        ready = []
        for delta in deltas:
            prompt = self._prompts.get(delta.request) if delta.finish else None
            if prompt is None:
                ready.append(delta)
                continue
            del self._prompts[delta.request]
            held, block_ids = lock_held_prefix(self._core, *prompt)
            offering = self._offer(delta, block_ids, deliver)
            self._start(delta.request, offering, partial(self._core.blocks.unlock, held))
        return ready

    async def _offer(
        self, delta: OutputDelta, block_ids: list[int], deliver: Callable[[list[OutputDelta]], None]
    ) -> None:
        result = FAILED
        try:
            staging_slots = await self._allocate_staging(len(block_ids))
            delta.handoff = await self._lend(delta.request, block_ids, staging_slots)
            result = DONE
        except Exception as error:  # the decode engine computes the prompt instead
            log.warning("request %s: KV not offered: %s", delta.request, error)
        self._ended[OFFERED, result] += 1
        deliver([delta])

    async def _lend(
        self, request: str, block_ids: list[int], staging_slots: list[int]
    ) -> dict[str, Any]:
        offsets = self._offsets(staging_slots)
        try:
            pool = self._core.model.pool
            await run_to_end(self._threads, pool.copy_out, block_ids, self._host, offsets)
            ranges = zip(offsets, repeat(self._block), strict=False)
            on_ended = partial(self._on_grant_ended, request, staging_slots)
            grant = self._region.grant(ranges, self._options.lend_s, on_ended)
        except BaseException:
            self._staging.release(staging_slots)
            raise
        self._lent[request] = grant.revoke
        descriptor = HandoffDescriptor(
            grant=grant.descriptor,
            layout=self._core.model.layout,
            offsets=array("Q", offsets).tobytes(),
        )
        fields: dict[str, Any] = msgspec.to_builtins(descriptor, builtin_types=(bytes,))
        return fields

    def _on_grant_ended(self, request: str, staging_slots: list[int], ending: str) -> None:
        del self._lent[request]
        self._staging.release(staging_slots)
        if ending == "expired":
            log.warning("request %s: lent KV expired unfetched", request)
        self._update_idle()

    # decode side

    def fetch(self, work: Work, on_done: Callable[[], None]) -> None:
        """Fetch the offered KV of this prompt as far as possible, then call `on_done`."""
        self._start(work.request, self._fetch(work, on_done))

    async def _fetch(self, work: Work, on_done: Callable[[], None]) -> None:
        result = FAILED
        span = continued(work.traceparent, HANDOFF)
        try:
            result = await self._import(work)
        except Exception as error:  # the prompt is computed here instead
            log.warning("request %s: KV not fetched, computing the prompt: %s", work.request, error)
        finally:
            span.set(STATUS, result)
            span.fail("" if result != FAILED else result)
            span.end()
        self._ended[FETCHED, result] += 1
        on_done()

    async def _import(self, work: Work) -> str:
        """Import the offered blocks; returns the name of the transport that read them."""
        descriptor = msgspec.convert(work.handoff, HandoffDescriptor)
        check_layout(self._core, descriptor.layout)
        theirs = array("Q", descriptor.offsets)
        packed_local, sequence, _ = hash_prompt(
            work.tokens, self._core.limits.block_size, work.salt
        )
        hashes = array("Q", sequence)[: len(theirs)]
        local_hashes = array("Q", packed_local)[: len(theirs)]
        fingerprints = self._fingerprints(work, len(hashes))
        prefix = HeldPrefix(
            self._core, hashes, local_hashes, fingerprints, work.salt, work.tenant, self._on_change
        )
        try:
            return await self._read_blocks(
                prefix, descriptor.grant, theirs[prefix.held : len(hashes)]
            )
        finally:
            prefix.release(work.priority)
            self._on_change()

    async def _read_blocks(self, prefix: HeldPrefix, grant: bytes, theirs: "array[int]") -> str:
        timeout, first = self._options.timeout_s, prefix.held
        staging_slots = await self._allocate_staging(len(theirs))
        try:
            ours = self._offsets(staging_slots)
            pieces = zip(theirs, ours, repeat(self._block), strict=False)
            transport = await self._transport.read(grant, self._region, pieces, timeout)
            self._fetched_bytes += len(theirs) * self._block
            done = prefix.extend(first) - first
            await self._store(prefix, ours[done:])
        except TransferError as error:
            staging_slots = staging_slots if error.settled else []
            raise
        finally:
            self._staging.release(staging_slots)
        return transport

    async def _store(self, prefix: HeldPrefix, offsets: list[int]) -> None:
        block_ids, valid = prefix.reserve(len(offsets)), 0
        try:
            pool, used_offsets = self._core.model.pool, offsets[: len(block_ids)]
            await run_to_end(self._threads, pool.copy_in, block_ids, self._host, used_offsets)
            valid = len(block_ids)
        finally:
            prefix.commit(block_ids, valid)

    async def _allocate_staging(self, count: int) -> list[int]:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._staging.allocate(count)
        except TimeoutError:
            raise TimeoutError(f"no staging memory for {count} blocks") from None

    def _fingerprints(self, work: Work, blocks: int) -> bytes:
        return self._core.guard.fingerprints(work).upto(array("I", work.tokens), blocks)

    def _offsets(self, staging_slots: list[int]) -> list[int]:
        return [slot * self._block for slot in staging_slots]

    def _start(
        self,
        request: str,
        work: Coroutine[Any, Any, None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        def ended(_: "asyncio.Task[None]") -> None:
            after()
            del self._tasks[request]
            self._on_change()
            self._update_idle()

        self._idle.clear()
        task = self._tasks[request] = asyncio.create_task(work, name=f"handoff {request}")
        task.add_done_callback(ended)

    def _update_idle(self) -> None:
        if not self._tasks and not self._lent:
            self._idle.set()
