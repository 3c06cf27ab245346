"""The model folders that this machine has taken from the mesh, one per digest."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvmesh.runtime.quantities import size
from kvmesh.weights.errors import ModelStoreError
from kvmesh.weights.locks import FileLock
from kvmesh.weights.stored_copy import (
    FILES,
    REMOVED,
    USE_LOCK,
    disk_bytes,
    remove_tree,
    remove_unused,
)

LOCK, NAME = "lock", "name"
LOCK_S = 30.0


class CachedModel(NamedTuple):
    """One model of the cache: NAME@DIGEST, bytes on the disk, and the Unix time of its last use."""

    reference: str
    digest: str
    size: int
    used_at: float


class ModelPlace:
    """A place for one model: `folder` for its files, `root` for what is on its way.

    A place of the cache is in use, and not removed, until `close`.
    """

    def __init__(self, root: Path, folder: Path, use: FileLock | None = None) -> None:
        self.root = root
        self.folder = folder
        self.cached = use is not None
        self._use = use

    def close(self) -> None:
        if self._use is not None:
            self._use.close()


def default_cache() -> Path:
    """The folder in which this user's processes keep models."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvmesh" / "models"


class ModelCache:
    """The models below `directory`, in at most `max_bytes`; all methods block.

    Models that no process uses make room for new ones, the least recently used first.
    """

    def __init__(self, directory: Path | None, max_bytes: int) -> None:
        self._directory = directory or default_cache()
        self._max_bytes = max_bytes

    def use(self, name: str, digest: str, count: int) -> ModelPlace:
        """The place of a model of which up to `count` bytes are going to be there.

        Raises ModelStoreError if they do not fit.
        """
        root = self._directory / digest
        try:
            with self._locked():
                present = disk_bytes(root)
                self._make_room(count - present, digest)
                (root / FILES).mkdir(mode=0o700, parents=True, exist_ok=True)
                (root / NAME).write_text(name)
                lock = FileLock(root / USE_LOCK)
                if not lock.share():
                    lock.close()
                    raise ModelStoreError(f"{root} is being removed")
                os.utime(root / USE_LOCK)
        except OSError as error:
            raise ModelStoreError(f"cannot use {root}: {error.strerror}") from error
        return ModelPlace(root, root / FILES, lock)

    def list(self) -> list[CachedModel]:
        """The models of the cache, the least recently used first."""
        found = []
        for lock in self._directory.glob(f"*/{USE_LOCK}"):
            root = lock.parent
            with suppress(OSError):
                reference = f"{(root / NAME).read_text()}@{root.name[:12]}"
                used_at = lock.stat().st_mtime
                found.append(CachedModel(reference, root.name, disk_bytes(root), used_at))
        return sorted(found, key=lambda model: model.used_at)

    def evict(self, digest: str) -> bool:
        """Remove a model; False if a process uses it. Raises ModelStoreError."""
        try:
            with self._locked():
                return self._evict(digest)
        except OSError as error:
            raise ModelStoreError(f"cannot remove {digest[:12]}: {error.strerror}") from error

    def _make_room(self, count: int, digest: str) -> None:
        for left in self._directory.glob(f"{REMOVED}*"):  # by a process that died meanwhile
            with suppress(OSError):
                remove_tree(left)
        models = self.list()
        used, unused = sum(m.size for m in models), [m for m in models if m.digest != digest]
        while count > 0 and (used + count > self._max_bytes or self._free() < count):
            if not unused:
                raise ModelStoreError(
                    f"{size(count)} do not fit into {self._directory}, which holds {size(used)}:"
                    f" weights.models_bytes is {size(self._max_bytes)}, the disk has"
                    f" {size(self._free())} left"
                )
            oldest = unused.pop(0)
            if self._evict(oldest.digest):
                used -= oldest.size

    def _evict(self, digest: str) -> bool:
        return remove_unused(self._directory / digest)

    def _free(self) -> int:
        found = os.statvfs(self._directory)
        return found.f_bavail * found.f_frsize

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process at a time changes the set of models."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._directory.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise ModelStoreError(f"others may write to {self._directory}: it is not used")
        with FileLock(self._directory / LOCK) as lock:
            if not lock.wait(LOCK_S):
                raise ModelStoreError(f"another process changes {self._directory}")
            yield
