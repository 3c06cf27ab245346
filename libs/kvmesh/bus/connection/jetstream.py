"""JetStream's API, key-value buckets and object stores, as far as a mesh uses them.

Thin wrappers of nats-py's classes that raise only BusError.
"""

import base64
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

from nats.aio.client import Client
from nats.js.api import (
    AccountInfo,
    ConsumerInfo,
    ObjectMeta,
    ObjectMetaOptions,
    PubAck,
    StorageType,
    StreamConfig,
    StreamInfo,
    Tier,
)
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, BadObjectMetaError
from nats.js.kv import KeyValue
from nats.js.object_store import OBJ_DEFAULT_CHUNK_SIZE
from nats.js.object_store import ObjectStore as NatsObjectStore

from kvmesh.bus.connection.api_errors import BYTES_REQUIRED
from kvmesh.bus.connection.translation import bus_errors, raising_bus_errors
from kvmesh.bus.subjects import API, stored_on, through

__all__ = [
    "AccountInfo",
    "Bucket",
    "Entry",
    "JetStream",
    "ObjectStore",
    "StreamConfig",
    "StreamInfo",
    "Tier",
]
Entry = KeyValue.Entry
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
API_S = 10.0
MEMORY_BYTES = 64 << 20  # the size of a bucket in memory, if the account demands one


class _Context(JetStreamContext):
    """nats-py's object, with keys of buckets in other domains and accounts that demand sizes."""

    bucket_bytes = 0

    async def add_stream(self, config: StreamConfig | None = None, **params: Any) -> StreamInfo:
        """Create a stream, with a size where the account demands one."""
        try:
            return await super().add_stream(config, **params)
        except APIError as error:
            if getattr(error, "err_code", None) != BYTES_REQUIRED or config is None:
                raise
        memory = config.storage is StorageType.MEMORY
        most = min(self.bucket_bytes, MEMORY_BYTES) if memory else self.bucket_bytes
        return await super().add_stream(config.evolve(max_bytes=most), **params)

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float | None = None,
        stream: str | None = None,
        headers: dict[str, Any] | None = None,
        msg_ttl: float | None = None,
    ) -> PubAck:
        return await super().publish(
            through(self._prefix, subject), payload, timeout, stream, headers, msg_ttl
        )


class Storing(Protocol):
    """Runs an operation that stores something in a stream."""

    async def __call__(self, stream: str, operation: Callable[[], Awaitable[T]], /) -> T: ...


async def _at_once(_: str, operation: Callable[[], Awaitable[T]], /) -> T:
    return await operation()


class Bucket:
    """A key-value bucket. `update` and `create` raise Conflict, `get` raises NotFound.

    It is named, not opened, and so serves also the bucket that is made in place of a lost one.
    `get` asks the stream's leader: direct reads are not permitted to users of the server.
    """

    def __init__(self, name: str, js: JetStreamContext, storing: Storing = _at_once) -> None:
        stream = f"KV_{name}"
        bucket = KeyValue(name, stream, stored_on(name, ""), js, direct=False)

        def stores(call: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            translated = raising_bus_errors(call)

            async def stored(*args: P.args, **kwargs: P.kwargs) -> R:
                return await storing(stream, lambda: translated(*args, **kwargs))

            return stored

        self.get = raising_bus_errors(bucket.get)
        self.put = stores(bucket.put)
        self.create = stores(bucket.create)
        self.update = stores(bucket.update)
        self.delete = stores(bucket.delete)
        self.keys = raising_bus_errors(bucket.keys)
        self.status = raising_bus_errors(bucket.status)


class ObjectStore:
    """A bucket of large objects. `get`, `get_info` and `delete` raise NotFound."""

    def __init__(
        self, store: NatsObjectStore, client: Client, forget: Callable[[str], Awaitable[object]]
    ) -> None:
        self._store = store
        self._client = client
        self._forget = forget
        self.get = raising_bus_errors(store.get)
        self.get_info = raising_bus_errors(store.get_info)
        self.delete = raising_bus_errors(store.delete)

    async def put(self, name: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Store an object in place of the one of that name, even a damaged one.

        `headers` describe it.
        """
        chunk = min(OBJ_DEFAULT_CHUNK_SIZE, self._client.max_payload // 2)
        options = ObjectMetaOptions(max_chunk_size=chunk)
        known = dict(headers) if headers is not None else None
        meta = ObjectMeta(name=name, headers=known, options=options)
        with bus_errors():
            try:
                await self._store.put(name, data, meta)
            except BadObjectMetaError:  # of the former one
                await self._forget(name)
                await self._store.put(name, data, meta)


class JetStream:
    """The operations of the JetStream API under `prefix`; `context` is nats-py's object."""

    def __init__(self, client: Client, prefix: str, bucket_bytes: int) -> None:
        self.context = context = _Context(client, prefix=prefix, timeout=API_S)
        self._client = client
        self.prefix = prefix
        context.bucket_bytes = bucket_bytes
        self.account_info = raising_bus_errors(context.account_info)
        self.stream_info = raising_bus_errors(context.stream_info)
        self.add_stream = raising_bus_errors(context.add_stream)
        self.update_stream = raising_bus_errors(context.update_stream)
        self.purge_stream = raising_bus_errors(context.purge_stream)
        self.publish = raising_bus_errors(context.publish)
        self.delete_msg = raising_bus_errors(context.delete_msg)
        self.get_msg = raising_bus_errors(context.get_msg)
        self.add_consumer = raising_bus_errors(context.add_consumer)
        self.delete_consumer = raising_bus_errors(context.delete_consumer)
        self.create_key_value = raising_bus_errors(context.create_key_value)
        self.create_object_store = raising_bus_errors(context.create_object_store)
        self.delete_object_store = raising_bus_errors(context.delete_object_store)

    @property
    def is_own(self) -> bool:
        """True for the JetStream of the server's own domain."""
        return self.prefix == API

    def stored_through(self, subject: str) -> str:
        """The subject on which a message is published that a stream stores under `subject`."""
        return through(self.prefix, subject)

    async def streams_info(self) -> list[StreamInfo]:
        """Every stream of the account; nats-py returns the first 256."""
        found: list[StreamInfo] = []
        with bus_errors():
            while page := await self.context.streams_info(offset=len(found)):
                found += page
        return found

    async def consumers_info(self, stream: str) -> list[ConsumerInfo]:
        """Every consumer of a stream; nats-py returns the first 256."""
        found: list[ConsumerInfo] = []
        with bus_errors():
            while page := await self.context.consumers_info(stream, offset=len(found)):
                found += page
        return found

    async def key_value(self, bucket: str) -> Bucket:
        """An existing bucket; raises NotFound."""
        with bus_errors():
            await self.context.key_value(bucket)
        return Bucket(bucket, self.context)

    async def object_store(self, bucket: str) -> ObjectStore:
        """An existing object store; raises NotFound."""
        with bus_errors():
            store = await self.context.object_store(bucket)

        async def forget(name: str) -> None:
            described = base64.urlsafe_b64encode(name.encode()).decode()
            await self.context.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.M.{described}")

        return ObjectStore(store, self._client, forget)
