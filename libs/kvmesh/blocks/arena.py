"""The memory that the workers of a node share with its kvbm, as a worker sees it."""

import fcntl
import mmap
import os
from pathlib import Path

from kvmesh.blocks.errors import ArenaUnusable, LockTaken

WORKER_LOCKS = "worker-*.lock"


class ArenaView:
    """A mapping of `size` bytes of the file at `path`; raises ArenaUnusable.

    The mapping outlives the file: who has views of it may go on when its owner has gone.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._map = _map(path, size)

    def view(self, offset: int, size: int) -> memoryview:
        """Writable bytes of the arena, not copied; ValueError if they are not within it."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"{size} bytes at {offset} are not within {self.size}")
        return memoryview(self._map)[offset : offset + size]

    def close(self) -> None:
        """Unmap, or have the last view that somebody still holds do so when it goes."""
        try:
            self._map.close()
        except BufferError:
            del self._map


class LivenessLock:
    """An exclusive lock on a file, held until `close` or the death of this process.

    Raises LockTaken, or OSError if the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise LockTaken(path) from None

    def close(self) -> None:
        """Remove the file and let go of it."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaUnusable(path, error.strerror or str(error)) from error
    try:
        held = os.fstat(file).st_size
        if held < size:
            raise ArenaUnusable(path, f"it has {held} bytes, not {size}")
        return mmap.mmap(file, size)
    except (OSError, ValueError) as error:
        raise ArenaUnusable(path, str(error)) from error
    finally:
        os.close(file)
