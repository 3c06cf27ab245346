"""Copies of adapters in the node's store, which the worker takes from others and offers to them."""

import asyncio
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

from msgspec.structs import replace

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.messages import AdapterFiles, adapter_identity, adapter_name
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.weights.errors import WeightsError
from kvmesh.weights.manifest import FileEntry, Manifest, chunk_digests
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.lora.folder import (
    CONFIG,
    SAFETENSORS,
    AdapterError,
    AdapterFolder,
    plain_config,
    read_adapter,
)

log = logging.getLogger(__name__)
MAX_COPIES = 128  # of one worker: each takes a subscription, and a line on its card
FILES = [CONFIG, SAFETENSORS]
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0  # between attempts to offer a copy


class CopyExchange(Protocol):
    """Moves stored copies between nodes."""

    async def fetch(self, digest: str, timeout_s: float) -> StoredCopy:
        """The complete copy with this digest; raises WeightsError, also after `timeout_s`."""
        ...

    async def offer(self, copy: StoredCopy) -> None:
        """Serve a copy to other workers from now on; raises WeightsError."""
        ...

    def withdraw(self, digest: str) -> None:
        """Serve a copy to other workers no more."""
        ...

    def store(self) -> WeightStore:
        """The node's store; blocks, and raises StoreError."""
        ...


class _Held(NamedTuple):
    copy: StoredCopy
    files: AdapterFiles
    folder: AdapterFolder


class AdapterCopies:
    """The copies that one worker holds, by identity. The files of loaded ones stay in place.

    `loaded(identity)` is true of those that the engine may read.
    """

    def __init__(
        self,
        exchange: CopyExchange,
        loaded: Callable[[str], bool],
        on_offered: Callable[[], Awaitable[None]],
    ) -> None:
        self._exchange = exchange
        self._loaded = loaded
        self._on_offered = on_offered
        self._tasks = BackgroundTasks()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._load_s: dict[str, float] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def files(self) -> list[AdapterFiles]:
        """The files that the worker offers, the latest last."""
        found = (held.files for held in self._held.values())
        return [replace(files, load_s=self._load_s.get(files.adapter, 0.0)) for files in found]

    async def take(
        self, identity: str, digest: str, max_rank: int, deadline: float
    ) -> AdapterFolder:
        """The files of an adapter, from other workers if they are not here.

        Raises AdapterError if they do not arrive before `deadline`, by the loop's clock, or if they
        are not those of this identity.
        """
        try:
            async with asyncio.timeout_at(deadline), self._lock(identity):
                held = self._held.get(identity)
                if held is not None and held.folder.is_unchanged():
                    held.folder.check_rank(max_rank)
                    return held.folder
                if held is not None:
                    self._drop(identity)
                return await self._fetch(identity, digest, max_rank, deadline)
        except TimeoutError:
            raise AdapterError(f"the files of {identity} did not arrive in time") from None
        except WeightsError as error:
            raise AdapterError(f"the files of {identity}: {error}") from error

    async def _fetch(
        self, identity: str, digest: str, max_rank: int, deadline: float
    ) -> AdapterFolder:
        left = deadline - asyncio.get_running_loop().time()
        copy = None
        try:
            copy = await self._exchange.fetch(digest, max(left, 0.0))
            folder = await _checked(copy, identity, max_rank)
        except BaseException:
            self._withdraw(digest)
            if copy is not None:
                copy.close()
            raise
        self._hold(identity, copy, folder)
        return folder

    async def offer(self, identity: str, folder: AdapterFolder) -> None:
        """Copy an adapter's folder into the store, and offer it; a failure is logged.

        What others cannot be told of yet is offered later if it is still loaded: `on_offered` is
        awaited then.
        """
        async with self._lock(identity):
            if identity in self._held:
                return
            try:
                copy, stored = await asyncio.to_thread(_store_folder, self._exchange, folder)
            except (WeightsError, AdapterError, OSError) as error:
                log.warning("adapter %s is not offered to other workers: %s", identity, error)
                return
            try:
                reason = await self._try_offer(identity, copy, stored)
            except BaseException:
                copy.close()
                raise
            if reason is None:
                return
        log.warning("adapter %s is not offered to other workers yet: %s", identity, reason)
        self._tasks.start(self._offer_later(identity, copy, stored), "offer adapter")

    async def _offer_later(self, identity: str, copy: StoredCopy, folder: AdapterFolder) -> None:
        backoff, offered = Backoff(FIRST_DELAY_S, MAX_DELAY_S), False
        try:
            while not offered:
                await asyncio.sleep(backoff.delay())
                async with self._lock(identity):
                    if identity in self._held or not self._loaded(identity):
                        return
                    offered = await self._try_offer(identity, copy, folder) is None
        finally:
            if not offered:
                copy.close()
        log.info("adapter %s is offered to other workers", identity)
        await self._on_offered()

    async def _try_offer(
        self, identity: str, copy: StoredCopy, folder: AdapterFolder
    ) -> WeightsError | None:
        """The reason why others cannot be told of a copy; None if they have been."""
        try:
            await self._exchange.offer(copy)
        except WeightsError as error:
            return error
        self._hold(identity, copy, folder)
        return None

    def _lock(self, identity: str) -> asyncio.Lock:
        return self._locks.setdefault(identity, asyncio.Lock())

    def took(self, identity: str, seconds: float) -> None:
        """The engine has loaded an adapter in so many seconds."""
        if len(self._load_s) >= MAX_COPIES:
            self._load_s.clear()
        self._load_s[identity] = round(seconds, 3)

    def withdraw(self, name: str) -> str:
        """Offer the adapters of a name no more; return the identity of one, empty without any."""
        found = [identity for identity in self._held if adapter_name(identity) == name]
        for identity in found:
            self._drop(identity)
        return found[-1] if found else ""

    def withdraw_one(self, identity: str) -> None:
        """Offer one adapter no more."""
        if identity in self._held:
            self._drop(identity)

    def supersede(self, identity: str) -> None:
        """Offer no adapter of the same name any more that has another content and is not loaded."""
        for other in list(self._held):
            same_name = adapter_name(other) == adapter_name(identity)
            if same_name and other != identity and not self._loaded(other):
                self._drop(other)

    async def close(self) -> None:
        """End the use of all copies, and offer them no more."""
        await self._tasks.close()
        for identity in list(self._held):
            self._drop(identity)

    def _hold(self, identity: str, copy: StoredCopy, folder: AdapterFolder) -> None:
        manifest = copy.manifest
        files = AdapterFiles(adapter=identity, digest=manifest.digest, size=manifest.size)
        self._held[identity] = _Held(copy, files, folder)
        if len(self._held) > MAX_COPIES:
            unloaded = [each for each in self._held if not self._loaded(each) and each != identity]
            if unloaded:
                self._drop(unloaded[0])

    def _drop(self, identity: str) -> None:
        held = self._held.pop(identity)
        self._withdraw(held.files.digest)
        held.copy.close()

    def _withdraw(self, digest: str) -> None:
        """Serve a copy no more, unless it is that of another name, too."""
        if all(held.files.digest != digest for held in self._held.values()):
            self._exchange.withdraw(digest)


async def _checked(copy: StoredCopy, identity: str, max_rank: int) -> AdapterFolder:
    """The folder of a copy; raises AdapterError unless it holds the adapter `identity`."""
    if copy.manifest.form != "adapter" or [file.name for file in copy.manifest.files] != FILES:
        raise AdapterError(f"{copy.manifest.digest} is not the copy of an adapter")
    folder = await asyncio.to_thread(read_adapter, copy.folder, max_rank)
    found = adapter_identity(adapter_name(identity), folder.digest)
    if found != identity:
        raise AdapterError(f"the copy of {identity} holds {found}")
    return folder


def _store_folder(
    exchange: CopyExchange, folder: AdapterFolder
) -> tuple[StoredCopy, AdapterFolder]:
    """Copy an adapter into the store; raises AdapterError, StoreError or OSError."""
    store = exchange.store()
    if folder.weights != SAFETENSORS:
        raise AdapterError(f"{folder.weights} may hold code; only safetensors files travel")
    config = plain_config(folder.path)
    source = folder.path / SAFETENSORS
    scratch = store.scratch(len(config) + source.stat().st_size)
    try:
        (scratch / CONFIG).write_bytes(config)
        shutil.copyfile(source, scratch / SAFETENSORS)
        stored = read_adapter(scratch)
        if stored.digest != folder.digest:
            raise AdapterError(f"{folder.path} was changed while it was copied")
        for name in FILES:
            (scratch / name).chmod(0o600)
        manifest = Manifest(
            form="adapter",
            files=[FileEntry(name, os.stat(scratch / name).st_size) for name in FILES],
            tensors=[],
            digests=b"".join(chunk_digests(scratch / name) for name in FILES),
        )
        copy = store.adopt(manifest, scratch)
        return copy, stored.moved(copy.folder)
    finally:
        store.discard(scratch)
