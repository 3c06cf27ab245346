"""Secrets shared by the processes of a mesh: configured, or created by the first to need them."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, BusTimeout, Conflict, JetStreamUnavailable, NotFound, cause

log = logging.getLogger(__name__)
PATIENCE_S = 30.0  # a cluster elects a leader in a few seconds; a request waits 10 s for a reply
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0
# A cluster raises these while it elects leaders. NotFound: it refuses to create a key whose first
# value is being stored, and which cannot be read yet.
_TRANSIENT = (BusTimeout, JetStreamUnavailable, NotFound)


class SecretUnusable(BusError):
    """The configured or stored secret is invalid or unreadable.

    `configured`: the setting is at fault.
    """

    def __init__(self, reason: str, configured: bool = False) -> None:
        super().__init__(reason)
        self.configured = configured


def parse_secret(text: str, size: int, setting: str) -> bytes:
    """Decode a configured secret of `size` bytes in hexadecimal; raises SecretUnusable."""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != size:
        raise SecretUnusable(f"{setting} must be {2 * size} hexadecimal digits", configured=True)
    return secret


async def _nothing() -> None:
    """For buckets that exist already."""


async def shared_secret(
    bus: Bus,
    bucket: str,
    name: str,
    size: int,
    make_bucket: Callable[[], Awaitable[None]] = _nothing,
    patience_s: float = PATIENCE_S,
) -> bytes:
    """The `size` bytes under `name`, created at random if missing.

    Retries for `patience_s` seconds while JetStream is not ready. Raises SecretUnusable.
    """
    backoff, reason = Backoff(FIRST_DELAY_S, MAX_DELAY_S), ""
    mine = secrets.token_bytes(size)
    try:
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    await make_bucket()
                    value = await _create_or_get(bus, bucket, name, mine)
                    break
                except _TRANSIENT as error:
                    if not reason:
                        log.warning(
                            "cannot read the secret %s yet, retrying: %s", name, cause(error)
                        )
                    reason = cause(error)
                await asyncio.sleep(backoff.delay())
    except TimeoutError as error:
        why = f"not within {patience_s:g} s: {reason or 'JetStream does not reply'}"
        raise _unusable(bucket, name, f"cannot be read {why}") from error
    except BusError as error:
        raise _unusable(bucket, name, f"cannot be read: {cause(error)}") from error
    if len(value) != size:
        raise _unusable(bucket, name, f"has {len(value)} bytes, not {size}")
    return value


async def _create_or_get(bus: Bus, bucket: str, name: str, value: bytes) -> bytes:
    """Store `value` under `name` unless a value exists; returns the stored one."""
    stored = await bus.js.key_value(bucket)
    with suppress(Conflict):  # another process was first, or this one and the reply was lost
        await stored.create(name, value)
    return (await stored.get(name)).value or b""


def _unusable(bucket: str, name: str, reason: str) -> SecretUnusable:
    return SecretUnusable(f"the secret {name} in bucket {bucket} {reason}")
