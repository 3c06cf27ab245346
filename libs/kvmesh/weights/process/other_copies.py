"""Copies beside the worker's weights, which its parent wants or offers."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.settings.schema import WeightsSettings
from kvmesh.transfer import Transport
from kvmesh.weights.errors import WeightsError, WeightsLost
from kvmesh.weights.frames import CopyOffered, CopyReady, CopyWanted, CopyWithdrawn
from kvmesh.weights.process.fetching import WeightFetch
from kvmesh.weights.process.offers import Offers
from kvmesh.weights.process.search import SourceSearch
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.weights.stream import FetchOptions

log = logging.getLogger(__name__)
LOOK_S = 0.1  # between looks at a copy that another process fetches


class OtherCopies:
    """Takes copies within a deadline, and offers them from then on, until `close`."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        settings: WeightsSettings,
        offers: Offers,
        send: Callable[[Struct], None],
        transport: Transport,
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._settings = settings
        self._offers = offers
        self._send = send
        self._transport = transport
        self._manifests = offers.manifests
        self._copies: dict[str, StoredCopy] = {}
        self._working: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()

    def handle(self, message: CopyWanted | CopyOffered | CopyWithdrawn) -> None:
        """Carry out a message of the parent, and report its end."""
        if isinstance(message, CopyWithdrawn):
            self._tasks.start(self._withdraw(message.digest), "withdraw a copy")
            return
        if isinstance(message, CopyWanted):
            work = partial(self._take, message.digest, message.timeout_s)
        else:
            work = partial(self._offer, message.digest)
        task = self._tasks.start(self._reported(message.digest, work), "copy for the parent")
        self._working[message.digest] = task
        task.add_done_callback(partial(self._end, message.digest))

    async def close(self) -> None:
        await self._tasks.close()
        for digest in list(self._copies):
            await self._drop(digest)

    def _store(self) -> WeightStore:
        return WeightStore(self._settings.directory, self._settings.max_bytes)

    def _end(self, digest: str, task: "asyncio.Task[None]") -> None:
        if self._working.get(digest) is task:
            del self._working[digest]

    async def _reported(self, digest: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        reason = ""
        try:
            await work()
        except (BusError, WeightsError, OSError) as error:
            reason = cause(error)
            await self._drop(digest)
        self._send(CopyReady(digest, reason))

    async def _withdraw(self, digest: str) -> None:
        """Offer a copy no more, after what is being done with it has ended."""
        if (task := self._working.get(digest)) is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._drop(digest)

    async def _take(self, digest: str, timeout_s: float) -> None:
        """Fill a copy; it is offered while it arrives. Raises WeightsLost after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                manifest = await self._manifests.get(digest)
                copy = await asyncio.to_thread(lambda: self._store().create(manifest))
                await self._hold(copy)
                copy = self._copies[digest]
                while not copy.complete:
                    if copy.fetch():
                        await self._fetch(copy, timeout_s)
                    else:
                        await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise WeightsLost(f"it did not come within {timeout_s:g} s") from error

    async def _offer(self, digest: str) -> None:
        copy = await asyncio.to_thread(lambda: self._store().open(digest))
        if copy is None:
            raise WeightsLost(f"the store has no copy {digest}")
        await self._hold(copy)
        await self._manifests.put(copy.manifest)

    async def _hold(self, copy: StoredCopy) -> None:
        """Keep a copy in use, and offer it."""
        digest = copy.manifest.digest
        if digest in self._copies:
            copy.close()
            return
        self._copies[digest] = copy
        await self._offers.add_copy(copy)

    async def _fetch(self, copy: StoredCopy, patience_s: float) -> None:
        options = FetchOptions(sources=self._settings.sources)
        search = SourceSearch(
            self._bus, copy.manifest, self._instance, lambda offer: fetch.offer(offer)
        )
        fetch = WeightFetch(copy, options, self._instance, search.ask, self._transport)
        await search.open()
        try:
            await fetch.run(patience_s)
        finally:
            copy.end_fetch()
            await search.close()

    async def _drop(self, digest: str) -> None:
        copy = self._copies.pop(digest, None)
        if copy is not None:
            await self._offers.remove(digest)
            copy.close()
