"""JetStream's API, key-value buckets and object stores, as far as a mesh uses them.

Thin wrappers of nats-py's classes that raise only BusError.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

from nats.js.api import ObjectMeta, StreamInfo
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore as NatsObjectStore

from kvmesh.bus.connection.translation import bus_errors, raising_bus_errors

__all__ = ["Bucket", "Entry", "JetStream", "ObjectStore", "StreamInfo"]
Entry = KeyValue.Entry
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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
        bucket = KeyValue(name, stream, f"$KV.{name}.", js, direct=False)

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

    def __init__(self, store: NatsObjectStore) -> None:
        self._store = store
        self.get = raising_bus_errors(store.get)
        self.get_info = raising_bus_errors(store.get_info)
        self.delete = raising_bus_errors(store.delete)

    async def put(self, name: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Store an object in place of the one of that name; `headers` describe it."""
        meta = ObjectMeta(name=name, headers=dict(headers)) if headers is not None else None
        with bus_errors():
            await self._store.put(name, data, meta)


class JetStream:
    """The operations of JetStream's API; `context` is nats-py's object."""

    def __init__(self, context: JetStreamContext) -> None:
        self.context = context
        self.account_info = raising_bus_errors(context.account_info)
        self.stream_info = raising_bus_errors(context.stream_info)
        self.streams_info = raising_bus_errors(context.streams_info)
        self.add_stream = raising_bus_errors(context.add_stream)
        self.update_stream = raising_bus_errors(context.update_stream)
        self.purge_stream = raising_bus_errors(context.purge_stream)
        self.publish = raising_bus_errors(context.publish)
        self.delete_msg = raising_bus_errors(context.delete_msg)
        self.get_msg = raising_bus_errors(context.get_msg)
        self.consumers_info = raising_bus_errors(context.consumers_info)
        self.add_consumer = raising_bus_errors(context.add_consumer)
        self.delete_consumer = raising_bus_errors(context.delete_consumer)
        self.create_key_value = raising_bus_errors(context.create_key_value)
        self.create_object_store = raising_bus_errors(context.create_object_store)
        self.delete_object_store = raising_bus_errors(context.delete_object_store)

    async def key_value(self, bucket: str) -> Bucket:
        """An existing bucket; raises NotFound."""
        with bus_errors():
            await self.context.key_value(bucket)
        return Bucket(bucket, self.context)

    async def object_store(self, bucket: str) -> ObjectStore:
        """An existing object store; raises NotFound."""
        with bus_errors():
            return ObjectStore(await self.context.object_store(bucket))
