"""The secret under which tenants are told apart: configured, or made by the first frontend."""

import secrets
from contextlib import suppress

from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import cause
from kvmesh.bus.streams import STREAM_EXISTS
from kvmesh.frontend.tenants import KEY_BYTES


class SecretUnusable(Exception):
    """The configured or stored secret is not one, or it cannot be read.

    `configured`: it is the setting that is at fault.
    """

    def __init__(self, reason: str, configured: bool = False) -> None:
        super().__init__(reason)
        self.configured = configured


async def tenant_secret(bus: Bus, configured: str | None) -> bytes:
    """The mesh's secret; whoever comes first makes it. Raises SecretUnusable."""
    if configured is not None:
        return _parsed(configured)
    try:
        return await _shared(bus)
    except (NatsError, APIError, TimeoutError) as error:
        where = bus.subjects.secrets_bucket
        raise SecretUnusable(
            f"cannot read the secret of the tenants in bucket {where}: {cause(error)}"
        ) from error


def _parsed(text: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != KEY_BYTES:
        reason = f"frontend.tenant_secret must be {2 * KEY_BYTES} hexadecimal digits"
        raise SecretUnusable(reason, configured=True)
    return secret


async def _shared(bus: Bus) -> bytes:
    bucket, name = await _bucket(bus), bus.subjects.tenants_key
    with suppress(KeyWrongLastSequenceError):  # somebody else was first
        await bucket.create(name, secrets.token_bytes(KEY_BYTES))
    try:
        value = (await bucket.get(name)).value or b""
    except KeyNotFoundError:
        value = b""
    if len(value) != KEY_BYTES:
        reason = f"the secret of the tenants in bucket {bus.subjects.secrets_bucket} has"
        raise SecretUnusable(f"{reason} {len(value)} bytes")
    return value


async def _bucket(bus: Bus) -> KeyValue:
    name = bus.subjects.secrets_bucket
    try:
        return await bus.js.create_key_value(
            KeyValueConfig(bucket=name, storage=StorageType.FILE, replicas=bus.options.replicas)
        )
    except APIError as error:
        if error.err_code != STREAM_EXISTS:
            raise
    return await bus.js.key_value(name)
