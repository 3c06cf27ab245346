"""The memory that a kvbm shares with the workers of its node: one file in their directory.

Every start makes a new file: a worker that still has the one before cannot write into blocks that
are somebody else's now.
"""

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

from kvmesh.kvbm.core.errors import KvbmError

PREFIX = "arena-"
SPARE_BYTES = 16 << 20


class ArenaError(KvbmError):
    """The arena cannot be made; the message says where, why, and what to change."""


class Arena:
    """A new file of `size` bytes in `directory`, mapped; raises ArenaError. `close` removes it."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self.path = directory / f"{PREFIX}{secrets.token_hex(4)}"
        free = os.statvfs(directory)
        available = free.f_bavail * free.f_frsize
        if available < size + SPARE_BYTES:
            raise ArenaError(
                f"{directory} has {available} bytes free, kvbm.host_bytes is {size}: lower it, "
                "free some or set kvbm.directory to another memory file system"
            )
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            self.map = mmap.mmap(file, size)
        except OSError as error:
            self.path.unlink()
            raise ArenaError(
                f"cannot have {size} bytes in {directory}: {error.strerror}"
            ) from error
        finally:
            os.close(file)

    @property
    def name(self) -> str:
        return self.path.name

    def view(self, offset: int, size: int) -> memoryview:
        """Writable bytes, not copied."""
        return memoryview(self.map)[offset : offset + size]

    def close(self) -> None:
        """Remove the file; who still has a view keeps the memory for as long."""
        self.path.unlink(missing_ok=True)
        with suppress(BufferError):
            self.map.close()
