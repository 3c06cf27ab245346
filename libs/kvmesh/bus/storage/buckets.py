"""Key-value buckets: reading a whole bucket, and declaring the buckets of the frontends."""

from collections.abc import Callable
from contextlib import suppress

from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import Conflict, NotFound, NotPermitted
from kvmesh.bus.streams.configuration import ensure_stream, write_once
from kvmesh.bus.streams.keeper import declare, keeper_of
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.subjects import stored_on

TIMEOUT_S = 10.0
NATS_WINDOW_S = 120.0
OPERATION = "KV-Operation"  # header of a message that deletes a key
SIZE = "Nats-Msg-Size"


def keys_reader(
    bus: Bus,
    bucket: str,
    keys: str,
    handler: Callable[[StreamMessage], None],
    on_recreated: Callable[[], None] | None = None,
) -> StreamReader:
    """A reader of the last message of each key that matches `keys`, and of those that follow."""
    subject = stored_on(bucket, keys)
    start = Start(last_per_subject=True)
    return StreamReader(bus, f"KV_{bucket}", subject, handler, start, on_recreated)


async def read_bucket(bus: Bus, bucket: str, keys: str = ">") -> dict[str, bytes]:
    """The values of all keys that match `keys`; raises BusError."""
    found: dict[str, bytes] = {}

    def add(key: str, message: StreamMessage) -> None:
        if message.data:  # a deleted key has none
            found[key] = message.data

    await read_messages(bus, bucket, keys, add)
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

    await read_messages(bus, bucket, keys, add, headers_only=True)
    return found


async def bucket_sizes(bus: Bus, bucket: str, keys: str = ">") -> dict[str, int]:
    """The sizes in bytes of the values whose keys match, oldest first; raises BusError."""
    headers = await read_headers(bus, bucket, keys)
    return {key: int(value[SIZE]) for key, value in headers.items() if SIZE in value}


async def read_messages(
    bus: Bus,
    bucket: str,
    keys: str,
    handler: Callable[[str, StreamMessage], None],
    headers_only: bool = False,
) -> None:
    """Read the last message of each key that matches; raises BusError.

    nats-py's own watch can report completion before its first entry.
    """
    prefix = stored_on(bucket, "")
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
    """The bucket of API keys, created if missing; raises BusError."""
    name = bus.subjects.keys_bucket
    bucket = expiring_bucket(bus, name, ttl_s=0.0, max_bytes=-1)
    await ensure_stream(bus, bus.specs[f"KV_{name}"])
    return bucket


def expiring_bucket(bus: Bus, bucket: str, ttl_s: float, max_bytes: int) -> Bucket:
    """A bucket on disk, made whenever it is missing, that refuses new values when it is full."""
    # as nats-py makes it, with which earlier releases make it: another configuration is refused
    config = _on_disk(bus, bucket, DiscardPolicy.NEW, ttl_s, max_bytes)
    window = min(ttl_s, NATS_WINDOW_S) if ttl_s else NATS_WINDOW_S
    declare(bus, config.evolve(allow_msg_ttl=True, duplicate_window=window))
    return bus.bucket(bucket)


def evicting_bucket(bus: Bus, bucket: str, ttl_s: float, max_bytes: int) -> Bucket:
    """As `expiring_bucket`, but it drops its oldest values when it is full."""
    declare(bus, _on_disk(bus, bucket, DiscardPolicy.OLD, ttl_s, max_bytes))
    return bus.bucket(bucket)


def _on_disk(
    bus: Bus, bucket: str, discard: DiscardPolicy, ttl_s: float, max_bytes: int
) -> StreamConfig:
    return StreamConfig(
        name=f"KV_{bucket}",
        subjects=[stored_on(bucket, ">")],
        allow_rollup_hdrs=True,
        deny_delete=True,
        discard=discard,
        max_age=ttl_s,
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        num_replicas=bus.options.replicas,
        storage=StorageType.FILE,
    )


def write_once_bucket(bus: Bus, bucket: str) -> Bucket:
    """A bucket, made whenever it is missing, whose entries cannot be replaced or deleted."""
    declare(bus, write_once(bucket, bus.options.replicas))
    return bus.bucket(bucket)


class KnownEntries:
    """Entries of a bucket that this process knows, and stores again when they are missing.

    It does so only while `active`: of several processes that know them, one is enough.
    """

    def __init__(self, bus: Bus, bucket: str, what: str, active: Callable[[], bool]) -> None:
        self._bucket = bus.bucket(bucket)
        self._values: dict[str, bytes] = {}
        self._active = active
        self._what = what
        self._keeper = keeper_of(bus)
        self._keeper.restore(what, self._restore)

    def note(self, key: str, value: bytes) -> None:
        """The present value of a key; empty if somebody has deleted it."""
        if value:
            self._values[key] = value
        else:
            self._values.pop(key, None)

    async def _restore(self) -> None:
        for key, value in list(self._values.items()) if self._active() else ():
            try:
                await self._bucket.get(key)
            except NotFound:
                if self._values.get(key) == value:  # nobody has deleted it meanwhile
                    await self._create(key, value)

    async def _create(self, key: str, value: bytes) -> None:
        try:
            with suppress(Conflict):
                await self._bucket.create(key, value)
        except NotPermitted:
            text = f"NATS has lost {self._what}: they hold in running processes only; set them anew"
            self._keeper.report(self._what, text)
