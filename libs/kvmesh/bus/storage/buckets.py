"""Key-value buckets: reading a whole bucket, and creating the buckets of the frontends."""

from collections.abc import Callable
from contextlib import suppress

from nats.js.api import DiscardPolicy, KeyValueConfig, StorageType, StreamConfig
from nats.js.kv import KeyValue

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import Conflict
from kvmesh.bus.streams.configuration import write_once
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader

TIMEOUT_S = 10.0
OPERATION = "KV-Operation"  # header of a message that deletes a key
SIZE = "Nats-Msg-Size"


async def read_bucket(bus: Bus, bucket: str, keys: str = ">") -> dict[str, bytes]:
    """The values of all keys that match `keys`; raises BusError."""
    found: dict[str, bytes] = {}

    def add(key: str, message: StreamMessage) -> None:
        if message.data:  # a deleted key has none
            found[key] = message.data

    await _read(bus, bucket, keys, add, headers_only=False)
    return found


async def read_headers(bus: Bus, bucket: str, keys: str = ">") -> dict[str, dict[str, str]]:
    """The headers of all keys that match, oldest value first; values are not read.

    Raises as `read_bucket` does.
    """
    found: dict[str, dict[str, str]] = {}

    def add(key: str, message: StreamMessage) -> None:
        headers = message.headers or {}
        if OPERATION not in headers:
            found[key] = headers

    await _read(bus, bucket, keys, add, headers_only=True)
    return found


async def bucket_sizes(bus: Bus, bucket: str, keys: str = ">") -> dict[str, int]:
    """The sizes in bytes of the values whose keys match, oldest first; raises BusError."""
    headers = await read_headers(bus, bucket, keys)
    return {key: int(value[SIZE]) for key, value in headers.items() if SIZE in value}


async def _read(
    bus: Bus,
    bucket: str,
    keys: str,
    handler: Callable[[str, StreamMessage], None],
    headers_only: bool,
) -> None:
    """Read all entries. nats-py's own watch can report completion before its first entry."""
    prefix = f"$KV.{bucket}."
    start = Start(last_per_subject=True, headers_only=headers_only)

    def receive(message: StreamMessage) -> None:
        handler(message.subject.removeprefix(prefix), message)

    reader = StreamReader(bus, f"KV_{bucket}", f"{prefix}{keys}", receive, start)
    await reader.open()
    try:
        await reader.until_caught_up(TIMEOUT_S)
    finally:
        await reader.close()


async def keys_bucket(bus: Bus) -> Bucket:
    """The bucket of API keys, created if missing."""
    config = KeyValueConfig(bucket=bus.subjects.keys_bucket, replicas=bus.options.replicas)
    return await bus.js.create_key_value(config)


async def evicting_bucket(bus: Bus, bucket: str, ttl_s: float, max_bytes: int) -> Bucket:
    """A bucket, created if missing, that drops its oldest values when it is full.

    nats-py creates only buckets that refuse new values then.
    """
    name, prefix = f"KV_{bucket}", f"$KV.{bucket}."
    stream = StreamConfig(
        name=name,
        subjects=[f"{prefix}>"],
        allow_rollup_hdrs=True,
        deny_delete=True,
        discard=DiscardPolicy.OLD,
        max_age=ttl_s,
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        num_replicas=bus.options.replicas,
        storage=StorageType.FILE,
    )
    with suppress(Conflict):
        await bus.js.add_stream(stream)
    # an older release's bucket allows direct reads, which the server's users are not permitted
    return Bucket(KeyValue(bucket, name, prefix, bus.js.context, direct=False))


async def expiring_bucket(bus: Bus, bucket: str, ttl_s: float, max_bytes: int) -> Bucket:
    """A bucket on disk, created if missing, that refuses new values when it is full."""
    return await bus.js.create_key_value(
        KeyValueConfig(
            bucket=bucket,
            ttl=ttl_s,
            max_bytes=max_bytes,
            storage=StorageType.FILE,
            replicas=bus.options.replicas,
        )
    )


async def make_write_once_bucket(bus: Bus, bucket: str) -> None:
    """Create, if missing, a bucket whose entries cannot be replaced or deleted."""
    stream = write_once(bucket, bus.options.replicas)
    with suppress(Conflict):
        await bus.js.add_stream(stream)
