"""Pull of a model from the mesh into a folder of this machine."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    JetStreamUnavailable,
    NotConnected,
    cause,
)
from kvmesh.runtime.quantities import size
from kvmesh.weights.errors import ManifestError, ModelStoreError
from kvmesh.weights.frames import STORE
from kvmesh.weights.locks import FileLock
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.models.cache import ModelPlace
from kvmesh.weights.models.catalog import ModelEntry
from kvmesh.weights.models.folder import weights_of
from kvmesh.weights.models.staging import StagedWeights, is_verified, left_over, write_verified
from kvmesh.weights.models.store import ModelStore
from kvmesh.weights.models.store_reader import StoreReader
from kvmesh.weights.process.fetching import WeightFetch
from kvmesh.weights.process.manifests import ManifestStore
from kvmesh.weights.process.search import REPLY_S, SourceSearch
from kvmesh.weights.stream import FetchOptions

LOCK = "pull.lock"
LOOK_S = 0.5
LOCKED_S = 3600.0  # within which another process of the machine ends its own pull
TRIES, FIRST_DELAY_S, MAX_DELAY_S = 5, 0.5, 8.0  # of a server that pauses
PATIENCE_S = 60.0  # without a chunk


@dataclass
class PullReport:
    """Bytes by source, an instance or "store", and seconds; `progress` gets bytes done and all."""

    reference: str
    sources: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    progress: Callable[[int, int], None] = field(default=lambda _done, _total: None, repr=False)


class ModelPull:
    """Takes the files of one entry into a place; one that was broken off goes on where it was."""

    def __init__(self, bus: Bus, entry: ModelEntry, manifest: Manifest, sources: int) -> None:
        """`manifest` is that of the folder; `sources` bounds the workers that are asked at once."""
        self._bus = bus
        self._entry = entry
        self._manifest = manifest
        self._options = FetchOptions(sources=sources)
        self._store = ModelStore(bus)
        self.report = PullReport(entry.reference)

    async def small_files(self, place: ModelPlace) -> None:
        """Have all files but the weights. Raises ModelStoreError or another WeightsError."""
        await self._run(place, whole=False)

    async def everything(self, place: ModelPlace) -> PullReport:
        """Have all files; weights come from workers of the mesh, and from the store.

        Raises ModelStoreError or another WeightsError.
        """
        await self._run(place, whole=True)
        return self.report

    async def _run(self, place: ModelPlace, whole: bool) -> None:
        began = time.monotonic()
        try:
            weights = await self._weights()
            async with _alone(place):
                mine = weights_of(self._manifest, weights) if weights is not None else []
                if mine is None:
                    raise ModelStoreError(f"the weights of {self._entry.reference} are others")
                for index in range(len(self._manifest.files)):
                    if index not in mine:
                        await self._file(place, index)
                if whole and weights is not None:
                    await self._fetch(place, weights)
        except BusError as error:
            reason = f"cannot pull {self._entry.reference}: {cause(error)}"
            raise ModelStoreError(reason) from error
        except OSError as error:
            raise ModelStoreError(f"cannot write {place.folder}: {error.strerror}") from error
        self.report.seconds = time.monotonic() - began

    async def _weights(self) -> Manifest | None:
        if not self._entry.weights:
            return None
        try:
            return await ManifestStore(self._bus).get(self._entry.weights)
        except ManifestError as error:
            raise ModelStoreError(f"{self._entry.reference}: {error}; push it again") from error

    async def _file(self, place: ModelPlace, index: int) -> None:
        """Have a small file, from the store."""
        manifest, entry = self._manifest, self._manifest.files[index]
        path = place.folder / entry.name
        path.parent.mkdir(exist_ok=True)
        if await asyncio.to_thread(_usable, place, path, manifest, index):
            return
        new = place.root / f"new-{secrets.token_hex(8)}"
        try:
            with new.open("xb") as file:
                for number in manifest.file_chunks(index):
                    target = bytearray(manifest.chunks[number].size)
                    digest = manifest.chunk_digest(number)
                    await self._chunk(digest, memoryview(target))
                    await asyncio.to_thread(file.write, target)
            await asyncio.to_thread(write_verified, new, path, manifest, index)
        finally:
            new.unlink(missing_ok=True)
        self.report.sources[STORE] += entry.size

    async def _chunk(self, digest: bytes, target: memoryview) -> None:
        """Read a chunk of the store, again if the server pauses."""
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        for _ in range(TRIES - 1):
            try:
                await self._store.chunk(digest, target)
            except (BusTimeout, NotConnected, JetStreamUnavailable):
                await asyncio.sleep(backoff.delay())
            else:
                return
        await self._store.chunk(digest, target)

    async def _fetch(self, place: ModelPlace, weights: Manifest) -> None:
        """Have the files of the weights."""
        present = [
            index
            for index, file in enumerate(weights.files)
            if await asyncio.to_thread(_usable, place, place.folder / file.name, weights, index)
        ]
        if len(present) == len(weights.files):
            return
        staging = await asyncio.to_thread(StagedWeights, place, weights, present)
        try:
            if not staging.copy.complete:
                await self._fill(staging, weights)
            await asyncio.to_thread(staging.install)
        finally:
            await asyncio.to_thread(staging.close)

    async def _fill(self, staging: StagedWeights, weights: Manifest) -> None:
        """Fetch what is missing in the copy; raises WeightsLost."""
        reader = f"pull-{secrets.token_hex(4)}"
        search = SourceSearch(self._bus, weights, reader, lambda offer: fetch.offer(offer))
        fetch = WeightFetch(staging.copy, self._options, reader, search.ask)
        await search.open()
        showing = asyncio.create_task(self._show(fetch, weights.size))
        try:
            await search.ask(lambda: fetch.peers > 0, REPLY_S)
            fetch.add_store(StoreReader(self._bus, weights))
            await fetch.run(PATIENCE_S)
        finally:
            showing.cancel()
            await search.close()
            self.report.sources.update(fetch.taken)

    async def _show(self, fetch: WeightFetch, total: int) -> None:
        while True:
            self.report.progress(fetch.taken.total(), total)
            await asyncio.sleep(LOOK_S)


def pulled_text(report: PullReport) -> str:
    """One line about a pull."""
    if not report.sources:
        return f"{report.reference} was there"
    total = report.sources.total()
    parts = ", ".join(f"{name} {size(count)}" for name, count in sorted(report.sources.items()))
    return f"pulled {report.reference}: {size(total)} in {report.seconds:.1f} s ({parts})"


def _usable(place: ModelPlace, path: Path, manifest: Manifest, index: int) -> bool:
    """True if a file is there, as the manifest says; raises ModelStoreError for a user's other."""
    if not path.exists():
        return False
    if is_verified(path, manifest, index):
        return True
    if not place.cached:
        raise ModelStoreError(f"{path} is another file: move it, or choose another folder")
    return False


@asynccontextmanager
async def _alone(place: ModelPlace) -> AsyncIterator[None]:
    """Only one process of the machine fills a place at a time."""
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place.root / LOCK)
    try:
        async with asyncio.timeout(LOCKED_S):
            while not lock.take():
                await asyncio.sleep(LOOK_S)
                if not (place.root / LOCK).exists():  # the other one has ended, with its root
                    lock.close()
                    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                    lock = FileLock(place.root / LOCK)
    except TimeoutError as error:
        lock.close()
        raise ModelStoreError(f"another process fills {place.folder} for {LOCKED_S:g} s") from error
    try:
        for left in place.root.glob("new-*"):
            left.unlink(missing_ok=True)
        yield
    finally:
        if not place.cached and not left_over(place):
            with suppress(OSError):
                (place.root / LOCK).unlink()
                place.root.rmdir()
        lock.close()


def other_folder(folder: Path) -> ModelPlace:
    """A place in a folder of the user's choice."""
    return ModelPlace(folder / ".kvmesh-pull", folder)
