"""Temporary folders that are removed even if their process is killed.

Each folder holds a lock file, and the kernel releases its lock when the process dies. The next
ScratchFolder finds folders with a free lock and removes them.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

PREFIX = "kvmesh-worker-"
LOCK = "lock"


class ScratchFolder:
    """A new folder at `path`, until `close`."""

    def __init__(self) -> None:
        """Create the folder; raises OSError."""
        for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
            with suppress(OSError):  # the process lives, or belongs to another user
                _remove_dead(lock)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        new = self.path / f"{LOCK}.new"
        self._lock: int | None = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)  # visible only once it is locked

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _remove_dead(lock: Path) -> None:
    """Remove a folder whose lock is free; raises OSError if it is not."""
    if lock.parent.lstat().st_uid != os.getuid():
        return
    file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent)
    finally:
        os.close(file)
