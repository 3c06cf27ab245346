"""Prompts that one engine computes and another one goes on with.

The one that has computed a prompt copies its blocks to staging memory and lends them to whoever
gets the descriptor, for a while. The other reads them into its own staging memory, and stores them
as if it had computed them. Whatever fails on the way, the other one computes the prompt.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

import msgspec
import torch
from msgspec import Struct

from kvmesh.blocks.layout import KvLayout
from kvmesh.bus.messages import Work
from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import TransferError, Transport
from kvmesh.transfer.staging import Staging
from kvmesh.worker import metrics
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.sequence import hash_prompt
from kvmesh.worker.engines.torch.blocks.block_io import Prefix, check_layout, hold
from kvmesh.worker.engines.torch.core import TorchCore
from kvmesh.worker.engines.torch.threads import completed

log = logging.getLogger(__name__)
READING_S = 2.0


class Left(Struct, frozen=True, kw_only=True):
    """The leading blocks of a prompt: where the grant has each of them (packed uint64)."""

    grant: bytes
    layout: KvLayout
    offsets: bytes


class Handoffs:
    """What leaves `core` and comes to it. `told` is called when its books have changed."""

    def __init__(
        self,
        core: TorchCore,
        transport: Transport,
        options: TransferSettings,
        told: Callable[[], None],
    ) -> None:
        self._core = core
        self._transport = transport
        self._options = options
        self._told = told
        self._block = core.model.layout.block_bytes
        count = max(options.staging_bytes // self._block, 1)
        pinned = core.model.device.type == "cuda"
        self._host = torch.empty(count * self._block, dtype=torch.uint8, pin_memory=pinned)
        self._region = transport.register(self._host.numpy().data)
        self._staging = Staging(count)
        self._threads = ThreadPoolExecutor(1, "handoff")
        self._prompts: dict[str, tuple[array[int], bytes]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lent: dict[str, Callable[[], None]] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def moving(self) -> int:
        """Requests whose blocks are being copied or read."""
        return len(self._tasks)

    def abort(self, request: str) -> bool:
        """Forget a request; False if its blocks are not on the move."""
        self._prompts.pop(request, None)
        if request in self._lent:
            self._lent[request]()
        task = self._tasks.get(request)
        return task is not None and task.cancel()

    async def drain(self) -> None:
        """Return when nothing moves; what is lent has a moment to be read."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        try:
            async with asyncio.timeout(READING_S):
                await self._quiet.wait()
        except TimeoutError:
            log.warning("leaving with KV that nobody has fetched")

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._threads.shutdown()
        await self._transport.close()

    # prompts that leave

    def expect(self, work: Work) -> None:
        """The KV of this prompt is to be left once it is computed."""
        _, sequence, _ = hash_prompt(work.tokens, self._core.limits.block_size, work.salt)
        hashes = array("Q", sequence)
        self._prompts[work.request] = hashes, self._prints(work, len(hashes))

    def pass_on(
        self, deltas: list[OutputDelta], tell: Callable[[list[OutputDelta]], None]
    ) -> list[OutputDelta]:
        """Those that can be told at once; the others are when their KV can be read."""
        rest = []
        for delta in deltas:
            prompt = self._prompts.get(delta.request) if delta.finish else None
            if prompt is None:
                rest.append(delta)
                continue
            del self._prompts[delta.request]
            held, places = hold(self._core, *prompt)
            leaving = self._leave(delta, places, tell)
            self._start(delta.request, leaving, partial(self._core.blocks.unlock, held))
        return rest

    async def _leave(
        self, delta: OutputDelta, places: list[int], tell: Callable[[list[OutputDelta]], None]
    ) -> None:
        result = "failed"
        try:
            slots = await self._take(len(places))
            delta.handoff = await self._lend(delta.request, places, slots)
            result = "done"
        except Exception as error:  # whatever it is, the prompt can be computed elsewhere
            log.warning("the KV of request %s is not left: %s", delta.request, error)
        metrics.handoffs.labels("left", result).inc()
        tell([delta])

    async def _lend(self, request: str, places: list[int], slots: list[int]) -> dict[str, Any]:
        offsets = self._offsets(slots)
        try:
            memory = self._core.model.memory
            await completed(self._threads, memory.copy_out, places, self._host, offsets)
            ranges = zip(offsets, repeat(self._block), strict=False)
            given = partial(self._given_back, request, slots)
            grant = self._region.grant(ranges, self._options.lend_s, given)
        except BaseException:
            self._staging.give(slots)
            raise
        self._lent[request] = grant.revoke
        left = Left(
            grant=grant.descriptor,
            layout=self._core.model.layout,
            offsets=array("Q", offsets).tobytes(),
        )
        found: dict[str, Any] = msgspec.to_builtins(left, builtin_types=(bytes,))
        return found

    def _given_back(self, request: str, slots: list[int], ending: str) -> None:
        del self._lent[request]
        self._staging.give(slots)
        if ending == "expired":
            log.warning("nobody has fetched the KV of request %s", request)
        self._look()

    # prompts that come

    def fetch(self, work: Work, then: Callable[[], None]) -> None:
        """Bring in what was left for this prompt, as far as that goes; `then` it can run."""
        self._start(work.request, self._fetch(work, then))

    async def _fetch(self, work: Work, then: Callable[[], None]) -> None:
        result = "failed"
        try:
            result = await self._bring(work)
        except Exception as error:  # whatever it is, the prompt can be computed here
            log.warning("the prompt of request %s is computed again: %s", work.request, error)
        metrics.handoffs.labels("fetched", result).inc()
        then()

    async def _bring(self, work: Work) -> str:
        """Returns the way that the blocks have taken."""
        left = msgspec.convert(work.handoff, Left)
        check_layout(self._core, left.layout)
        theirs = array("Q", left.offsets)
        local, sequence, _ = hash_prompt(work.tokens, self._core.limits.block_size, work.salt)
        hashes = array("Q", sequence)[: len(theirs)]
        own = array("Q", local)[: len(theirs)]
        prints = self._prints(work, len(hashes))
        prefix = Prefix(self._core, hashes, own, prints, work.salt, work.tenant, self._told)
        try:
            return await self._fill(prefix, left.grant, theirs[prefix.held : len(hashes)])
        finally:
            prefix.release(work.priority)
            self._told()

    async def _fill(self, prefix: Prefix, grant: bytes, theirs: "array[int]") -> str:
        timeout, first = self._options.timeout_s, prefix.held
        slots = await self._take(len(theirs))
        try:
            ours = self._offsets(slots)
            pieces = zip(theirs, ours, repeat(self._block), strict=False)
            way = await self._transport.read(grant, self._region, pieces, timeout)
            metrics.handoff_bytes.inc(len(theirs) * self._block)
            done = prefix.extend(first) - first
            await self._store(prefix, ours[done:])
        except TransferError as error:
            slots = slots if error.settled else []
            raise
        finally:
            self._staging.give(slots)
        return way

    async def _store(self, prefix: Prefix, offsets: list[int]) -> None:
        places, good = prefix.reserve(len(offsets)), 0
        try:
            memory, ready = self._core.model.memory, offsets[: len(places)]
            await completed(self._threads, memory.copy_in, places, self._host, ready)
            good = len(places)
        finally:
            prefix.fill(places, good)

    async def _take(self, count: int) -> list[int]:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._staging.take(count)
        except TimeoutError:
            raise TimeoutError(f"no room for {count} blocks in staging memory") from None

    def _prints(self, work: Work, blocks: int) -> bytes:
        return self._core.guard.prints(work).upto(array("I", work.tokens), blocks)

    def _offsets(self, slots: list[int]) -> list[int]:
        return [slot * self._block for slot in slots]

    def _start(
        self,
        request: str,
        work: Coroutine[Any, Any, None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        def ended(_: "asyncio.Task[None]") -> None:
            after()
            del self._tasks[request]
            self._told()
            self._look()

        self._quiet.clear()
        task = self._tasks[request] = asyncio.create_task(work, name=f"handoff {request}")
        task.add_done_callback(ended)

    def _look(self) -> None:
        if not self._tasks and not self._lent:
            self._quiet.set()
