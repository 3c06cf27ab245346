"""The journal of the disk tier: records appended as blocks come and go, rewritten when stale.

Nothing is synced: after a crash of the machine a record may be missing or name a block that is not
there, which its checksum tells when it is loaded.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvmesh.blocks.digests import fingerprint
from kvmesh.kvbm.core.blocks.journal_record import Opened, Record

log = logging.getLogger(__name__)
NAME = "journal"
VERSION = 1
SUM_BYTES = 4
HEAD_BYTES = 4 + SUM_BYTES
_encode = msgspec.msgpack.Encoder().encode
_decoder: "msgspec.msgpack.Decoder[Record]" = msgspec.msgpack.Decoder(Record)


def opened(extent: int, key: bytes) -> Opened:
    """The first record; the key is told by its fingerprint."""
    return Opened(VERSION, extent, fingerprint(key))


class DiskJournal:
    """The file in `folder`. Blocking calls; OSError if the file cannot be written."""

    def __init__(self, folder: Path, first: Opened) -> None:
        self.path = folder / NAME
        self.first = first
        self.length = 0
        self._file = -1

    def read(self) -> list[Record]:
        """What was written, up to the first record that is not whole; nothing if it is not ours."""
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
        """Replace all that was written; raises OSError, and then goes on with the old file."""
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
        """Write more; raises OSError."""
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
    return len(body).to_bytes(4, "little") + _sum(body) + body


def records_in(data: bytes) -> Iterator[Record]:
    """What a journal with this content says, up to what is not whole."""
    at = 0
    while at + HEAD_BYTES <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        body = data[at + HEAD_BYTES : at + HEAD_BYTES + size]
        if len(body) < size or _sum(body) != data[at + 4 : at + HEAD_BYTES]:
            return
        try:
            yield _decoder.decode(body)
        except msgspec.MsgspecError:
            return
        at += HEAD_BYTES + size


def _sum(body: bytes) -> bytes:
    return blake2b(body, digest_size=SUM_BYTES).digest()
