"""The arena: memory that a kvbm shares with the workers of its node, a file in their directory.

Each start creates a new file, so a worker that still maps the previous one cannot overwrite blocks
of others.
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
    """The arena cannot be created; the message names path, cause and remedy."""


class Arena:
    """A new mapped file of `size` bytes in `directory`; raises ArenaError. `close` removes it."""

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
                f"cannot reserve {size} bytes in {directory}: {error.strerror}"
            ) from error
        finally:
            os.close(file)

    @property
    def name(self) -> str:
        return self.path.name

    def view(self, offset: int, size: int) -> memoryview:
        """A writable view of the bytes."""
        return memoryview(self.map)[offset : offset + size]

    def close(self) -> None:
        """Remove the file; existing views keep its memory until they are released."""
        self.path.unlink(missing_ok=True)
        with suppress(BufferError):
            self.map.close()
