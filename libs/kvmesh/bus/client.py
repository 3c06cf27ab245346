"""The connection of one process to NATS and its verbs: post, store, request, subscribe, serve.

Handlers are callbacks: async iterators cost four times the CPU in nats-py. The
connection's read loop calls a plain function; a coroutine function runs in a task of its
subscription, one call after another.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError

from kvmesh.bus.connection.direct_client import DirectClient
from kvmesh.bus.connection.first_connection import BROKEN, FirstConnection
from kvmesh.bus.connection.jetstream import Bucket, JetStream
from kvmesh.bus.connection.outbox import Outbox
from kvmesh.bus.connection.tls import tls_context
from kvmesh.bus.connection.translation import bus_errors, to_bus_error
from kvmesh.bus.errors import (
    BusUnavailable,
    MalformedReply,
    MessageTooLarge,
    RequestTimeout,
    cause,
)
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import MessageDecoder, encode
from kvmesh.bus.metrics import BusCounts, KvBacklog, PendingReader
from kvmesh.bus.packs import unpacked
from kvmesh.bus.subjects import Subjects

log = logging.getLogger(__name__)
# asyncio logs this for every TLS connection that ends, and no action would help
logging.getLogger("asyncio").addFilter(lambda record: "eof_received() has" not in str(record.msg))
NOBODY = "503"  # the status of the server's reply if no process listens
T = TypeVar("T")
Reply = Callable[[object], None]


class _Ack(msgspec.Struct):
    """JetStream's acknowledgement, reduced to its error."""

    error: dict[str, Any] | None = None


_ack_decoder = msgspec.json.Decoder(_Ack)


class RawMessage(Protocol):
    """A message that is not decoded; `headers["Status"]` is "503" if no process listens."""

    @property
    def subject(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def reply(self) -> str: ...
    @property
    def headers(self) -> dict[str, str] | None: ...


class Subscription:
    """An active subscription; `unsubscribe` or `drain` ends it."""

    __slots__ = ("_subscription",)

    def __init__(self, subscription: NatsSubscription) -> None:
        self._subscription = subscription

    @property
    def pending_messages(self) -> int:
        """Messages that have arrived and wait for a handler that is a coroutine function."""
        return self._subscription.pending_msgs

    async def unsubscribe(self) -> None:
        """End at once."""
        with bus_errors():
            await self._subscription.unsubscribe()

    async def drain(self) -> None:
        """End once every message that has arrived is handled."""
        with bus_errors():
            await self._subscription.drain()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class BusOptions:
    """Server addresses, credentials and TLS. `url` may list several servers, separated by commas.

    With `tls_ca` or a certificate, every server must offer TLS.
    """

    url: str = field(default="nats://127.0.0.1:4222", repr=False)
    namespace: str = "kvmesh"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: str | None = None
    replicas: int = 1
    nkey_seed: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    inbox_prefix: str = "_INBOX"


class Bus:
    """An open connection that reconnects until closed; it raises only BusError.

    A server that rejects the credentials, or a message as too large, ends the connection for good:
    `on_lost` runs. A broken connection loses pending replies: callers that wait for one send
    their requests again when `on_reconnect` runs. JetStream holds whatever needs replay.

    `client` is nats-py's client: other packages use the methods of this class.
    """

    def __init__(self, client: DirectClient, options: BusOptions) -> None:
        self.client = client
        self.options = options
        self.subjects = Subjects(options.namespace)
        self.js = JetStream(client.jetstream(timeout=10))
        self.buckets: dict[str, Bucket] = {}
        self.connected_at = asyncio.get_running_loop().time()
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_lost: list[Callable[[], None]] = []
        self.closing = False
        self.counts = BusCounts()
        self.readers: set[PendingReader] = set()
        self.kv_backlogs: set[KvBacklog] = set()
        self._posts = Outbox(client, self.counts)

    @classmethod
    async def connect(
        cls, options: BusOptions, name: str, timeout: float | None = 10.0, once: bool = False
    ) -> "Bus":
        """Connect or raise BusUnavailable, which names the address and the cause.

        Rejected credentials end the attempt. Otherwise it lasts `timeout` seconds (None: until
        cancelled), or with `once` until every server has failed.
        """
        client = DirectClient()
        bus = cls(client, options)
        servers = [url.strip() for url in options.url.split(",")]
        first = FirstConnection(options.url, len(servers) if once else None)
        try:
            security = _security(options)
            attempt = asyncio.create_task(
                _connect_with_retries(client, servers, bus, name, first, security)
            )
            await first.result(attempt, timeout)
        except _failures(options) as error:
            client.abandon()
            reason = first.reason(error, _credentials(options))
            raise BusUnavailable(options.url, reason) from error
        return bus

    @property
    def connected_for(self) -> float:
        """Seconds since the connection was last (re)made; 0 while there is none."""
        if not self.client.is_connected:
            return 0.0
        return asyncio.get_running_loop().time() - self.connected_at

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    @property
    def unsent(self) -> int:
        """Posted messages that wait in front of the connection."""
        return self._posts.unsent

    @property
    def kv_backlog_bytes(self) -> int:
        """Estimated bytes of the KV events that wait to be sent."""
        return sum(publisher.backlog_bytes for publisher in self.kv_backlogs)

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, in bytes."""
        return self.client.max_payload

    @property
    def server(self) -> str:
        """Host and port of the server of this connection, or of the last one."""
        return self.client.server

    @property
    def server_version(self) -> str:
        version = self.client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    def new_inbox(self) -> str:
        """An unguessable subject for replies."""
        return self.client.new_inbox()

    def post(self, subject: str, message: object, reply: str = "") -> None:
        """Send from plain code, in the order of the calls; failures are logged.

        During an outage messages wait in a bounded buffer. With a subject `reply`, replies go
        there, and MessageTooLarge is raised for a message that exceeds the server's limit.
        """
        data = encode(message)
        if reply and len(data) > self.client.max_payload:
            raise MessageTooLarge(subject, len(data))
        self._posts.send(subject, data, reply)

    async def store(
        self,
        subject: str,
        data: bytes,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Publish encoded `data` into a stream; return once the server has stored it."""
        extra = dict(headers) if headers is not None else None
        with bus_errors(subject, len(data)):
            ack = await self.client.request(subject, data, timeout=timeout, headers=extra)
        try:
            error = _ack_decoder.decode(ack.data).error
        except msgspec.MsgspecError as malformed:
            raise MalformedReply(subject, malformed) from malformed
        if error is not None:
            with bus_errors(subject):
                APIError.from_error(error)

    async def request(
        self,
        subject: str,
        message: object,
        decoder: MessageDecoder[T],
        timeout: float,
    ) -> T:
        """Send a request and return its one reply.

        Raises NoResponder, RequestTimeout after `timeout` seconds, MessageTooLarge, NotPermitted,
        MalformedReply or NotConnected.
        """
        data = encode(message)
        try:
            reply = await self.client.request(subject, data, timeout=timeout)
        except NatsTimeoutError:
            raise RequestTimeout(subject, timeout) from None
        except (NatsError, OSError) as error:
            raise to_bus_error(error, subject, len(data)) from None
        try:
            return decoder.decode(reply.data)
        except msgspec.MsgspecError as error:
            raise MalformedReply(subject, error) from error

    async def subscribe(
        self,
        subject: str,
        decoder: MessageDecoder[T],
        handler: Callable[[T], Awaitable[None] | None],
    ) -> Subscription:
        """Call `handler` with each message, in order, those of packs included.

        Malformed ones are logged and dropped.
        """

        def decode(msg: Msg, data: bytes) -> T | None:
            if not data and (msg.headers or {}).get("Status") == NOBODY:
                return None  # the server's own reply to a query that nobody has received
            try:
                return decoder.decode(data)
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed message on %s: %s", msg.subject, error)
                return None

        def at_once(msg: Msg) -> None:
            for data in unpacked(msg.data):
                if (message := decode(msg, data)) is not None:
                    handler(message)

        async def in_task(msg: Msg) -> None:
            for data in unpacked(msg.data):
                if (message := decode(msg, data)) is not None:
                    handled = handler(message)
                    if handled is not None:
                        await handled

        if inspect.iscoroutinefunction(handler):
            return await self._subscribe_in_task(subject, in_task)
        return await self._subscribe_directly(subject, at_once)

    async def subscribe_raw(
        self, subject: str, handler: Callable[[RawMessage], None]
    ) -> Subscription:
        """Have the read loop call `handler` with each message, not decoded."""
        return await self._subscribe_directly(subject, handler)

    async def serve(
        self,
        subject: str,
        decoder: MessageDecoder[T],
        handler: Callable[[T, Reply], object],
        queue: str = "",
        on_malformed: Callable[[str], object] | None = None,
    ) -> Subscription:
        """Call `handler` with each request and a function that replies, now or later, once.

        `on_malformed` gets the reason why a request cannot be decoded and returns the reply; each
        reason is logged once.
        Among the processes that share a `queue`, one handles each request. A plain handler
        blocks the read loop; a coroutine function delays only this subscription's next request.
        """

        logged = LogOnce()  # a sender of a newer version repeats what this one does not know

        def decode(msg: Msg) -> tuple[T, Reply] | None:
            try:
                message = decoder.decode(msg.data)
            except msgspec.MsgspecError as error:
                if logged.first(str(error)):
                    log.warning("refused a malformed request on %s: %s", msg.subject, error)
                if on_malformed is not None and msg.reply:
                    self.post(msg.reply, on_malformed(str(error)))
                return None

            def reply(content: object) -> None:
                if msg.reply:
                    self.post(msg.reply, content)

            return message, reply

        def at_once(msg: Msg) -> None:
            if (request := decode(msg)) is not None:
                handler(*request)

        async def in_task(msg: Msg) -> None:
            if (request := decode(msg)) is not None:
                handled = handler(*request)
                if inspect.isawaitable(handled):
                    await handled

        if inspect.iscoroutinefunction(handler):
            return await self._subscribe_in_task(subject, in_task, queue)
        return await self._subscribe_directly(subject, at_once, queue)

    async def _subscribe_directly(
        self, subject: str, receive: Callable[[Msg], None], queue: str = ""
    ) -> Subscription:
        with bus_errors(subject):
            return Subscription(await self.client.subscribe_direct(subject, receive, queue))

    async def _subscribe_in_task(
        self, subject: str, receive: Callable[[Msg], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        with bus_errors(subject):
            return Subscription(await self.client.subscribe(subject, queue=queue, cb=receive))

    async def flush(self) -> None:
        """Return once the server has received everything posted before."""
        with bus_errors():
            await self._posts.drained()
            await self.client.flush()

    async def close(self) -> None:
        """Flush what was posted and disconnect."""
        self.closing = True
        if self.client.is_closed:
            return
        try:
            async with asyncio.timeout(2):
                await self._posts.drained()
                await self.client.flush()
        except (TimeoutError, NatsError) as error:
            log.warning("closing without a flush: %s", cause(error))
        try:
            await self.client.close()
        except OSError as error:  # the server has ended the connection meanwhile
            log.warning("the connection to NATS ended before it was closed: %s", error)


def returning(function: Callable[[T], object]) -> Callable[[T, Reply], None]:
    """A handler for `Bus.serve` that replies with the result of `function`."""

    def handler(message: T, reply: Reply) -> None:
        reply(function(message))

    return handler


def _credentials(options: BusOptions) -> str:
    """The name of the setting that authenticates this process; empty if there is none."""
    settings = {
        "nats.nkey_seed": options.nkey_seed,
        "nats.credentials": options.credentials,
        "nats.token": options.token,
        "nats.user and nats.password": options.user,
        "the user in nats.url": "@" in options.url,
    }
    return next((name for name, value in settings.items() if value), "")


def _failures(options: BusOptions) -> tuple[type[Exception], ...]:
    """The errors of an attempt to connect."""
    failures = (TimeoutError, OSError, ValueError, NatsError)
    if not options.nkey_seed and not options.credentials:
        return failures
    from nkeys import NkeysError  # with libraries that take a megabyte

    return (*failures, NkeysError)


def _security(options: BusOptions) -> dict[str, Any]:
    """The client's arguments for authentication and TLS.

    Raises OSError or ValueError for unusable files.
    """
    return {
        "user": options.user,
        "password": options.password,
        "token": options.token,
        "user_credentials": options.credentials,
        "nkeys_seed_str": options.nkey_seed,
        "inbox_prefix": options.inbox_prefix,
        "tls": tls_context(options.tls_ca, options.tls_cert, options.tls_key),
    }


async def _connect_with_retries(
    client: DirectClient,
    servers: list[str],
    bus: Bus,
    name: str,
    first: FirstConnection,
    security: dict[str, Any],
) -> None:
    while True:
        try:
            await _connect(client, servers, bus, name, first, security)
        except (OSError, nats.errors.NoServersError):
            await asyncio.sleep(0.2)
        else:
            return


async def _connect(
    client: DirectClient,
    servers: list[str],
    bus: Bus,
    name: str,
    first: FirstConnection,
    security: dict[str, Any],
) -> None:
    last_error = broken_by = ""

    async def on_error(error: Exception) -> None:
        nonlocal last_error, broken_by
        text = cause(error)
        if first.failed(error) or client.fail_denied(text):
            return
        if isinstance(error, BROKEN):
            broken_by = text
        elif last_error != text:
            last_error = text
            log.warning("nats: %s", text)

    async def on_reconnect() -> None:
        nonlocal last_error, broken_by
        last_error = broken_by = ""
        client.on_connected()
        bus.connected_at = asyncio.get_running_loop().time()
        bus.counts.reconnects += 1
        log.info("reconnected to %s", client.server)
        for callback in bus.on_reconnect:
            callback()

    async def on_disconnect() -> None:
        client.on_disconnected()
        if not client.is_closed:
            log.warning("lost the connection to NATS, reconnecting: %s", broken_by or "no reply")

    async def on_closed() -> None:
        if not bus.closing:
            log.error(
                "NATS closed the connection permanently: %s", client.last_error or "no reason"
            )
            for callback in bus.on_lost:
                callback()

    await client.connect(
        servers,
        name=name,
        error_cb=on_error,
        closed_cb=on_closed,
        reconnected_cb=on_reconnect,
        disconnected_cb=on_disconnect,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.2,  # type: ignore[arg-type]  # nats-py sleeps for this many seconds
        connect_timeout=2,
        ping_interval=10,
        pending_size=64 * 1024 * 1024,
        **security,
    )
    client.on_connected()
    bus.connected_at = asyncio.get_running_loop().time()
