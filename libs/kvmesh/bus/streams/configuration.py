"""The JetStream streams and buckets of a mesh: creation and limits.

The first process creates them. Later processes do not change them, whatever their settings; only
`apply`, run by a command, does. Reasons for each configuration: docs/adr/0021.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConfig,
    StreamInfo,
)

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.api_errors import TOO_MANY_CONSUMERS
from kvmesh.bus.errors import (
    BusError,
    Conflict,
    JetStreamError,
    NotFound,
    NotPermitted,
    ServerUnfit,
    cause,
)
from kvmesh.bus.streams.server_check import explained_refusal

MEMORY = StorageType.MEMORY
# Records have their own ids, by which readers detect repeats, and no `Nats-Msg-Id`. JetStream's
# duplicate window, which cannot be zero, is therefore unused.
UNUSED_WINDOW_S = 1.0
# Every process of a mesh watches the instances; nats-server 2.15 permits only 1,000 consumers of a
# stream that states no number.
MAX_WATCHERS = 100_000


class StreamMissing(BusError):
    """A stream is missing that this process is not permitted to create."""


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of the streams, in bytes and seconds. A lease lasts `lease_s` without renewal."""

    kv_bytes: int = 4 << 30
    kv_age_s: float = 24 * 3600.0
    route_bytes: int = 2 << 30
    route_age_s: float = 24 * 3600.0
    seq_bytes: int = 64 << 20
    seq_age_s: float = 3600.0
    scaling_bytes: int = 64 << 20
    scaling_age_s: float = 30 * 24 * 3600.0
    models_bytes: int = 16 << 30
    lease_s: float = 10.0


class Difference(NamedTuple):
    """A stream's limit that differs from this process's setting, which `setting` names."""

    stream: str
    limit: str
    has: float
    wanted: float
    setting: str

    def __str__(self) -> str:
        has, wanted = f"{self.has:.15g}", f"{self.wanted:.15g}"
        return f"{self.stream} has {self.limit} {has}, {self.setting} is {wanted}"


@dataclass(frozen=True)
class StreamSpec:
    """A stream as this process would create it: its limits, each with the name of its setting.

    One without `create` is made anew if it is lost, but not for the first time.
    """

    name: str
    limits: dict[str, tuple[float, str]]
    create: Callable[[], Awaitable[object]] | None

    def differences(self, has: StreamConfig) -> list[Difference]:
        return [
            Difference(self.name, limit, getattr(has, limit) or 0, wanted, setting)
            for limit, (wanted, setting) in self.limits.items()
            if (getattr(has, limit) or 0) != wanted
        ]


async def ensure_streams(bus: Bus, limits: StreamLimits | None = None) -> list[Difference]:
    """Create missing streams and buckets; safe to call from every process.

    From then on they are among `bus.specs`, as are the buckets that parts of the process have
    declared before. Returns the differences of existing ones from `limits`. Raises ServerUnfit if
    the server lacks space.
    """
    expect_streams(bus, limits or StreamLimits())
    specs = [each for each in bus.specs.values() if each.create is not None]
    present = await asyncio.gather(*(ensure_stream(bus, wanted) for wanted in specs))
    found = (wanted.differences(has) for wanted, has in zip(specs, present, strict=True))
    return [difference for each in found for difference in each]


def expect_streams(bus: Bus, limits: StreamLimits) -> None:
    """Have the streams and buckets that every process needs among `bus.specs`."""
    bus.specs.update({wanted.name: wanted for wanted in _specs(bus, limits)})


def differences(bus: Bus, limits: StreamLimits, streams: Iterable[StreamInfo]) -> list[Difference]:
    """The differences of existing streams and buckets of the mesh from `limits`."""
    wanted = {each.name: each for each in [*_specs(bus, limits), _model_store(bus, limits)]}
    found: list[Difference] = []
    for info in streams:
        name = info.config.name or ""
        each = wanted.get(name) or StreamSpec(name, replica_limit(bus), None)
        found += each.differences(info.config)
    return found


async def apply(bus: Bus, changes: list[Difference]) -> dict[str, str]:
    """Change the limits of streams; the server drops the oldest messages beyond them.

    Returns the reasons why it refused changes, by stream.
    """
    refused: dict[str, str] = {}
    for name in dict.fromkeys(change.stream for change in changes):
        config = (await bus.js.stream_info(name)).config
        new = {change.limit: change.wanted for change in changes if change.stream == name}
        if config.duplicate_window > (age := new.get("max_age", 0)) > 0:
            new["duplicate_window"] = age  # it may not be longer
        try:
            async with explained_refusal(bus, name, new.get("max_bytes", 0)):
                await bus.js.update_stream(config.evolve(**new))
        except (JetStreamError, ServerUnfit) as error:
            refused[name] = cause(error)
    return refused


def needed_streams(bus: Bus) -> list[str]:
    """The names of the streams that every mesh has, including those of its buckets."""
    return [each.name for each in _specs(bus, StreamLimits())]


async def mesh_streams(bus: Bus) -> list[StreamInfo]:
    """Every stream of this mesh, including those of its buckets, sorted by name."""
    infos = [info for info in await bus.js.streams_info() if bus.subjects.owns(info.config.name)]
    return sorted(infos, key=lambda info: info.config.name or "")


async def ensure_stream(bus: Bus, wanted: StreamSpec) -> StreamConfig:
    """The configuration of a stream, created if missing; raises as `ensure_streams` does."""
    try:
        return (await bus.js.stream_info(wanted.name)).config
    except NotFound:
        pass
    missing = StreamMissing(
        f"stream {wanted.name} is missing, and only frontends and operators may create it"
    )
    if not bus.may_create(wanted.name):
        raise missing
    size, _ = wanted.limits.get("max_bytes", (0, ""))
    try:
        async with explained_refusal(bus, wanted.name, size):
            if wanted.create is not None:
                await wanted.create()
    except NotPermitted:
        raise missing from None
    except Conflict:
        pass  # another process was first
    return (await bus.js.stream_info(wanted.name)).config


def _specs(bus: Bus, limits: StreamLimits) -> list[StreamSpec]:
    return [*_streams(bus, limits), _instances(bus, limits), *_buckets(bus)]


def replica_limit(bus: Bus) -> dict[str, tuple[float, str]]:
    return {"num_replicas": (bus.options.replicas, "nats.replicas")}


def _streams(bus: Bus, limits: StreamLimits) -> list[StreamSpec]:
    names, file = bus.subjects, StorageType.FILE
    kinds = [
        ("kv", names.kv_stream, names.kv_all, limits.kv_bytes, limits.kv_age_s, file),
        (
            "route",
            names.route_stream,
            names.route_all,
            limits.route_bytes,
            limits.route_age_s,
            file,
        ),
        # active sequences: worthless once the server that held them is gone
        ("seq", names.seq_stream, names.seq_all, limits.seq_bytes, limits.seq_age_s, MEMORY),
        (
            "scaling",
            names.scaling_stream,
            names.scaling_all,
            limits.scaling_bytes,
            limits.scaling_age_s,
            file,
        ),
    ]
    return [_stream(bus, *kind) for kind in kinds]


def _stream(
    bus: Bus, kind: str, name: str, subject: str, size: int, age: float, storage: StorageType
) -> StreamSpec:
    config = StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_bytes=size,
        max_age=age,
        storage=storage,
        num_replicas=bus.options.replicas,
        duplicate_window=UNUSED_WINDOW_S,
        compression=StoreCompression.S2 if storage is StorageType.FILE else None,
    )
    limits = {
        "max_bytes": (size, f"streams.{kind}_bytes"),
        "max_age": (age, f"streams.{kind}_age_s"),
    }
    return StreamSpec(name, {**limits, **replica_limit(bus)}, lambda: bus.js.add_stream(config))


def _instances(bus: Bus, limits: StreamLimits) -> StreamSpec:
    """The bucket of cards; nats-py's own creation of buckets does not set `max_consumers`."""
    bucket = bus.subjects.instances_bucket
    config = StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        max_consumers=MAX_WATCHERS,
        max_msgs_per_subject=1,
        max_age=limits.lease_s,
        duplicate_window=min(limits.lease_s, UNUSED_WINDOW_S),
        discard=DiscardPolicy.NEW,
        deny_delete=True,
        allow_rollup_hdrs=True,
        allow_direct=False,
        allow_msg_ttl=True,
        subject_delete_marker_ttl=max(limits.lease_s, 1.0),
        storage=MEMORY,
        num_replicas=bus.options.replicas,
    )

    async def create() -> None:
        try:
            await bus.js.add_stream(config)
        except JetStreamError as error:
            if error.err_code != TOO_MANY_CONSUMERS:
                raise
            await bus.js.add_stream(replace(config, max_consumers=-1))  # the account permits fewer

    # its TTL is not among the limits: processes read it from the bucket when they connect
    return StreamSpec(f"KV_{bucket}", replica_limit(bus), create)


def _buckets(bus: Bus) -> list[StreamSpec]:
    names, replicas, js = bus.subjects, bus.options.replicas, bus.js

    def values(name: str) -> StreamSpec:
        config = KeyValueConfig(bucket=name, replicas=replicas)
        return StreamSpec(f"KV_{name}", replica_limit(bus), lambda: js.create_key_value(config))

    def objects(name: str) -> StreamSpec:
        config = ObjectStoreConfig(bucket=name, replicas=replicas)
        return StreamSpec(
            f"OBJ_{name}", replica_limit(bus), lambda: js.create_object_store(name, config=config)
        )

    once = write_once(names.weights_bucket, replicas)
    return [
        StreamSpec(once.name or "", replica_limit(bus), lambda: js.add_stream(once)),
        values(names.router_bucket),
        values(names.kvbm_bucket),
        values(names.plan_bucket),
        objects(names.index_bucket),
        objects(names.model_bucket),
    ]


def _model_store(bus: Bus, limits: StreamLimits) -> StreamSpec:
    return object_store(
        bus, bus.subjects.model_store_bucket, limits.models_bytes, "streams.models_bytes"
    )


def object_store(
    bus: Bus, bucket: str, max_bytes: int, setting: str, max_age: float = 0.0
) -> StreamSpec:
    """An object store that refuses what exceeds `max_bytes`, the value of that setting.

    It keeps its objects for `max_age` seconds; 0: until they are removed.
    """
    config = StreamConfig(
        name=f"OBJ_{bucket}",
        subjects=[f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        max_bytes=max_bytes,
        max_age=max_age,
        discard=DiscardPolicy.NEW,
        allow_rollup_hdrs=True,
        allow_direct=False,
        storage=StorageType.FILE,
        num_replicas=bus.options.replicas,
        duplicate_window=UNUSED_WINDOW_S,
    )
    bound = {"max_bytes": (max_bytes, setting)}
    return StreamSpec(
        config.name or "", {**bound, **replica_limit(bus)}, lambda: bus.js.add_stream(config)
    )


async def ensure_model_store(bus: Bus, limits: StreamLimits) -> None:
    """Create the model store and its catalog if missing; raises BusError.

    A server sets the store's whole size aside, so no process creates it before it is used.
    """
    catalog = KeyValueConfig(bucket=bus.subjects.catalog_bucket, replicas=bus.options.replicas)
    await ensure_stream(bus, _model_store(bus, limits))
    await bus.js.create_key_value(catalog)


def write_once(bucket: str, replicas: int) -> StreamConfig:
    """The stream of a bucket whose entries cannot be replaced or deleted."""
    return StreamConfig(
        name=f"KV_{bucket}",
        subjects=[f"$KV.{bucket}.>"],
        deny_delete=True,
        deny_purge=True,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        max_msgs_per_subject=1,
        num_replicas=replicas,
        storage=StorageType.FILE,
    )


async def purge_states(bus: Bus) -> None:
    """Empty the streams and delete the index snapshots, as far as they exist."""
    subjects = bus.subjects
    streams = (subjects.kv_stream, subjects.route_stream, subjects.seq_stream)
    for stream in (*streams, subjects.scaling_stream):
        with contextlib.suppress(NotFound):
            await bus.js.purge_stream(stream)
    with contextlib.suppress(NotFound):
        await bus.js.delete_object_store(subjects.index_bucket)
