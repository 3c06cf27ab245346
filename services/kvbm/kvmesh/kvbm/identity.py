"""The secret under which blocks are named: configured, or made once by the first kvbm of a mesh."""

import secrets
from contextlib import suppress

from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from kvmesh.blocks.identity import KEY_BYTES
from kvmesh.bus.client import Bus
from kvmesh.kvbm.core.errors import KvbmError


class KeyUnusable(KvbmError):
    """The configured or stored key is not one."""


def parse_key(text: str) -> bytes:
    """A key as it is configured: hexadecimal. Raises KeyUnusable."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyUnusable(f"kvbm.key must be {2 * KEY_BYTES} hexadecimal digits")
    return key


async def shared_key(bus: Bus) -> bytes:
    """The mesh's key; whoever comes first makes it. Raises KeyUnusable."""
    bucket = await bus.js.key_value(bus.subjects.kvbm_bucket)
    name = bus.subjects.identity_key
    with suppress(KeyWrongLastSequenceError):  # somebody else was first
        await bucket.create(name, secrets.token_bytes(KEY_BYTES))
    try:
        value = (await bucket.get(name)).value or b""
    except KeyNotFoundError:
        value = b""
    if len(value) != KEY_BYTES:
        raise KeyUnusable(f"the key in bucket {bus.subjects.kvbm_bucket} has {len(value)} bytes")
    return value
