"""The compile cache of a worker's engine: kept on disk, taken from others, and offered to them."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import CompiledOffer, Instance, StartSource
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.settings.schema import WeightsSettings
from kvmesh.weights.errors import WeightsError
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.compiled.archive import travelling_files
from kvmesh.worker.compiled.environment import CompileEnvironment
from kvmesh.worker.compiled.errors import CompileCacheError
from kvmesh.worker.compiled.exchange import (
    ArchiveExchange,
    offer_of,
    offered_archives,
    store_archive,
    unpack_copy,
)
from kvmesh.worker.compiled.roots import CompileCacheRoot, CompileCacheRoots

log = logging.getLogger(__name__)
PATIENCE_S = 5.0  # beyond the time in which another worker of the node may fetch
READ_S = 5.0
USERS = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")  # torch sets its own variable, and vLLM replaces it
UNSTABLE = "aotautograd"
# variables that engines read, and their folders below a root
VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


class CompileCache:
    """The cache of one environment, from `open` to `close`.

    `exchange` moves archives if `key`, the domain's, is given. `cards` reads the cards of workers;
    it may raise BusError. `fetched` is the digest of the archive that was unpacked by `open`, and
    `source` says where the code came from, None without a cache.
    """

    def __init__(
        self,
        settings: WeightsSettings,
        engine: str,
        environment: CompileEnvironment,
        cards: Callable[[], Awaitable[list[Instance]]],
        exchange: ArchiveExchange | None = None,
        key: bytes = b"",
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._environment = environment
        self._cards = cards
        self._exchange = exchange if key else None
        self._key = key
        self._roots: CompileCacheRoots | None = None
        self._root: CompileCacheRoot | None = None
        self._copy: StoredCopy | None = None
        self._names: set[str] = set()
        self._before: dict[str, str | None] = {}
        self._tasks = BackgroundTasks()
        self._sound = False
        self.fetched = ""
        self.source: StartSource | None = None

    async def open(self) -> None:
        """Fill the cache from another worker if it is empty, and point the engine to it.

        The engine starts without it if it cannot be used.
        """
        given = [name for name in USERS if name in os.environ]
        if given:
            log.info("%s is set: the engine's compile cache is left alone", given[0])
            return
        try:
            root = await asyncio.to_thread(self._open_root)
            self._root = root
            names = await asyncio.to_thread(travelling_files, root.files)
            source = "disk" if names else "workers"
            if root.alone and not names:
                await self._fill(root)
                names = await asyncio.to_thread(travelling_files, root.files)
            self._names = set(names)
            count = await asyncio.to_thread(_bytes, root.files, names)
            self.source = StartSource("code", source if names else "compiled", count)
            if not await asyncio.to_thread(root.begin):
                raise CompileCacheError(f"another process has removed {root.files}")
        except CompileCacheError as error:
            log.warning("the engine starts without a compile cache: %s", error)
            self.source = None
            self._close_root()
            return
        for name, folder in VARIABLES.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = str(root.files / folder)

    @property
    def files(self) -> Path | None:
        """The folder of the cache that the engine uses; None if it uses none."""
        return self._root.files if self._root is not None and self._before else None

    def start_offering(self, publish: Callable[[CompiledOffer], Coroutine[Any, Any, None]]) -> None:
        """The engine has started: pack what it compiled, and publish the offer, if any."""

        async def run() -> None:
            offer = await self.offer()
            if offer is not None:
                await publish(offer)

        self.engine_runs()
        self._tasks.start(run(), "offer of the compile cache")

    def engine_runs(self) -> None:
        """The engine has started, so its cache is sound."""
        self._sound = True
        if self._root is not None:
            with suppress(CompileCacheError):  # a full disk costs the cache at the next start
                self._root.succeed()

    async def offer(self) -> CompiledOffer | None:
        """After the engine has started: pack what it compiled; None if nothing can be offered."""
        root, roots = self._root, self._roots
        if root is None or roots is None:
            return None
        try:
            await asyncio.to_thread(roots.evict)
            if self._exchange is None:
                return None
            copy = await asyncio.to_thread(self._archive, root)
            await self._exchange.offer(copy)
        except (CompileCacheError, WeightsError) as error:
            log.warning("the compile cache is not offered to other workers: %s", error)
            return None
        return offer_of(self._environment, self._key, copy.manifest.digest)

    async def close(self, failed: bool = False) -> None:
        """End the use; `failed`: the engine did not start, so that the cache is suspect."""
        await self._tasks.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()
        if not failed and not self._sound:
            self.engine_runs()
        self._close_root()
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _open_root(self) -> CompileCacheRoot:
        settings = self._settings
        directory = settings.cache_directory or default_directory()
        self._roots = CompileCacheRoots(directory, settings.cache_bytes)
        patience = settings.cache_wait_s + PATIENCE_S
        root = self._roots.open(self._environment.digest, patience)
        if root.alone:
            root.recover()
        return root

    async def _fill(self, root: CompileCacheRoot) -> None:
        """Take the first archive that arrives in time and fits; log why there is none."""
        if self._exchange is None:
            return
        try:
            async with asyncio.timeout(READ_S):
                cards = await self._cards()
        except (BusError, TimeoutError) as error:
            log.warning("no compile cache from other workers: cannot read cards: %s", cause(error))
            return
        digests, false = offered_archives(cards, self._environment, self._key)
        if false:
            log.warning("ignored compile caches of %s: not of this domain", ", ".join(false))
        deadline, reason = monotonic() + self._settings.cache_wait_s, ""
        for tried, digest in enumerate(digests):
            if digest in root.state.refused:
                reason = "an engine did not start with it"
                continue
            share_s = (deadline - monotonic()) / (len(digests) - tried)
            try:
                await self._take(root, digest, self._exchange, share_s)
                return
            except (CompileCacheError, WeightsError) as error:
                reason = str(error)
        if reason:
            log.warning("no compile cache from other workers, the engine compiles: %s", reason)

    async def _take(
        self, root: CompileCacheRoot, digest: str, exchange: ArchiveExchange, timeout_s: float
    ) -> None:
        if timeout_s <= 0:
            raise CompileCacheError(f"not within {self._settings.cache_wait_s:g} s")
        copy = await exchange.fetch(digest, timeout_s)
        try:
            if copy.manifest.digest != digest:
                raise CompileCacheError(f"{copy.manifest.digest} came in place of {digest}")
            count = await asyncio.to_thread(self._unpack, root, copy)
        except BaseException:
            copy.close()
            raise
        self._copy, self.fetched = copy, digest
        log.info("a compile cache of %d files came from other workers", count)

    def _unpack(self, root: CompileCacheRoot, copy: StoredCopy) -> int:
        count = unpack_copy(copy, root.scratch(), root.files, self._settings.cache_bytes)
        root.fill(copy.manifest.digest)
        return count

    def _archive(self, root: CompileCacheRoot) -> StoredCopy:
        """The archive that was fetched if the engine has added no file, else a new one.

        So workers that compile nothing new all offer the same archive.
        """
        copy = self._copy
        if copy is not None and not any(map(_counts, self._added(root))):
            return copy
        settings = self._settings
        store = WeightStore(settings.directory, settings.max_bytes)
        new = store_archive(store, root.files, self._engine, settings.cache_bytes)
        root.succeed(new.manifest.digest)
        self._copy = new
        if copy is not None:
            copy.close()
        return new

    def _added(self, root: CompileCacheRoot) -> set[str]:
        return set(travelling_files(root.files)) - self._names

    def _close_root(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            root.close()


def _counts(name: str) -> bool:
    """False for an entry of the cache to which each start of vLLM adds one under another key."""
    return UNSTABLE not in name.split("/")


def _bytes(folder: Path, names: Iterable[str]) -> int:
    total = 0
    for name in names:
        with suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def default_directory() -> Path:
    """The folder of this user's compile caches."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvmesh" / "compiled"
