"""Locks on files that the kernel releases when their process dies."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

POLL_S = 0.01


class FileLock:
    """A lock on a file, created if missing; held until `close`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._file: int | None = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(self) -> bool:
        """Hold it together with others; False if one holds it alone or the file was removed."""
        return self._take(fcntl.LOCK_SH)

    def take(self) -> bool:
        """Hold it alone; False if any other holds it or the file was removed."""
        return self._take(fcntl.LOCK_EX)

    def wait(self, timeout: float) -> bool:
        """Hold it alone as soon as no other does; blocks, and returns False after `timeout` s."""
        deadline = time.monotonic() + timeout
        while not self.take():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def moved(self, path: Path) -> None:
        """The file is renamed to `path`."""
        self._path = path

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _take(self, kind: int) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return self._is_current()

    def _is_current(self) -> bool:
        with suppress(OSError):
            assert self._file is not None
            return os.fstat(self._file).st_ino == self._path.stat().st_ino
        return False
