"""The latest failed start of each worker, for observers, once its process has ended.

It is stored beside the leases: the server's permissions bind a worker to the keys of its own name.
It ends after FAILED_S, or when a worker of that name joins.
"""

import logging
import time
from contextlib import suppress
from math import isfinite

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import FAILED_S, keep
from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.messages import FailedStart, MessageDecoder, Role, encode
from kvmesh.bus.storage.buckets import read_messages
from kvmesh.bus.streams.reader import StreamMessage
from kvmesh.bus.subjects import FAILED, name_of

log = logging.getLogger(__name__)
MOST_ERROR = 1000  # characters
_decoder = MessageDecoder(FailedStart)


async def record_failed_start(bus: Bus, failed: FailedStart) -> None:
    """Store a failed start in the place of an earlier one; logs it if NATS does not take it."""
    key = bus.subjects.failed_start_key(name_of(failed.instance))
    data = encode(msgspec.structs.replace(failed, error=failed.error[:MOST_ERROR]))
    try:
        await keep(bus, key, data)
    except BusError as error:
        log.debug("observers do not learn of the failed start: %s", cause(error))


async def forget_failed_start(bus: Bus, name: str) -> None:
    """The worker of that name has joined."""
    bucket, key = bus.bucket(bus.subjects.instances_bucket), bus.subjects.failed_start_key(name)
    with suppress(BusError):
        try:
            await bucket.get(key)
        except NotFound:
            return
        await bucket.delete(key)


async def failed_starts(bus: Bus) -> list[FailedStart]:
    """The latest failed starts by name, without unreadable ones; raises BusError."""
    keys = f"{Role.WORKER}.*.{FAILED}"
    stored: dict[str, bytes] = {}

    def add(key: str, message: StreamMessage) -> None:
        if message.time > time.time() - FAILED_S:  # frontends delete an older one some time
            stored[key] = message.data

    await read_messages(bus, bus.subjects.instances_bucket, keys, add)
    found = []
    for key, data in stored.items():
        if not data:  # deleted
            continue
        try:
            failed = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            log.debug("ignored a failed start at %s: %s", key, error)
            continue
        finite = isfinite(failed.started) and isfinite(failed.failed)
        if finite and key == bus.subjects.failed_start_key(name_of(failed.instance)):
            found.append(failed)
    return sorted(found, key=lambda failed: failed.instance)
