"""Thinking in the opaque form that clients store and return.

In the Responses API it is `encrypted_content`, in the Messages API the signature of a thinking
block whose text is omitted.
"""

import base64
import binascii
import zlib

PREFIX = "kvm1:"
MAX_BYTES = 16 << 20  # decompressed, per request


class SealedTooLong(Exception):
    """The decompressed text exceeds the limit."""


def seal(thinking: str) -> str:
    """The sealed text: compressed, not secret; opaque to clients."""
    return PREFIX + base64.b64encode(zlib.compress(thinking.encode(), 1)).decode()


def open_sealed(text: str | None, max_bytes: int = MAX_BYTES) -> str:
    """The text given to `seal`; empty for other content. Raises SealedTooLong beyond the limit."""
    if not text or not text.startswith(PREFIX):
        return ""
    try:
        raw = base64.b64decode(text[len(PREFIX) :], validate=True)
        opened = zlib.decompressobj().decompress(raw, max_bytes + 1)
    except (binascii.Error, zlib.error):
        return ""
    if len(opened) > max_bytes:
        raise SealedTooLong
    return opened.decode(errors="replace")


class Sealed:
    """Opens the sealed reasoning of one request, bounded in total against compression bombs."""

    def __init__(self) -> None:
        self.bytes = 0  # opened so far

    def open(self, text: str | None) -> str:
        """Raises SealedTooLong."""
        opened = open_sealed(text, MAX_BYTES - self.bytes)
        self.bytes += len(opened.encode())
        return opened
