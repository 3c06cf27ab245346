"""Bytes on their way to or from the object store, in a temporary file."""

import mmap
import os
import tempfile

from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.storage.stored_object import StoredObject


class Spool:
    """A temporary file, which is gone when this is closed or its process ends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append; blocks no longer than the page cache does."""
        self._file.write(data)
        self.size += len(data)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), length, offset)

    async def fill(self, objects: ObjectBucket, found: StoredObject) -> None:
        """Read an object into this empty file; raises BusError."""
        if not found.size:
            return
        self._file.truncate(found.size)
        self.size = found.size
        with self.mapped(mmap.ACCESS_WRITE) as data, memoryview(data) as view:
            await objects.read(found, view)

    def mapped(self, access: int = mmap.ACCESS_READ) -> mmap.mmap:
        """The file in memory, to be closed; it must not be empty."""
        return mmap.mmap(self._file.fileno(), self.size, access=access)

    def clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self.size = 0

    def close(self) -> None:
        self._file.close()
