"""A worker's view of the shared memory of its node's kvbm, and the lock that shows it is alive."""

import fcntl
import mmap
import os
from pathlib import Path

from kvmesh.blocks.errors import ArenaUnusable, LockTaken

WORKER_LOCKS = "worker-*.lock"


class ArenaView:
    """Maps `size` bytes of the file at `path`; raises ArenaUnusable.

    The mapping outlives the file: views stay valid after the kvbm has ended.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._map = _map(path, size)

    def view(self, offset: int, size: int) -> memoryview:
        """Return writable bytes of the arena without a copy; ValueError if out of range."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"{size} bytes at {offset} are not within {self.size}")
        return memoryview(self._map)[offset : offset + size]

    def close(self) -> None:
        """Unmap now, or when the last remaining view is deleted."""
        try:
            self._map.close()
        except BufferError:
            del self._map


class LivenessLock:
    """Holds an exclusive lock on a file until `close` or the end of this process.

    Raises LockTaken, or OSError if the file cannot be created.
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
        """Remove the file and release the lock."""
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
