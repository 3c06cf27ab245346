"""The JetStream streams and buckets of a mesh: their limits, and how they come to exist."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from nats.errors import Error as NatsError
from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConfig,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError

from kvmesh.bus.client import Bus
from kvmesh.bus.direct import PermissionDenied

log = logging.getLogger(__name__)
MADE_S = 60.0
LOOK_S = 0.5
STREAM_EXISTS = 10058  # JetStream API error "stream name already in use" (other configuration)


class NotThere(NatsError):
    """A stream is missing that only other processes may make."""


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of the streams, in bytes and seconds. A lease lasts `lease_s` without renewal."""

    kv_bytes: int = 4 << 30
    kv_age_s: float = 24 * 3600.0
    route_bytes: int = 2 << 30
    route_age_s: float = 24 * 3600.0
    seq_bytes: int = 256 << 20
    seq_age_s: float = 3600.0
    lease_s: float = 10.0


async def ensure_streams(bus: Bus, limits: StreamLimits | None = None) -> None:
    """Create what is missing and bring limits up to date; safe to call from every process."""
    limits = limits or StreamLimits()
    subjects = bus.subjects
    for config in _stream_configs(bus, limits):
        await _there(bus, str(config.name), _ensure_stream(bus, config))
    instances = subjects.instances_bucket
    await _there(bus, f"KV_{instances}", _ensure_instances(bus, limits))
    for bucket in (subjects.router_bucket, subjects.kvbm_bucket):
        await _there(bus, f"KV_{bucket}", _ensure_bucket(bus, bucket))
    for bucket in (subjects.index_bucket, subjects.model_bucket):
        await _there(bus, f"OBJ_{bucket}", _ensure_objects(bus, bucket))


async def _there(bus: Bus, stream: str, making: Coroutine[Any, Any, None]) -> None:
    """Have a stream made, or wait until a process has made it that may.

    Raises NotThere if none does.
    """
    try:
        await making
    except PermissionDenied:
        await _appears(bus, stream)


async def _appears(bus: Bus, stream: str) -> None:
    told = False
    try:
        async with asyncio.timeout(MADE_S):
            while True:
                with contextlib.suppress(NotFoundError):
                    await bus.js.stream_info(stream)
                    return
                if not told:
                    told = True
                    log.info("waiting for a frontend or an operator to make stream %s", stream)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise NotThere(
            f"there is no stream {stream}, and this process may not make it: start a frontend"
        ) from None


def _stream_configs(bus: Bus, limits: StreamLimits) -> list[StreamConfig]:
    subjects = bus.subjects
    return [
        _stream(bus, subjects.kv_stream, subjects.kv_all, limits.kv_bytes, limits.kv_age_s),
        _stream(
            bus, subjects.route_stream, subjects.route_all, limits.route_bytes, limits.route_age_s
        ),
        _stream(
            bus,
            subjects.seq_stream,
            subjects.seq_all,
            limits.seq_bytes,
            limits.seq_age_s,
            StorageType.MEMORY,
        ),
    ]


def _stream(
    bus: Bus,
    name: str,
    subject: str,
    max_bytes: int,
    max_age: float,
    storage: StorageType = StorageType.FILE,
) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_bytes=max_bytes,
        max_age=max_age,
        storage=storage,
        num_replicas=bus.options.replicas,
        allow_direct=True,
        duplicate_window=1.0,
        compression=StoreCompression.S2 if storage is StorageType.FILE else None,
    )


async def _ensure_stream(bus: Bus, config: StreamConfig) -> None:
    try:
        await bus.js.add_stream(config)
    except BadRequestError as error:
        if error.err_code != STREAM_EXISTS:
            raise
        await bus.js.update_stream(config)


async def _ensure_instances(bus: Bus, limits: StreamLimits) -> None:
    config = KeyValueConfig(
        bucket=bus.subjects.instances_bucket,
        ttl=limits.lease_s,
        history=1,
        storage=StorageType.MEMORY,
        replicas=bus.options.replicas,
        limit_marker_ttl=max(limits.lease_s, 1.0),
    )
    try:
        await bus.js.create_key_value(config)
    except APIError as error:
        if error.err_code != STREAM_EXISTS:
            raise


async def _ensure_bucket(bus: Bus, bucket: str) -> None:
    config = KeyValueConfig(bucket=bucket, replicas=bus.options.replicas)
    try:
        await bus.js.create_key_value(config)
    except APIError as error:
        if error.err_code != STREAM_EXISTS:
            raise


async def _ensure_objects(bus: Bus, bucket: str) -> None:
    try:
        await bus.js.object_store(bucket)
    except NotFoundError:
        await bus.js.create_object_store(
            bucket, config=ObjectStoreConfig(bucket=bucket, replicas=bus.options.replicas)
        )


async def purge_states(bus: Bus) -> None:
    """Empty the streams and delete the index snapshots; what does not exist yet stays so."""
    subjects = bus.subjects
    for stream in (subjects.kv_stream, subjects.route_stream, subjects.seq_stream):
        with contextlib.suppress(NotFoundError):
            await bus.js.purge_stream(stream)
    with contextlib.suppress(NotFoundError):
        await bus.js.delete_object_store(subjects.index_bucket)
