"""Thinking in the opaque form that clients of the Responses API keep and send back."""

import base64
import binascii
import zlib

PREFIX = "kvm1:"
MAX_BYTES = 16 << 20  # of one request


class SealedTooLong(Exception):
    """It holds more than may be opened."""


def seal(thinking: str) -> str:
    """`encrypted_content`: compressed, not secret; clients must not need to read it."""
    return PREFIX + base64.b64encode(zlib.compress(thinking.encode(), 1)).decode()


def open_sealed(text: str | None, most: int = MAX_BYTES) -> str:
    """What `seal` hid; empty for anything that is not ours. Raises SealedTooLong beyond `most`."""
    if not text or not text.startswith(PREFIX):
        return ""
    try:
        raw = base64.b64decode(text[len(PREFIX) :], validate=True)
        opened = zlib.decompressobj().decompress(raw, most + 1)
    except (binascii.Error, zlib.error):
        return ""
    if len(opened) > most:
        raise SealedTooLong
    return opened.decode(errors="replace")


class Sealed:
    """Opens what one request holds: all together are bounded, for zeros compress a thousandfold."""

    def __init__(self) -> None:
        self._left = MAX_BYTES

    def open(self, text: str | None) -> str:
        """Raises SealedTooLong."""
        opened = open_sealed(text, self._left)
        self._left -= len(opened)
        return opened
