"""The copies of weights in the memory of a node, shared by the processes of one user."""

import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvmesh.weights.errors import ManifestError, StoreError, StoreFull
from kvmesh.weights.locks import FileLock
from kvmesh.weights.manifest import Manifest, decoded
from kvmesh.weights.stored_copy import (
    FETCH_LOCK,
    FILES,
    HAVE,
    HELD,
    KEEP,
    MANIFEST,
    REMOVED,
    USE_LOCK,
    StoredCopy,
    remove_tree,
    remove_unused,
)

log = logging.getLogger(__name__)
LOCK = "lock"
NEW, SCRATCH = ".new-", ".scratch-"
LOCK_S = 30.0
OPENINGS, OPENING_S = 3, 0.005  # a copy may be removed between finding and locking it


class WeightStore:
    """Copies below `directory`, in at most `max_bytes`; 0: half of the machine's memory."""

    def __init__(self, directory: Path, max_bytes: int = 0) -> None:
        """Create the directory if missing; raises StoreError if another user owns it."""
        self._directory = directory
        self._max_bytes = max_bytes or _half_of_memory()
        self._scratch: dict[Path, FileLock] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
        except OSError as error:
            raise StoreError(f"cannot use {directory}: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StoreError(f"{directory} is not a directory of this user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise StoreError(f"{directory} is open to other users: its mode must be 700")

    def create(self, manifest: Manifest) -> StoredCopy:
        """The copy of this content: the present one, or a new one without chunks.

        Raises StoreFull, or StoreError.
        """
        with self._locked():
            present = self._sound(manifest.digest)
            if present is not None:
                return present
            self._make_room(manifest.size)
            with self._new_folder() as new:
                files = new / FILES
                files.mkdir(0o700)
                for file in manifest.files:
                    _make_file(files / file.name, file.size)
                return self._install(new, manifest, bytes(len(manifest.chunks)))

    def adopt(self, manifest: Manifest, files: Path) -> StoredCopy:
        """Make a complete copy of a folder of this store, from `scratch`; it is moved.

        The manifest must describe its files. Raises StoreError.
        """
        with self._locked():
            present = self._sound(manifest.digest)
            if present is not None:
                _discard(files)
                self._end_scratch(files)
                return present
            with self._new_folder() as new:
                files.rename(new / FILES)
                self._end_scratch(files)
                return self._install(new, manifest, bytes([HELD]) * len(manifest.chunks))

    def scratch(self, size: int) -> Path:
        """A new folder for files of `size` bytes that `adopt` turns into a copy.

        One that is neither adopted nor discarded goes when its process has ended. Raises
        StoreFull, StoreError.
        """
        with self._locked():
            self._make_room(size)
            folder = self._directory / f"{SCRATCH}{secrets.token_hex(8)}"
            try:
                lock = FileLock(_scratch_lock(folder))
                folder.mkdir(0o700)
            except OSError as error:
                raise StoreError(f"cannot use {folder}: {error.strerror}") from error
            lock.take()
            self._scratch[folder] = lock
            return folder

    def discard(self, files: Path) -> None:
        """Remove a folder from `scratch` that is not going to be adopted, if it is there."""
        _discard(files)
        self._end_scratch(files)

    def open(self, digest: str) -> StoredCopy | None:
        """Use a copy; None if there is none. Raises StoreError if it cannot be read."""
        folder = self._directory / digest
        for _ in range(OPENINGS):
            if not (folder / USE_LOCK).exists():
                return None
            try:
                use = FileLock(folder / USE_LOCK)
            except FileNotFoundError:
                return None
            if use.share():
                return _opened(folder, use)
            use.close()
            time.sleep(OPENING_S)
        return None

    def list(self) -> list[Manifest]:
        """The manifests of all copies, the least recently used first."""
        found: list[tuple[float, Manifest]] = []
        for folder in _folders(self._directory):
            with suppress(OSError, ManifestError):
                found.append((_used_at(folder), _manifest(folder)))
        return [manifest for _, manifest in sorted(found, key=lambda pair: pair[0])]

    def evict(self, digest: str) -> bool:
        """Remove a copy; False if it is in use or absent."""
        folder = self._directory / digest
        return (folder / USE_LOCK).exists() and self._evict(folder)

    def fits(self, digest: str, size: int) -> bool:
        """True if the copy is there, or may be created with `size` bytes; raises StoreError."""
        with self._locked():
            folders = _folders(self._directory)
            if self._directory / digest in folders:
                return True
            unused = sum(_bytes(folder) for folder in folders if _is_unused(folder))
            used = self.used() - unused
            return used + size <= self._max_bytes and self._free() + unused >= size

    def sweep(self) -> None:
        """Remove what dead processes left: copies that were not to be kept, unfinished folders."""
        with self._locked():
            for folder in _folders(self._directory):
                if not (folder / KEEP).exists():
                    self._evict(folder)
            for pattern in (f"{NEW}*", f"{REMOVED}*"):  # made under the lock of the store
                for folder in self._directory.glob(pattern):
                    _discard(folder)
            for path in self._directory.glob(f"{LOCK}{SCRATCH}*"):
                with suppress(OSError), FileLock(path) as lock:
                    if lock.take():
                        _discard(path.with_name(path.name.removeprefix(LOCK)))
                        path.unlink()

    def _sound(self, digest: str) -> StoredCopy | None:
        """The present copy; one that is damaged makes way for another unless it is in use."""
        try:
            return self.open(digest)
        except StoreError:
            if not self.evict(digest):
                raise
            return None

    def _end_scratch(self, folder: Path) -> None:
        if (lock := self._scratch.pop(folder, None)) is not None:
            _scratch_lock(folder).unlink(missing_ok=True)
            lock.close()

    def _evict(self, folder: Path) -> bool:
        try:
            return remove_unused(folder)
        except FileNotFoundError:  # its last user has removed it
            return True
        except OSError as error:
            log.warning("cannot remove the weights in %s: %s", folder, error)
            return False

    def _make_room(self, size: int) -> None:
        """Evict unused copies, least recently used first, until `size` bytes fit."""
        if size > self._max_bytes:
            reason = f"{size} bytes of weights exceed weights.max_bytes, {self._max_bytes}"
            raise StoreFull(f"{self._directory}: {reason}")
        unused = sorted(_folders(self._directory), key=_used_at)
        while (used := self.used()) + size > self._max_bytes or self._free() < size:
            if not unused:
                room = min(self._max_bytes - used, self._free())
                reason = f"{size} bytes of weights do not fit into the {room} that are left"
                raise StoreFull(f"{self._directory}: {reason}; copies in use hold {used}")
            self._evict(unused.pop(0))

    def _free(self) -> int:
        """Bytes of memory without those that copies on their way are going to take."""
        found = os.statvfs(self._directory)
        awaited = sum(max(each.st_size - each.st_blocks * 512, 0) for each in self._files())
        return found.f_bavail * found.f_frsize - awaited

    def used(self) -> int:
        """Bytes of all copies, also of those on their way."""
        return sum(each.st_size for each in self._files())

    def _files(self) -> Iterator[os.stat_result]:
        for pattern in (f"[0-9a-f]*/{FILES}/*", f"{SCRATCH}*/*", f"{NEW}*/{FILES}/*"):
            for file in self._directory.glob(pattern):
                with suppress(FileNotFoundError):  # its last user has just removed it
                    yield file.stat()

    def _install(self, new: Path, manifest: Manifest, have: bytes) -> StoredCopy:
        """Complete a new folder and show it under its digest, in use by this process."""
        (new / MANIFEST).write_bytes(manifest.encoded())
        (new / HAVE).write_bytes(have)
        (new / FETCH_LOCK).touch(0o600)
        use = FileLock(new / USE_LOCK)
        use.share()
        folder = self._directory / manifest.digest
        use.moved(folder / USE_LOCK)
        new.rename(folder)
        return StoredCopy(folder, manifest, use)

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """A folder that is removed again if the block fails; raises StoreError."""
        folder = self._directory / f"{NEW}{secrets.token_hex(8)}"
        try:
            folder.mkdir(0o700)
            yield folder
        except StoreError:
            _discard(folder)
            raise
        except OSError as error:
            _discard(folder)
            raise StoreError(f"cannot store weights in {folder}: {error.strerror}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process at a time changes the set of copies."""
        try:
            lock = FileLock(self._directory / LOCK)
        except OSError as error:
            raise StoreError(f"cannot use {self._directory}: {error.strerror}") from error
        with lock:
            if not lock.wait(LOCK_S):
                raise StoreError(f"another process changes {self._directory} for {LOCK_S:g} s")
            yield


def _folders(directory: Path) -> list[Path]:
    return [each.parent for each in directory.glob(f"[0-9a-f]*/{USE_LOCK}")]


def _is_unused(folder: Path) -> bool:
    with suppress(OSError), FileLock(folder / USE_LOCK) as use:
        return use.take()
    return False


def _bytes(folder: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in (folder / FILES).iterdir())
    return 0


def _opened(folder: Path, use: FileLock) -> StoredCopy:
    try:
        os.utime(folder / USE_LOCK)
        return StoredCopy(folder, _manifest(folder), use)
    except (OSError, ManifestError, StoreError) as error:
        use.close()
        raise StoreError(f"cannot use the weights in {folder}: {error}") from error


def _manifest(folder: Path) -> Manifest:
    manifest = decoded((folder / MANIFEST).read_bytes())
    if manifest.digest != folder.name:
        raise ManifestError(f"the manifest in {folder} has the digest {manifest.digest}")
    return manifest


def _make_file(path: Path, size: int) -> None:
    """Make a file without memory; `StoredCopy.write` takes it for each chunk."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, size)
    finally:
        os.close(file)


def _used_at(folder: Path) -> float:
    with suppress(OSError):
        return (folder / USE_LOCK).stat().st_mtime
    return 0.0


def _discard(folder: Path) -> None:
    with suppress(OSError):
        remove_tree(folder)


def _scratch_lock(folder: Path) -> Path:
    """The lock that the process holds to which a scratch folder belongs."""
    return folder.with_name(f"{LOCK}{folder.name}")


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
