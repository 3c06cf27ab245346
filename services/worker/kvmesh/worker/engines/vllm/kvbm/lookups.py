"""Lookups of prompts in the kvbm by vLLM's scheduler.

Blocks found are verified and held in the arena until the workers, which may be other processes,
have copied them.
"""

import asyncio
import logging
import os
import threading
import time
from array import array
from contextlib import AsyncExitStack, aclosing
from functools import partial

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from kvmesh._native import xxh3
from kvmesh.blocks.kvbm_client import FetchedPart, KvbmPrompt, TierSpeeds, digest_of
from kvmesh.hashing import DIGEST_BYTES, HASH_BYTES
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.tracing.names import ONBOARD, TIERS
from kvmesh.tracing.tracer import continued
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.adapters.throughput import Throughput, combined_throughput
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions, KvbmBridge, PromptChain
from kvmesh.worker.engines.vllm.kvbm.parts import KvParts

log = logging.getLogger(__name__)
DEADLINE_S = 30.0
UNCLAIMED_S = 60.0
WRITE_GRACE_S = 1.0
WINDOW_TRIES = 3
PROBES = 32
MAX_PROBES = 256
# a fast GPU computes 4 GiB of KV per second; a thread that reads new pages checks less
CHECKERS = min(4, max(1, (os.cpu_count() or 1) // 2))
MIN_CHECKED_BYTES = 4 << 20


class PartBlocks(Struct):
    """Blocks of one part, from index `first` on, at these offsets of the named arena.

    `tiers` has the source tier of each block.
    """

    first: int
    arena: str
    offsets: "array[int]"
    tiers: bytearray

    @property
    def end(self) -> int:
        return self.first + len(self.offsets)


class LookupResult(Struct):
    """All that an engine with `held` blocks needs to continue after `end` blocks, by part.

    `polled_at` is the time of the scheduler's last lookup (monotonic seconds). `copying`: vLLM has
    allocated blocks for them. `loaded` counts the lead's blocks that it copies, by tier from 1 on.
    """

    held: int
    end: int
    parts: list[PartBlocks]
    polled_at: float = 0.0
    copying: bool = False
    loaded: list[int] = []

    @property
    def arena(self) -> str:
        return self.parts[0].arena

    def count_after(self, held: int) -> int:
        """Number of blocks to load by an engine with `held` blocks."""
        return max(0, self.end - held) if held >= self.held else 0

    def tiers(self, first: int, end: int) -> bytearray:
        """Source tiers of the lead's blocks from `first` to before `end`."""
        lead = self.parts[0]
        return lead.tiers[first - lead.first : end - lead.first]


class SchedulerBridge(KvbmBridge):
    """The scheduler's bridge: looks up prompts and holds the blocks found until they are copied.

    `load_ratio` is the time to load a block over the time to compute it, 0 if unknown.
    """

    def __init__(self, options: BridgeOptions, parts: KvParts) -> None:
        self._lock = threading.Lock()
        self._lookups: dict[str, LookupResult | None] = {}
        self._released: dict[str, asyncio.Event] = {}
        self._tasks = BackgroundTasks()
        self._check_speed = Throughput()
        self._parts = parts
        shards = range(parts.shards)
        self._state_parts = [group * parts.shards + s for group in parts.states for s in shards]
        self._speeds = [TierSpeeds()] * len(parts.layouts)
        self.corrupt = 0
        self.load_ratio = 0.0
        super().__init__(options, "scheduler", parts.layouts, torch.device("cpu"))

    def lookup(
        self, request: str, origin: RequestOrigin, tokens: "array[int]", held: int
    ) -> int | None:
        """Number of loadable blocks after the `held` ones; None while the lookup is in progress."""
        with self._lock:
            if request in self._lookups:
                found = self._lookups[request]
                if found is None:
                    return 0
                found.polled_at = time.monotonic()
                return found.count_after(held)
            if request in self._released:
                return None
            if not self.is_attached:
                return 0
            released = self._released[request] = asyncio.Event()
        run = partial(self._run_lookup, request, origin, tokens, held, released)
        self._loop.call_soon_threadsafe(lambda: self._tasks.start(run(), "lookup"))
        return None

    def update_speeds(self, compute_tps: float, copy_bps: float) -> None:
        """Set the speeds measured by a rank. Each part is worth loading if the whole block is."""
        layouts = self._layouts
        whole = sum(layout.block_bytes for layout in layouts if not layout.window)
        load_bps = combined_throughput(copy_bps * self._parts.shards, self._check_speed.value)
        if load_bps and compute_tps:
            ratio = whole * compute_tps / (load_bps * self._parts.block_size)
            self.load_ratio = round(ratio, 2)
        self._speeds = [
            # what is read of a window is little, and without it the rest is of no use
            TierSpeeds()
            if layout.window
            else TierSpeeds(compute_tps=compute_tps * whole / layout.block_bytes, load_bps=load_bps)
            for layout in layouts
        ]

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

    def finish_request(self, request: str, origin: RequestOrigin) -> None:
        """Report the request as computed, after WRITE_GRACE_S for its last writes."""
        self.release_lookup(request)
        for client in self._clients:
            computed = partial(client.report_computed, origin.request)
            self._loop.call_soon_threadsafe(self._loop.call_later, WRITE_GRACE_S, computed)

    async def _close(self) -> None:
        await self._tasks.close()
        await super()._close()

    async def _run_lookup(
        self,
        request: str,
        origin: RequestOrigin,
        tokens: "array[int]",
        held: int,
        released: asyncio.Event,
    ) -> None:
        span = continued(origin.traceparent, ONBOARD)
        found: LookupResult | None = None
        try:
            async with AsyncExitStack() as loads:
                found = await self._find(loads, origin, tokens, held)
                with self._lock:
                    if found is None or self._released.get(request) is not released:
                        return
                    found.polled_at = time.monotonic()
                    self._lookups[request] = found
                await self._wait_until_copied(request, found, released)
        except (RuntimeError, ValueError, OSError, ExceptionGroup) as error:
            log.error("request %s: lookup failed: %s", request, error)
            span.fail("load")
        finally:
            loaded = found.loaded if found is not None else []
            span.set(TIERS, [0, *(blocks * self._parts.block_size for blocks in loaded)])
            span.end()
            with self._lock:
                if self._released.get(request) is released:
                    self._lookups.setdefault(request, None)

    async def _find(
        self,
        loads: AsyncExitStack,
        origin: RequestOrigin,
        tokens: "array[int]",
        held: int,
    ) -> LookupResult | None:
        """Find the longest prefix of which all parts have what they need; held until `loads` end.

        A part with a window needs only the blocks of the window before the end of the prefix.
        There are few states; the likeliest is the one at the end of the prompt, which this request
        computes if it is missing.
        """
        key = self._clients[0].key
        if key is None:
            return None
        chain = PromptChain(self._options, origin, self._layouts[0])
        prompts = chain.prompts(tokens, key, self._layouts)
        last = prompts[0].blocks
        whole = [part for part, layout in enumerate(self._layouts) if not layout.window]
        # beside speculation, vLLM may keep the state before the last
        states = [] if self._parts.is_speculative else self._state_parts
        first = dict.fromkeys(whole, held) | dict.fromkeys(states, last - 1)
        found = await self._load(loads, prompts, first)
        end = min(found[part].end for part in whole)
        if end < last or any(found[part].end < last for part in states):
            found = {part: found[part] for part in whole}
        end = await self._find_windows(loads, prompts, held, end, found)
        complete = len(found) == len(prompts) and end > held
        if not complete or len({blocks.arena for blocks in found.values()}) > 1:
            return None
        return LookupResult(held, end, [found[part] for part in range(len(prompts))])

    async def _find_windows(
        self,
        loads: AsyncExitStack,
        prompts: list[KvbmPrompt],
        held: int,
        end: int,
        found: dict[int, PartBlocks],
    ) -> int:
        """Add the missing parts to `found`; returns the longest end that they allow, up to `end`.

        If it cannot be found, parts are missing still.
        """
        states = [part for part in self._state_parts if part not in found]
        windows = [part for part in range(len(prompts)) if part not in found]
        for _ in range(WINDOW_TRIES if windows else 0):
            if states and end > held:
                end = await self._last_state(prompts[states[0]], states[0], held, end)
            if end <= held:
                break
            first = {
                part: max(held, self._parts.first_needed(part // self._parts.shards, end))
                for part in windows
            }
            # nothing is known of states after the end: no other request is to wait for one
            needed = [_shortened(p, end) if n in states else p for n, p in enumerate(prompts)]
            of_windows = await self._load(loads, needed, first)
            reached = min(blocks.end for blocks in of_windows.values())
            if reached >= end:
                found |= of_windows
                break
            end = reached
        return end

    async def _last_state(self, prompt: KvbmPrompt, part: int, held: int, end: int) -> int:
        """The greatest end up to `end` of a block with a state; `held` if none is found."""
        for stop in range(end, max(held, end - MAX_PROBES), -PROBES):
            ends = range(stop, max(held, stop - PROBES), -1)
            async with asyncio.TaskGroup() as group:
                probes = [group.create_task(self._holds(prompt, part, end)) for end in ends]
            known = next((e for e, probe in zip(ends, probes, strict=True) if probe.result()), None)
            if known is not None:
                return known
        return held

    async def _holds(self, prompt: KvbmPrompt, part: int, end: int) -> bool:
        """True if the kvbm has the last of the first `end` blocks, without waiting for it."""
        # a prompt may need hundreds of probes, which are no spans of their own
        wanted, speeds = replace(_shortened(prompt, end), traceparent=""), TierSpeeds()
        loading = self._clients[part].load(wanted, end - 1, speeds, 0.0, DEADLINE_S, False)
        async with aclosing(loading):
            async for fetched in loading:
                return len(fetched.offsets) > 0
        return False

    async def _load(
        self, loads: AsyncExitStack, prompts: list[KvbmPrompt], first: dict[int, int]
    ) -> dict[int, PartBlocks]:
        """Load the blocks of several parts at a time, each from index `first` on."""
        async with asyncio.TaskGroup() as group:
            tasks = {
                part: group.create_task(self._load_part(loads, prompts[part], part, start))
                for part, start in first.items()
            }
        return {part: task.result() for part, task in tasks.items()}

    async def _load_part(
        self, loads: AsyncExitStack, prompt: KvbmPrompt, part: int, first: int
    ) -> PartBlocks:
        """Load the blocks with right checksums."""
        client, found = self._clients[part], PartBlocks(first, "", array("Q"), bytearray())
        loading = client.load(prompt, first, self._speeds[part], self._options.wait_s, DEADLINE_S)
        await loads.enter_async_context(aclosing(loading))
        async for fetched in loading:
            found.arena = fetched.arena.path.name
            valid = await self._verify(fetched, self._layouts[part].block_bytes)
            found.offsets.extend(fetched.offsets[:valid])
            found.tiers.extend(fetched.tiers[:valid])
            if valid < len(fetched.offsets):
                self.corrupt += 1
                log.warning("request %s: a block has a wrong checksum", prompt.request)
                client.report_corrupt(fetched, digest_of(prompt, fetched.first + valid))
                break
            if found.end == prompt.blocks:
                break
        return found

    async def _verify(self, fetched: FetchedPart, size: int) -> int:
        """Number of leading blocks with right checksums; each has `size` bytes."""
        host = self._arenas.of(fetched.arena)
        count, start = len(fetched.offsets), time.perf_counter()
        step = max(1, MIN_CHECKED_BYTES // size, -(-count // CHECKERS))
        ranges = [range(first, min(first + step, count)) for first in range(0, count, step)]
        checks = [asyncio.to_thread(_first_wrong, fetched, host, size, each) for each in ranges]
        wrong = [index for index in await asyncio.gather(*checks) if index is not None]
        valid = min(wrong, default=count)
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


def _shortened(prompt: KvbmPrompt, blocks: int) -> KvbmPrompt:
    """The first blocks of a prompt."""
    return replace(
        prompt,
        digests=prompt.digests[: blocks * DIGEST_BYTES],
        sequence_hashes=prompt.sequence_hashes[: blocks * HASH_BYTES],
        local=prompt.local[: blocks * HASH_BYTES],
    )


def _first_wrong(fetched: FetchedPart, host: Tensor, size: int, indices: range) -> int | None:
    """The first of these blocks that is beyond the arena or wrong; None if all are right."""
    content = host.numpy().data
    for i in indices:
        block = content[fetched.offsets[i] :][:size]
        if len(block) < size or xxh3(block) != fetched.checksums[i]:
            return i
    return None
