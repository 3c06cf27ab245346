"""Content codings of request bodies: gzip, deflate and zstd, decoded in bounded steps. Pure."""

import zlib
from collections.abc import Iterable
from typing import Protocol

import zstandard

from kvmesh.frontend.errors import ApiError, InvalidRequest, UnsupportedCoding
from kvmesh.frontend.fair_threads import Steps

ACCEPTED = ("gzip", "deflate", "zstd")
SYNONYMS = {"x-gzip": "gzip"}
# Input of one call of a decoder, whose output has at most 1,032 (zlib) or 32,768 times its size.
ZLIB_SLICE = 1 << 10
ZSTD_SLICE = 1 << 6
ZSTD_WINDOW = 8 << 20  # the largest that RFC 9659 allows for content codings
STEP_BYTES = 256 << 10  # input and output of one step
MAX_MEMBERS = 1 << 10  # of one body: each costs a decoder
WITH_GZIP_HEADER = 16 + zlib.MAX_WBITS


class Decoder(Protocol):
    """A decoder of one member, as those of zlib and zstandard are."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def coding_of(headers: Iterable[str]) -> str | None:
    """The coding that `Content-Encoding` names, None for plain bodies.

    Raises UnsupportedCoding for one that is not in `ACCEPTED`, and for several.
    """
    named = [name.strip().lower() for header in headers for name in header.split(",")]
    codings = [SYNONYMS.get(name, name) for name in named if name not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in ACCEPTED:
        raise UnsupportedCoding(", ".join(codings), ACCEPTED)
    return codings[0]


def decode_steps(body: bytes, coding: str, limit: int) -> Steps[bytes]:
    """The decoded body, of at most `limit` bytes.

    Bodies in gzip and zstd may have several members, which are decoded one after the other. Each
    step decodes some `STEP_BYTES`. Raises ApiError (413), or InvalidRequest for a body that is
    malformed, cut, or goes on behind its end.
    """
    decoder, size = _decoder(coding, body)
    parts, decoded, done, at, members = [], 0, 0, 0, 1
    try:
        while at < len(body):
            if decoder.eof:
                if coding == "deflate" or members == MAX_MEMBERS:
                    raise _goes_on(coding)
                decoder, size = _decoder(coding, body)
                members += 1
            piece = body[at : at + size]
            part = decoder.decompress(piece)
            at += len(piece) - len(decoder.unused_data)
            parts.append(part)
            decoded += len(part)
            if decoded > limit:
                raise ApiError("too_large", f"The decoded body is larger than {limit} bytes.")
            done += size + len(part)
            if done >= STEP_BYTES:
                done = 0
                yield
    except (zlib.error, zstandard.ZstdError):
        if members > 1:
            raise _goes_on(coding) from None
        raise InvalidRequest(f"The body is not valid {coding} data.") from None
    if not decoder.eof:
        raise InvalidRequest(f"The {coding} data of the body is cut.")
    return b"".join(parts)


def _goes_on(coding: str) -> InvalidRequest:
    return InvalidRequest(f"The body goes on behind the end of its {coding} data.")


def _decoder(coding: str, body: bytes) -> tuple[Decoder, int]:
    """A decoder, and the input of one call of it."""
    if coding == "zstd":
        return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj(), ZSTD_SLICE
    if coding == "gzip":
        return zlib.decompressobj(WITH_GZIP_HEADER), ZLIB_SLICE
    # some senders leave out the zlib header that the coding requires
    has_header = body[:1] and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS), ZLIB_SLICE
