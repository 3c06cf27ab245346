"""Journal of the disk tier: appended as blocks are written and removed, rewritten when stale.

The journal is not synced: after a machine crash, records may be missing or name blocks that were
not written. Loading detects such blocks by their checksums.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvmesh.blocks.digests import fingerprint
from kvmesh.bus.messages import MessageDecoder
from kvmesh.kvbm.core.blocks.journal_record import Opened, Record

log = logging.getLogger(__name__)
NAME = "journal"
VERSION = 1
SUM_BYTES = 4
HEAD_BYTES = 4 + SUM_BYTES
_encode = msgspec.msgpack.Encoder().encode
_decoder: MessageDecoder[Record] = MessageDecoder(Record)


def opened(extent: int, key: bytes) -> Opened:
    """The first record, with the key's fingerprint."""
    return Opened(VERSION, extent, fingerprint(key))


class DiskJournal:
    """The file in `folder`. Calls block and raise OSError if the file cannot be written."""

    def __init__(self, folder: Path, first: Opened) -> None:
        self.path = folder / NAME
        self.first = first
        self.length = 0
        self._file = -1

    def read(self) -> list[Record]:
        """The records up to the first damaged one; none if another kvbm or key wrote them."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        records = list(records_in(data))
        found = records[0] if records else None
        if not isinstance(found, Opened) or replace(found, extent=self.first.extent) != self.first:
            log.warning("%s is of another kvbm or key: starting empty", self.path)
            return []
        return records

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace all records; on OSError the old file stays in use."""
        fresh = self.path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(fresh, flags, 0o600)
        try:
            count = _write(file, [self.first, *records])
            os.rename(fresh, self.path)
        except OSError:
            os.close(file)
            raise
        self.close()
        self._file, self.length = file, count

    def append(self, records: list[Record]) -> None:
        """Append records; raises OSError."""
        self.length += _write(self._file, records)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write(file: int, records: list[Record]) -> int:
    data = memoryview(b"".join(map(_framed, records)))
    while data:
        data = data[os.write(file, data) :]
    return len(records)


def _framed(record: Record) -> bytes:
    body = _encode(record)
    return len(body).to_bytes(4, "little") + _checksum(body) + body


def records_in(data: bytes) -> Iterator[Record]:
    """The records in a journal's bytes, up to the first damaged one."""
    start = 0
    while start + HEAD_BYTES <= len(data):
        size = int.from_bytes(data[start : start + 4], "little")
        body = data[start + HEAD_BYTES : start + HEAD_BYTES + size]
        if len(body) < size or _checksum(body) != data[start + 4 : start + HEAD_BYTES]:
            return
        try:
            yield _decoder.decode(body)
        except msgspec.MsgspecError:
            return
        start += HEAD_BYTES + size


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=SUM_BYTES).digest()
