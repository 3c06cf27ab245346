"""Archives of compile caches in the node's store of weights, and their offers on cards."""

import asyncio
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kvmesh.bus.messages import CompiledOffer, Instance
from kvmesh.settings.schema import WeightsSettings
from kvmesh.weights.client import WorkersProcess
from kvmesh.weights.errors import StoreError, WeightsLost
from kvmesh.weights.manifest import FileEntry, Manifest, chunk_digests
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.compiled.archive import archive_bound, pack, unpack
from kvmesh.worker.compiled.environment import CompileEnvironment
from kvmesh.worker.compiled.errors import CompileCacheError

ARCHIVE = "cache.tar"
MAX_TRIED = 3  # archives of one environment, at a start


class ArchiveExchange(Protocol):
    """Moves stored archives between nodes."""

    async def fetch(self, digest: str, timeout_s: float) -> StoredCopy:
        """The complete copy with this digest; raises WeightsError, also after `timeout_s`."""
        ...

    async def offer(self, copy: StoredCopy) -> None:
        """Serve a copy to other workers from now on; raises WeightsError."""
        ...


class ProcessExchange:
    """Lets a worker's weights process move archives in and out of the node's store."""

    def __init__(self, process: WorkersProcess, settings: WeightsSettings) -> None:
        self._process = process
        self._settings = settings

    async def fetch(self, digest: str, timeout_s: float) -> StoredCopy:
        await self._process.want_copy(digest, timeout_s)
        copy = await asyncio.to_thread(self._open, digest)
        if copy is None or not copy.complete:
            raise WeightsLost(f"the store has lost {digest}")
        return copy

    async def offer(self, copy: StoredCopy) -> None:
        await self._process.offer_copy(copy.manifest.digest)

    def withdraw(self, digest: str) -> None:
        """Serve a copy to other workers no more."""
        self._process.withdraw_copy(digest)

    def store(self) -> WeightStore:
        """The node's store; blocks, and raises StoreError."""
        return WeightStore(self._settings.directory, self._settings.max_bytes)

    def _open(self, digest: str) -> StoredCopy | None:
        return self.store().open(digest)


def offer_of(environment: CompileEnvironment, key: bytes, digest: str) -> CompiledOffer:
    """The offer of an archive by a worker that holds the domain's key."""
    return CompiledOffer(environment.label(key), digest, environment.mac(key, digest))


def offered_archives(
    cards: Iterable[Instance], environment: CompileEnvironment, key: bytes
) -> tuple[list[str], list[str]]:
    """Digests of archives on cards, of the oldest workers first, and instances with false proofs.

    Only those of this environment and domain count, the first MAX_TRIED.
    """
    label, found, false = environment.label(key), dict[str, None](), list[str]()
    for card in sorted(cards, key=lambda card: card.started):
        offer = card.compiled
        if offer is None or not hmac.compare_digest(offer.environment.encode(), label.encode()):
            continue
        if hmac.compare_digest(offer.mac.encode(), environment.mac(key, offer.archive).encode()):
            found[offer.archive] = None
        else:
            false.append(card.instance)
    return list(found)[:MAX_TRIED], false


def store_archive(store: WeightStore, root: Path, engine: str, max_bytes: int) -> StoredCopy:
    """Pack `root` into the store; raises CompileCacheError or StoreError."""
    bound = archive_bound(root)
    if bound > max_bytes:
        raise CompileCacheError(f"{root} holds more than {max_bytes} bytes")
    folder = store.scratch(bound)
    file = folder / ARCHIVE
    try:
        pack(root, file, max_bytes)
        manifest = Manifest(
            form="compiled",
            engine=engine,
            files=[FileEntry(ARCHIVE, file.stat().st_size)],
            tensors=[],
            digests=chunk_digests(file),
        )
        return store.adopt(manifest, folder)
    except OSError as error:
        raise StoreError(f"cannot store {file}: {error}") from error
    finally:
        store.discard(folder)


def unpack_copy(copy: StoredCopy, target: Path, home: Path, max_bytes: int) -> int:
    """Unpack a copy after verifying its digests again; returns the number of files.

    Raises CompileCacheError.
    """
    manifest = copy.manifest
    if manifest.form != "compiled" or [file.name for file in manifest.files] != [ARCHIVE]:
        raise CompileCacheError(f"{manifest.digest} is not an archive of compiled code")
    if manifest.size > max_bytes:
        raise CompileCacheError(f"an archive of {manifest.size} bytes")
    file = copy.folder / ARCHIVE
    try:
        if chunk_digests(file, manifest.chunk_bytes) != manifest.digests:
            raise CompileCacheError(f"the archive {manifest.digest} is damaged")
        with file.open("rb") as content:
            return unpack(content, target, home, max_bytes)
    except OSError as error:
        raise CompileCacheError(f"cannot read {file}: {error}") from error
