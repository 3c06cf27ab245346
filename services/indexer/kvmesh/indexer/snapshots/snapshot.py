"""Format of an index snapshot; capturing it from and restoring it to the rank states.

    magic (8 bytes) | version (u16) | BLAKE2b-128 of the rest | zstd( length-prefixed messages )

The messages are msgpack: one RankImage per rank, then the Header. Ranks are captured one after
the other while events are applied: each image carries the next event id of its rank, so the
events between the covered stream sequence and the capture are recognised as duplicates when the
stream is replayed from there.
"""

import hashlib
import struct
from collections.abc import Iterator

import msgspec
import zstandard
from msgspec import Struct

from kvmesh.bus.messages import MessageDecoder
from kvmesh.index.interface import OverlapSegment
from kvmesh.indexer.decoding import EventSource
from kvmesh.indexer.rank_state import RankStates

MAGIC = b"kvmindex"
VERSION = 1
_PREFIX = struct.Struct("<8sH16s")
_LENGTH = struct.Struct("<I")
_WINDOW_LOG = 27


class SnapshotError(Exception):
    """An unusable snapshot."""


class ForeignSnapshot(SnapshotError):
    """Not a snapshot of this format version, stream or shard."""


class DamagedSnapshot(SnapshotError):
    """The content does not match its checksum, or is not a snapshot's."""


class Header(Struct, frozen=True, array_like=True, tag="header"):
    """The extent of a snapshot: the stream created at `stream`, up to sequence `covered`.

    `ignored` are instances whose events are skipped.
    """

    shard: str
    stream: str
    covered: int
    time: float
    ignored: list[str]


class RankImage(Struct, frozen=True, array_like=True, tag="rank"):
    """One rank: its source, next event id and blocks (none if unknown)."""

    model: str
    worker: str
    instance: str
    rank: int
    next: int
    known: bool
    segments: list[OverlapSegment]


_decoder: MessageDecoder[RankImage | Header] = MessageDecoder(RankImage | Header)
_encode = msgspec.msgpack.Encoder().encode


def capture(states: RankStates) -> Iterator[RankImage]:
    """An image of every present rank, each taken when the iterator reaches it."""
    for instance, number in states.rank_numbers():
        rank = states.rank(instance, number)
        source = states.source(instance)
        if rank is not None and source is not None:
            segments = states.index.dump(rank.slot) if rank.known else []
            yield RankImage(*source, instance, number, rank.next_event, rank.known, segments)


class Packer:
    """Builds a snapshot message by message, holding only the compressed form."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        # Long-distance matching finds the prompts that several ranks share.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, window_log=_WINDOW_LOG, enable_ldm=True
        )
        self._stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()

    def add(self, image: RankImage) -> None:
        self._write(_encode(image))

    def finish(self, header: Header) -> bytes:
        """Append the header, last because it holds for the time of the last capture; return all."""
        self._write(_encode(header))
        packed = b"".join((*self._parts, self._stream.flush()))
        return _PREFIX.pack(MAGIC, VERSION, _digest(packed)) + packed

    def _write(self, message: bytes) -> None:
        self._parts.append(self._stream.compress(_LENGTH.pack(len(message)) + message))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def check(data: bytes) -> None:
    """Raise ForeignSnapshot or DamagedSnapshot unless format, version and checksum are right."""
    if len(data) < _PREFIX.size:
        raise DamagedSnapshot(f"only {len(data)} bytes")
    magic, version, digest = _PREFIX.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ForeignSnapshot(f"format {magic!r} version {version}, not {MAGIC!r} {VERSION}")
    if _digest(memoryview(data)[_PREFIX.size :]) != digest:
        raise DamagedSnapshot("its checksum does not match its content")


def restore(states: RankStates, data: bytes, shard: str, stream: str) -> int:
    """Fill empty rank states from a snapshot; returns the covered stream sequence.

    Raises ForeignSnapshot or DamagedSnapshot; the caller must then reset the states.
    """
    check(data)
    try:
        for message in _messages(data):
            if isinstance(message, Header):
                return _finish(states, message, shard, stream)
            _load(states, message)
    except (zstandard.ZstdError, msgspec.MsgspecError, struct.error, ValueError) as error:
        raise DamagedSnapshot(f"{type(error).__name__}: {error}") from error
    raise DamagedSnapshot("it has no end")


def _messages(data: bytes) -> Iterator[RankImage | Header]:
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
    with unpacker.stream_reader(memoryview(data)[_PREFIX.size :]) as reader:
        while prefix := reader.read(_LENGTH.size):
            (length,) = _LENGTH.unpack(prefix)
            yield _decoder.decode(reader.read(length))


def _finish(states: RankStates, header: Header, shard: str, stream: str) -> int:
    if (header.shard, header.stream) != (shard, stream):
        raise ForeignSnapshot(f"of shard {header.shard!r} of a stream made {header.stream}")
    for instance in header.ignored:
        states.incarnations.ignore(instance)
    return header.covered


def _load(states: RankStates, image: RankImage) -> None:
    source = EventSource(image.model, image.worker)
    slot = states.adopt(source, image.instance, image.rank, image.next, image.known)
    states.index.load(slot, image.segments)
