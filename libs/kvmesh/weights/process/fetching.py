"""Fetch of a copy's missing chunks from several sources at once."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import WeightOffer
from kvmesh.runtime.background import ended
from kvmesh.transfer import TransferError, Transport
from kvmesh.weights.errors import StoreFull, WeightsLost, WrongDigest
from kvmesh.weights.frames import DISK, STORE
from kvmesh.weights.process.readers import LINES, ChunkReader, SourceReader
from kvmesh.weights.process.staging import ChunkBuffers
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.weights.stream import ChunkRequest, Failure, FetchOptions, StreamPlan

log = logging.getLogger(__name__)
FIRST_SEARCH_S = 0.25  # between queries while few sources are known; twice as long each time,
SEARCH_S = 2.0  # up to this
_FAILURES: dict[str, Failure] = {"busy": "busy", "timeout": "timeout"}


class WeightFetch:
    """Fills one copy, whose fetch lock this process holds.

    `search` asks the mesh for sources; those that reply come through `offer`. A chunk is marked as
    present once its digest is verified. NIXL is used if `transport` and the source have it.
    """

    def __init__(
        self,
        copy: StoredCopy,
        options: FetchOptions,
        instance: str,
        search: Callable[[Callable[[], bool]], Coroutine[Any, Any, None]],
        transport: Transport | None = None,
    ) -> None:
        manifest = copy.manifest
        self._copy = copy
        self._options = options
        self._search = search
        self._plan = StreamPlan([chunk.size for chunk in manifest.chunks], options, instance)
        self._plan.present(n for n in range(len(manifest.chunks)) if copy.has(n))
        self._readers: dict[str, ChunkReader] = {}
        self._store: ChunkReader | None = None
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._searching: asyncio.Task[None] | None = None
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(_slots)
        self._staging = ChunkBuffers(max(chunk.size for chunk in manifest.chunks), transport)
        self._pool = ThreadPoolExecutor((LINES + 1) * options.sources + 4, "weights")
        self._changed = asyncio.Event()
        self._arrived_at = 0.0
        self._full: StoreFull | None = None
        self._logged = LogOnce()
        self.taken: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    @property
    def peers(self) -> int:
        """The workers that are sources now."""
        return len(self._plan.sources.keys() - {DISK, STORE})

    @property
    def direct_bytes(self) -> int:
        """Bytes that came through NIXL."""
        return self._staging.direct_bytes

    def offer(self, offer: WeightOffer) -> None:
        """Take chunks from a worker; one that has started anew replaces its former self."""
        name, now = offer.instance, _now()
        if name in (DISK, STORE):
            self._report(name, "a worker offers them under this name, and is not asked")
            return
        known = self._readers.get(name)
        if isinstance(known, SourceReader) and name in self._plan.sources:
            if known.renewed(offer):
                return
            self._drop(name)
        try:
            reader = SourceReader(offer, self._copy.manifest, self._pool, self._staging)
        except TransferError as error:
            self._report(name, str(error))
            return
        if self._plan.join(name, now, offer.complete):
            if known is not None:
                known.close()
            self._readers[name] = reader
            self._changed.set()

    def add_disk(self, reader: ChunkReader) -> None:
        """Take chunks from this node's disk too."""
        if self._plan.join(DISK, _now(), complete=True, local=True):
            self._readers[DISK] = reader
            self._changed.set()

    def add_store(self, reader: ChunkReader) -> None:
        """Take from the model store what no worker has; after failures it is tried again."""
        self._store = reader
        if self._plan.join(STORE, _now(), complete=True, spare=True):
            self._readers[STORE] = reader
            self._changed.set()

    async def run(self, patience_s: float) -> None:
        """Return once the copy is complete.

        Raises WeightsLost if nothing arrives for `patience_s` seconds, or StoreFull.
        """
        self._arrived_at = search_at = _now()
        search_s = FIRST_SEARCH_S
        try:
            while not self._plan.done:
                now = _now()
                if self._full is not None:
                    raise self._full
                if now - self._arrived_at > patience_s:
                    raise WeightsLost(f"no chunk has arrived for {patience_s:g} s")
                if self.peers < self._options.known and now >= search_at:
                    if self._searching is None or self._searching.done():
                        self._searching = asyncio.create_task(self._search(self._knows_many))
                    search_at, search_s = now + search_s, min(2 * search_s, SEARCH_S)
                if self._store is not None and STORE not in self._readers:
                    self.add_store(self._store)
                self._start(now)
                await self._wait(now, search_at)
        finally:
            await self.close()

    async def close(self) -> None:
        """End all requests, and close the sources; also of a fetch that has not run."""
        tasks = [*self._tasks.values(), *self._polls.values()]
        tasks += [self._searching] if self._searching is not None else []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for reader in self._readers.values():
            reader.close()
        self._staging.close()
        self._pool.shutdown(wait=False)

    def _knows_many(self) -> bool:
        """A search ends at half of those to know: few reply at once, the next asks others."""
        return self.peers >= self._options.known // 2

    def _start(self, now: float) -> None:
        """Start the requests and polls that the plan wants now."""
        for request in self._plan.requests(now):
            self._copy.expect(request.chunk)
            task = asyncio.create_task(self._take(request, self._readers[request.source]))
            self._tasks[request.source, request.chunk] = task
        for name in self._plan.polls(now):
            if name not in self._polls:
                self._polls[name] = asyncio.create_task(self._poll(name, self._readers[name]))
        for name in self._readers.keys() - self._plan.sources.keys():
            self._drop(name)

    async def _wait(self, now: float, search_at: float) -> None:
        """Wait for a report, or the time of the plan's next decision."""
        times = [now + SEARCH_S, search_at] if search_at > now else [now + SEARCH_S]
        if (wake := self._plan.wake_at(now)) is not None:
            times.append(wake)
        try:
            async with asyncio.timeout_at(max(min(times), now + 0.001)):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _take(self, request: ChunkRequest, reader: ChunkReader) -> None:
        """Carry out a request, and report to the plan."""
        name, chunk = request.source, request.chunk
        reason: Failure | None = None
        try:
            buffer = await self._read(name, reader, chunk, request.deadline)
            await self._write(chunk, buffer)
        except TimeoutError:
            reason = "timeout"
        except WrongDigest as error:
            reason = "corrupt"
            self._report(name, f"chunk {chunk} is refused: {error}")
        except TransferError as error:
            reason = _FAILURES.get(error.code, "lost")
            if error.code in ("revoked", "refused"):
                self._end(self._plan.leave(name), name)
            elif reason != "busy":
                self._report(name, error.detail)
        except StoreFull as error:
            reason, self._full = "lost", error
        except OSError as error:
            reason = "lost"
            self._report(name, error.strerror or str(error))
        finally:
            if self._tasks.get((name, chunk)) is asyncio.current_task():
                del self._tasks[name, chunk]
            if reason is not None or not self._copy.has(chunk):
                self._copy.expect(chunk, coming=False)
        now = _now()
        if reason is None:
            if self._plan.arrived(name, chunk, now):
                self.taken[name] += self._copy.manifest.chunks[chunk].size
            self._arrived_at = now
        else:
            self.failed[reason] += 1
            self._end(self._plan.failed(name, chunk, reason, now), name)
        self._changed.set()

    async def _read(
        self, name: str, reader: ChunkReader, chunk: int, deadline: float
    ) -> memoryview:
        """A buffer that begins with the verified bytes of a chunk; raises TimeoutError."""
        size = self._copy.manifest.chunks[chunk].size
        buffer: memoryview | None = None
        try:
            async with asyncio.timeout_at(deadline), self._slots[name]:
                buffer = self._staging.take()
                await reader.read(chunk, buffer[:size])
        except BaseException as error:
            ended_early = isinstance(error, asyncio.CancelledError | TimeoutError)
            if buffer is not None:
                if isinstance(error, TransferError) and not error.settled:
                    self._staging.lose(buffer)
                elif reader.direct or not ended_early:
                    self._staging.give(buffer)  # else a thread may still write into it
            raise
        return buffer

    async def _write(self, chunk: int, buffer: memoryview) -> None:
        """Put verified bytes into the copy, and return their buffer."""
        try:
            if not self._copy.has(chunk):
                data = buffer[: self._copy.manifest.chunks[chunk].size]
                loop = asyncio.get_running_loop()
                await ended(loop.run_in_executor(self._pool, self._copy.write, chunk, data))
                self._copy.mark(chunk)
        finally:
            self._staging.give(buffer)

    async def _poll(self, name: str, reader: ChunkReader) -> None:
        """Read a source's list of chunks."""
        try:
            async with asyncio.timeout(self._options.ceiling_s):
                have = await reader.have()
            self._plan.learn(name, have, _now())
        except (TransferError, OSError) as error:
            code = error.code if isinstance(error, TransferError) else "lost"
            if isinstance(error, TimeoutError):
                code = "timeout"
            if code in ("revoked", "refused"):
                self._end(self._plan.leave(name), name)
            else:
                failure = _FAILURES.get(code, "lost")
                self._end(self._plan.failed(name, None, failure, _now()), name)
        finally:
            del self._polls[name]
        self._changed.set()

    def _end(self, chunks: list[int], source: str) -> None:
        """Cancel requests to a source for these chunks."""
        for chunk in chunks:
            if (task := self._tasks.get((source, chunk))) is not None:
                task.cancel()

    def _drop(self, name: str) -> None:
        """Forget a source and its requests."""
        self._end(self._plan.leave(name), name)
        reader = self._readers.pop(name, None)
        if reader is not None:
            reader.close()

    def _report(self, source: str, reason: str) -> None:
        if self._logged.first(source, reason.partition(":")[0]):
            log.warning("weights from %s: %s", source, reason)


def _slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(LINES)


def _now() -> float:
    return asyncio.get_running_loop().time()
