"""One file of blocks on a local disk, read and written directly from and to arena memory.

The file grows by whole steps of reserved space, so that a full disk is detected before a block is
written. All calls block; several threads may make them at once.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from kvmesh.kvbm.core.errors import InUse, KvbmError

log = logging.getLogger(__name__)
LOCK = "lock"
BLOCKS = "blocks"
SMALLEST_STEP = 4 << 20
LARGEST_STEP = 256 << 20
STEPS = 16
VECTORS = 512
OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
RETRY_S = 300.0
Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]


class DiskError(KvbmError):
    """The disk tier is unusable; the message names path, cause and remedy."""


class DiskFull(KvbmError):
    """The file cannot grow beyond `usable` bytes."""

    def __init__(self, usable: int, reason: str) -> None:
        super().__init__(reason)
        self.usable = usable


class DiskFile:
    """`capacity` bytes in the folder `path`, locked until `close`.

    Leaves `spare` bytes of the file system free. Raises DiskError or InUse.
    """

    def __init__(self, path: Path, capacity: int, spare: int) -> None:
        self.path = path
        self.capacity = capacity
        self._step = min(LARGEST_STEP, max(SMALLEST_STEP, capacity // STEPS))
        self._spare = spare
        self._growing = Lock()
        self._refused = -RETRY_S
        self._lock = _locked(path)
        try:
            self._file, self.direct = _opened(path / BLOCKS)
            self.reserved = min(capacity, os.fstat(self._file).st_size)
            os.ftruncate(self._file, self.reserved)
            self.grow(1)
        except (OSError, DiskFull) as error:
            os.close(self._lock)
            raise DiskError(
                f"cannot store blocks in {path}: {error}; set kvbm.disk_path"
            ) from error

    def grow(self, end: int) -> None:
        """Reserve space for the first `end` bytes. Raises DiskFull."""
        with self._growing:
            while self.reserved < end:
                self._grow_a_step()

    def _grow_a_step(self) -> None:
        step = min(self._step, self.capacity - self.reserved)
        free = self._free()
        if free - step < self._spare:
            raise DiskFull(
                self.reserved, f"{free} bytes are free, {self._spare} of which must stay free"
            )
        try:
            os.posix_fallocate(self._file, self.reserved, step)
        except OSError as error:
            self._refused = time.monotonic()
            raise DiskFull(self.reserved, error.strerror or str(error)) from error
        self.reserved += step

    def _free(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def usable(self, size: int) -> int:
        """Bytes that the tier may use instead of its present `size`: fewer if free space is short.

        Grows by two steps or more, and not within RETRY_S of a failed reservation.
        """
        available = self._free() - self._spare
        if available < 0:
            return min(size, max(0, self.reserved + available) // self._step * self._step)
        if size == self.capacity or time.monotonic() < self._refused + RETRY_S:
            return size
        if self.reserved + available >= self.capacity:
            return self.capacity
        limit = (self.reserved + available) // self._step * self._step
        return limit if limit >= size + 2 * self._step else size

    def truncate(self, end: int) -> None:
        """Free the space reserved beyond the first `end` bytes; raises OSError."""
        with self._growing:
            if end < self.reserved:
                os.ftruncate(self._file, end)
                self.reserved = end

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write consecutive slots; raises DiskFull or OSError."""
        size = sum(view.nbytes for view in views)
        self.grow(offset + size)
        self._transfer(os.pwritev, offset, views)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Read consecutive slots; raises OSError."""
        self._transfer(os.preadv, offset, views)

    def _transfer(self, call: Transfer, offset: int, views: Sequence[memoryview]) -> None:
        left = list(views)
        while left:
            done = call(self._file, left[:VECTORS], offset)
            if not done:
                raise OSError(f"{self.path / BLOCKS} ends before {offset}")
            offset += done
            left = _skip(left, done)

    def close(self) -> None:
        with self._growing:
            os.close(self._file)
            self._file = -1
        os.close(self._lock)


def _skip(views: list[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


def _check_private(path: Path) -> None:
    """Prevent other users from replacing the files; raises DiskError or OSError."""
    trusted = (0, os.getuid())
    status = path.stat()
    if status.st_uid not in trusted or path.lstat().st_uid not in trusted:
        raise DiskError(f"{path} belongs to another user; set kvbm.disk_path")
    if not status.st_mode & 0o022:
        return
    if status.st_uid == os.getuid():
        path.chmod(status.st_mode & 0o7755)
        log.warning("others could write to %s: their write permission was removed", path)
    else:
        log.warning("others can write to %s: its files are verified, not trusted", path)


def _locked(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o600)
    except OSError as error:
        raise DiskError(f"cannot use {path}: {error.strerror}; set kvbm.disk_path") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise InUse(f"another kvbm uses {path}; set kvbm.disk_path") from None
        raise DiskError(f"cannot lock {path}: {error.strerror}; set kvbm.disk_path") from error
    return lock


def _opened(path: Path) -> tuple[int, bool]:
    """The file descriptor, and whether I/O bypasses the page cache."""
    flags = os.O_RDWR | os.O_CREAT | OPEN_FLAGS
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        log.info("%s has no direct I/O (%s): using the page cache", path, error.strerror)
        return os.open(path, flags, 0o600), False
