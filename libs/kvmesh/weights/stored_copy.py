"""One copy of weights in the memory of a node, complete or on its way."""

import mmap
import os
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from kvmesh.weights.errors import StoreError, StoreFull, WeightsLost
from kvmesh.weights.locks import FileLock
from kvmesh.weights.manifest import Manifest, TensorEntry

MANIFEST, HAVE, USE_LOCK, FETCH_LOCK, KEEP, FILES = (
    "manifest",
    "have",
    "use.lock",
    "fetch.lock",
    "keep",
    "files",
)
ABSENT, HELD, COMING = 0, 1, 2  # of a chunk
POLL_S = 0.005
MAX_POLL_S = 0.05
REMOVED = ".removed-"
ORPHANED_S = 10.0  # within which another process of the node takes a fetch over


class StoredCopy:
    """A copy that this process uses until `close`; nobody removes it before.

    `folder` holds the files under their own names: once the copy is `complete`, it can be read as
    a folder of safetensors files.
    """

    def __init__(self, folder: Path, manifest: Manifest, use: FileLock) -> None:
        """Raises OSError, or StoreError if the folder does not match the manifest."""
        self.manifest = manifest
        self.root = folder
        self.folder = folder / FILES
        self._use = use
        self._fetch: FileLock | None = None
        self._complete = False
        self._maps: dict[tuple[int, bool], mmap.mmap] = {}
        with (folder / HAVE).open("r+b") as file:
            self._have = mmap.mmap(file.fileno(), 0)
        if len(self._have) != len(manifest.chunks):
            raise StoreError(f"{folder} is damaged: it lists {len(self._have)} chunks")

    @property
    def complete(self) -> bool:
        """True once every chunk is present."""
        if not self._complete:
            self._complete = self.present == len(self._have)
        return self._complete

    @property
    def present(self) -> int:
        """The number of chunks that are there."""
        return self._have[:].count(HELD)

    @property
    def keep(self) -> bool:
        """True if the copy stays when nobody uses it."""
        return (self.root / KEEP).exists()

    def set_keep(self) -> None:
        """Let the copy stay when nobody uses it."""
        with suppress(OSError):  # out of inodes: it is removed at the end
            (self.root / KEEP).touch(0o600)

    def has(self, chunk: int) -> bool:
        return self._have[chunk] == HELD

    def mark(self, chunk: int) -> None:
        """Declare a chunk present; its bytes are verified and in the file."""
        self._have[chunk] = HELD

    def expect(self, chunk: int, coming: bool = True) -> None:
        """Declare that a missing chunk is being fetched, or that it is not any more."""
        if self._have[chunk] != HELD:
            self._have[chunk] = COMING if coming else ABSENT

    @property
    def have(self) -> mmap.mmap:
        """One byte per chunk, HELD if it is present; changes as chunks arrive."""
        return self._have

    def file(self, index: int, writable: bool = False) -> mmap.mmap:
        """The memory of a file, shared with all processes that use the copy."""
        known = self._maps.get((index, writable))
        if known is None:
            path = self.folder / self.manifest.files[index].name
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            with path.open("r+b" if writable else "rb") as file:
                known = mmap.mmap(file.fileno(), 0, access=access)
            self._maps[index, writable] = known
        return known

    def write(self, chunk: int, data: memoryview) -> None:
        """Write the bytes of a chunk; raises StoreFull.

        It does so through the file: a process that writes to mapped memory which is not there
        would be killed.
        """
        index, offset, _ = self.manifest.chunks[chunk]
        path = self.folder / self.manifest.files[index].name
        try:
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(file, data[done:], offset + done)
            finally:
                os.close(file)
        except OSError as error:
            raise StoreFull(f"{path}: {error.strerror}") from error

    def tensor(self, entry: TensorEntry) -> memoryview:
        """The bytes of a tensor, read-only; valid while this process uses the copy."""
        return memoryview(self.file(entry.file))[entry.offset : entry.offset + entry.size]

    def fetch(self) -> bool:
        """Become the one process that fetches missing chunks; False if another one does."""
        if self._fetch is None:
            lock = FileLock(self.root / FETCH_LOCK)
            if not lock.take():
                lock.close()
                return False
            self._fetch = lock
            chunk = self._have.find(bytes([COMING]))  # to a process that has died
            while chunk >= 0:
                self._have[chunk] = ABSENT
                chunk = self._have.find(bytes([COMING]), chunk)
        return True

    def end_fetch(self) -> None:
        """Let another process fetch what is missing."""
        lock, self._fetch = self._fetch, None
        if lock is not None:
            lock.close()

    @property
    def fetched(self) -> bool:
        """True if a process, this one included, fetches missing chunks now."""
        if self._fetch is not None:
            return True
        with FileLock(self.root / FETCH_LOCK) as lock:
            return not lock.share()

    def wait(self, chunks: Collection[int], timeout: float) -> None:
        """Return once all these chunks are present; blocks.

        Raises WeightsLost if no chunk of the copy arrives for `timeout` seconds, or if no process
        fetches it any more and none takes over in ORPHANED_S seconds.
        """
        missing = [chunk for chunk in chunks if not self.has(chunk)]
        present, arrived_at, fetched_at, poll = -1, time.monotonic(), time.monotonic(), POLL_S
        while missing:
            time.sleep(poll)
            poll = min(poll * 1.5, MAX_POLL_S)
            missing = [chunk for chunk in missing if not self.has(chunk)]
            now, count = time.monotonic(), self.present
            if count != present:
                present, arrived_at, fetched_at, poll = count, now, now, POLL_S
            elif now - arrived_at > timeout:
                raise WeightsLost(f"no chunk has arrived for {timeout:g} s")
            elif now - fetched_at > ORPHANED_S:
                if not self.fetched and missing:
                    raise WeightsLost("no process fetches the missing chunks")
                fetched_at = now

    def close(self) -> None:
        """End the use; the last user of a copy that is not kept removes it.

        Views of its memory must have ended; those of an engine that keeps tensors in it may not,
        and their memory is freed with them.
        """
        self.end_fetch()
        for memory in (*self._maps.values(), self._have):
            with suppress(BufferError):
                memory.close()
        self._maps.clear()
        self._use.close()  # first, so that of several users that end at once one is the last
        if not self.keep:
            with suppress(OSError):
                remove_unused(self.root)


def remove_unused(folder: Path) -> bool:
    """Remove a copy, at once for others; False if a process uses it. Raises OSError."""
    with FileLock(folder / USE_LOCK) as use:
        if not use.take():
            return False
        hidden = folder.with_name(f"{REMOVED}{secrets.token_hex(8)}")
        folder.rename(hidden)
        remove_tree(hidden)
        return True


def disk_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return found


def remove_tree(folder: Path) -> None:
    """Remove a folder of the store with its files; raises OSError."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()
    folder.rmdir()
