"""Thinking in the opaque form that clients of the Responses API keep and send back."""

import base64
import binascii
import zlib

PREFIX = "kvm1:"
MAX_BYTES = 4 << 20


def seal(thinking: str) -> str:
    """`encrypted_content`: compressed, not secret; clients must not need to read it."""
    return PREFIX + base64.b64encode(zlib.compress(thinking.encode(), 1)).decode()


def open_sealed(text: str | None) -> str:
    """What `seal` hid; empty for anything that is not ours."""
    if not text or not text.startswith(PREFIX):
        return ""
    try:
        raw = base64.b64decode(text[len(PREFIX) :], validate=True)
        return zlib.decompressobj().decompress(raw, MAX_BYTES).decode(errors="replace")
    except (binascii.Error, zlib.error):
        return ""
