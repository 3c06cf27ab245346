"""Remote store in a shared folder: a file per block, whose mtime is the start of its lease."""

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvmesh.bus.errors import cause
from kvmesh.kvbm.tiers.remote.interface import (
    MAX_NOTE_BYTES,
    NOTE_LENGTH_BYTES,
    RemoteBlock,
    RemoteError,
)

T = TypeVar("T")
THREADS = 4
SWEEP_TARGET = 0.9
STALE_WRITE_S = 600.0


class FolderStore:
    """At most about `capacity` bytes over all nodes: `tend` removes the oldest files beyond it.

    `timeout_s` bounds the wait for a call, as a network file system may hang. Raises RemoteError
    if the folder cannot be created or written. Files are accessible to their user only, with
    `group` also to the user's group.
    """

    def __init__(
        self, folder: Path, lease_s: float, timeout_s: float, capacity: int, group: bool = False
    ) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._folder_mode, self._file_mode = (0o770, 0o660) if group else (0o700, 0o600)
        self._threads = ThreadPoolExecutor(THREADS, "shared folder")
        self._idle = asyncio.Semaphore(THREADS)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._make(folder)
            os.close(self._create(folder / ".lock", os.O_RDONLY))
        except OSError as error:
            raise RemoteError("open", str(error)) from error

    async def find(self, digests: Sequence[bytes]) -> int:
        return await self._run("find", lambda: self._find(digests))

    async def put(self, blocks: Sequence[RemoteBlock]) -> None:
        await self._run("put", lambda: self._write(blocks))

    async def get(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bytes | None]:
        return await self._run("get", lambda: list(map(self._read, digests, into)))

    async def drop(self, digests: Sequence[bytes]) -> None:
        await self._run("drop", lambda: self._unlink(digests))

    async def is_empty(self) -> bool:
        return await self._run("look", lambda: not any(self._folder.glob("??/*")))

    async def tend(self) -> None:
        await self._run("tend", self._sweep)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, operation: str, call: Callable[[], T]) -> T:
        """Run a call in a free thread; it is not queued, with its buffers, behind hanging calls."""
        freed = partial(_release, self._idle, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._idle.acquire()
                job = self._threads.submit(call)
                job.add_done_callback(freed)
                return await asyncio.wrap_future(job)
        except (OSError, TimeoutError) as error:
            raise RemoteError(operation, cause(error)) from error

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name

    def _find(self, digests: Sequence[bytes]) -> int:
        oldest = time.time() - self._lease_s
        for i, digest in enumerate(digests):
            path = self._path(digest)
            try:
                if path.stat().st_mtime < oldest:
                    return i
                os.utime(path)
            except FileNotFoundError:
                return i
        return len(digests)

    def _unlink(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._path(digest).unlink(missing_ok=True)

    def _write(self, blocks: Sequence[RemoteBlock]) -> None:
        for block in blocks:
            self._write_one(block)

    def _write_one(self, block: RemoteBlock) -> None:
        path = self._path(block.digest)
        if path.exists():
            return
        self._make(path.parent)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        length = len(block.note).to_bytes(NOTE_LENGTH_BYTES, "little")
        try:
            with os.fdopen(self._create(draft, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.writelines((length, block.note, block.content))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _make(self, folder: Path) -> None:
        with suppress(FileExistsError):
            folder.mkdir(0o700)
            folder.chmod(self._folder_mode)

    def _create(self, path: Path, flags: int) -> int:
        """Open a file; create it if missing, with the store's mode regardless of the umask."""
        try:
            fresh = flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(path, fresh, 0o600)
            os.fchmod(file, self._file_mode)
        except FileExistsError:
            file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        return file

    def _read(self, digest: bytes, into: memoryview) -> bytes | None:
        with suppress(FileNotFoundError), self._path(digest).open("rb", buffering=0) as file:
            length = int.from_bytes(file.read(NOTE_LENGTH_BYTES), "little")
            size = os.fstat(file.fileno()).st_size
            if length < MAX_NOTE_BYTES and size == NOTE_LENGTH_BYTES + length + into.nbytes:
                note = file.read(length)
                return note if _read_full(file.fileno(), into) else None
        return None

    def _sweep(self) -> None:
        """Remove expired files, then the oldest; one node sweeps at a time."""
        with self._exclusive() as exclusive:
            if not exclusive:
                return
            now = time.time()
            files = sorted(self._files())
            excess = sum(size for _, size, _ in files) - self._capacity
            if excess > 0:
                excess += int((1 - SWEEP_TARGET) * self._capacity)
            for modified, size, path in files:
                lease_s = STALE_WRITE_S if path.name.startswith(".") else self._lease_s
                if excess <= 0 and now - modified < lease_s:
                    continue
                path.unlink(missing_ok=True)
                excess -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._folder.glob("??/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        with (self._folder / ".lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                yield False
            else:
                yield True


def _release(idle: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _: object) -> None:
    with suppress(RuntimeError):  # the loop may end before the call
        loop.call_soon_threadsafe(idle.release)


def _read_full(descriptor: int, into: memoryview) -> bool:
    done = 0
    while done < into.nbytes:
        count = os.readv(descriptor, [into[done:]])
        if not count:
            return False
        done += count
    return True
