"""Bytes that a push sends: of memory, or of a file that may change meanwhile."""

import os
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from kvmesh.weights.errors import CheckpointError


class BytesSource:
    """The bytes of an object that are in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def read(self, at: int, count: int) -> bytes:
        return self._data[at : at + count]

    def check(self) -> None: ...


class FileSource:
    """The bytes of a chunk in a file, verified when they have been read."""

    def __init__(self, path: Path, offset: int, digest: str) -> None:
        self._path = path
        self._offset = offset
        self._expected = digest
        self._digest = blake3()
        self._file = -1

    def __str__(self) -> str:
        return str(self._path)

    def __enter__(self) -> None:
        """Raises OSError."""
        self._digest = blake3()
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, at: int, count: int) -> bytes:
        data = os.pread(self._file, count, self._offset + at)
        self._digest.update(data)
        return data

    def check(self) -> None:
        """Raises CheckpointError unless the bytes are those of the digest."""
        if self._digest.hexdigest() != self._expected:
            raise CheckpointError(f"{self._path} changes while it is read")


ObjectSource: TypeAlias = BytesSource | FileSource
