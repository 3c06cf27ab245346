"""The JetStream streams and buckets of a mesh: their limits, and how they come to exist."""

import contextlib
from dataclasses import dataclass

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

STREAM_EXISTS = 10058  # JetStream API error "stream name already in use" (other configuration)


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
    for config in _stream_configs(bus, limits):
        await _ensure_stream(bus, config)
    await _ensure_instances(bus, limits)
    await _ensure_router_bucket(bus)
    for bucket in (bus.subjects.index_bucket, bus.subjects.model_bucket):
        await _ensure_objects(bus, bucket)


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


async def _ensure_router_bucket(bus: Bus) -> None:
    config = KeyValueConfig(bucket=bus.subjects.router_bucket, replicas=bus.options.replicas)
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
