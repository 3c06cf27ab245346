"""Packs: several messages of the route stream that are stored and delivered as one.

A pack is a zstd frame of a msgpack array of messages. No message begins like one: msgpack has a
number there. Readers of the stream get its messages one by one, as if they had been stored so.
"""

from collections.abc import Iterator, Sequence

import msgspec
import zstandard

MAGIC = zstandard.FRAME_HEADER
PACKED_BYTES = 256 << 10  # of messages in a pack; a larger message is sent alone
LEAST = 2
MAX_BYTES = 1 << 20  # of a pack that a reader unpacks
_compress = zstandard.ZstdCompressor(level=1).compress
_decompress = zstandard.ZstdDecompressor().decompress
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
EMPTY = _compress(_encode([]))  # no message: every reader passes over it


def packed(messages: Sequence[bytes]) -> Iterator[bytes]:
    """The messages as few packs, in order; a lone message stays as it is."""
    group: list[bytes] = []
    size = 0
    for message in messages:
        if group and size + len(message) > PACKED_BYTES:
            yield _pack(group)
            group, size = [], 0
        group.append(message)
        size += len(message)
    if group:
        yield _pack(group)


def unpacked(data: bytes) -> Sequence[bytes]:
    """The messages of a pack; `data` itself if it is none, or a malformed one."""
    if not data.startswith(MAGIC):
        return (data,)
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_BYTES:
            return (data,)
        return [bytes(each) for each in _decode(_decompress(data))]
    except (zstandard.ZstdError, msgspec.MsgspecError):
        return (data,)


def _pack(group: list[bytes]) -> bytes:
    if len(group) < LEAST:
        return group[0]
    return _compress(_encode([msgspec.Raw(each) for each in group]))
