"""Secrets shared by the processes of a mesh: configured, or created by the first to need them."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf

import msgspec

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, BusTimeout, Conflict, JetStreamUnavailable, NotFound, cause
from kvmesh.bus.messages import Instance, MessageDecoder, Role
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.bus.streams.keeper import keeper_of

log = logging.getLogger(__name__)
PATIENCE_S = 30.0  # a cluster elects a leader in a few seconds; a request waits 10 s for a reply
HOLDERS_S = 15.0  # they look every 10 s; the lease of one that is gone lapses
SETTLED_S = 3.0  # for a server's clients to reconnect
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0
_cards = MessageDecoder(Instance)
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


async def shared_secret(
    bus: Bus,
    bucket: str,
    name: str,
    size: int,
    role: Role | None = None,
    patience_s: float = PATIENCE_S,
) -> bytes:
    """The `size` bytes under `name`, created at random if missing.

    Where processes of `role` keep the secret stored, a missing one may have been lost while they
    run: they are given the time to store it again. Retries for `patience_s` seconds while JetStream
    is not ready. Raises SecretUnusable.
    """
    backoff, reason = Backoff(FIRST_DELAY_S, MAX_DELAY_S), ""
    mine = secrets.token_bytes(size)
    try:
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    if role is not None:
                        await _await_holders(bus, bucket, name, role)
                    value = await create_or_get(bus, bucket, name, mine)
                    break
                except _TRANSIENT as error:
                    if not reason:
                        log.warning(
                            "cannot read the secret %s yet, retrying: %s", name, cause(error)
                        )
                    reason = cause(error)
                await asyncio.sleep(backoff.delay())
    except TimeoutError as error:
        why = f"within {patience_s:g} s: {reason or 'JetStream does not reply'}"
        raise _unusable(bucket, name, f"cannot be read {why}") from error
    except BusError as error:
        raise _unusable(bucket, name, f"cannot be read: {cause(error)}") from error
    if len(value) != size:
        raise _unusable(bucket, name, f"has {len(value)} bytes, not {size}")
    return value


def keep_secret(
    bus: Bus, bucket: str, name: str, value: bytes, adopt: Callable[[bytes], None]
) -> None:
    """Store a secret again whenever it is missing.

    If another value has been stored meanwhile, that one holds: all who keep the secret `adopt` it.
    """

    async def restore() -> None:
        nonlocal value
        stored = await create_or_get(bus, bucket, name, value)
        if stored != value and len(stored) == len(value):
            log.warning("the secret %s in bucket %s is another one now: using that", name, bucket)
            value = stored
            adopt(stored)

    keeper_of(bus).restore(f"the secret {name}", restore)


async def _await_holders(bus: Bus, bucket: str, name: str, role: Role) -> None:
    """Return once the secret is stored, or nobody seems to run who holds it.

    After its restart a server without its store knows no lease either until their owners have
    reconnected. Such a server is recognized by cards that are older than the bucket of cards, or by
    the time that this process itself had to wait for it.
    """
    loop = asyncio.get_running_loop()
    began, patient, instances = loop.time(), False, bus.subjects.instances_bucket
    while True:
        with suppress(NotFound):
            if (await bus.bucket(bucket).get(name)).value:
                return
        created = (await bus.js.stream_info(f"KV_{instances}")).created
        cards = await read_bucket(bus, instances)
        since = created.timestamp() if created is not None else 0.0
        young = bus.late or any(_started(card) < since for card in cards.values())
        holds = any(key.startswith(f"{role}.") for key in cards)
        if loop.time() - began >= (HOLDERS_S if holds else SETTLED_S if young else 0.0):
            return
        if not patient:
            log.info("the secret %s is missing: waiting for processes that may hold it", name)
        patient = True
        await asyncio.sleep(FIRST_DELAY_S)


def _started(card: bytes) -> float:
    """The time at which the process of a card joined, by the server's clock."""
    try:
        return _cards.decode(card).started
    except msgspec.MsgspecError:
        return inf


async def create_or_get(bus: Bus, bucket: str, name: str, value: bytes) -> bytes:
    """Store `value` under `name` unless a value exists; returns the stored one."""
    stored = bus.bucket(bucket)
    with suppress(NotFound):  # most often it is there, and a write costs the server more
        return (await stored.get(name)).value or b""
    await bus.using(partial(bus.js.key_value, bucket))
    with suppress(Conflict):  # another process was first, or this one and the reply was lost
        await stored.create(name, value)
    return (await stored.get(name)).value or b""


def _unusable(bucket: str, name: str, reason: str) -> SecretUnusable:
    return SecretUnusable(f"the secret {name} in bucket {bucket} {reason}")
