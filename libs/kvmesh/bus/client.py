"""The connection of one process to NATS and its verbs: post, store, request, subscribe, serve.

Handlers are callbacks: async iterators cost four times the CPU in nats-py. The
connection's read loop calls a plain function; a coroutine function runs in a task of its
subscription, one call after another.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError

from kvmesh.bus.absence import Absence
from kvmesh.bus.connection.acks import Acks, stream_of
from kvmesh.bus.connection.direct_client import DirectClient, LoginRefused
from kvmesh.bus.connection.first_connection import BROKEN, FirstConnection
from kvmesh.bus.connection.jetstream import Bucket, JetStream
from kvmesh.bus.connection.lame_duck import LameDuck
from kvmesh.bus.connection.login import Login
from kvmesh.bus.connection.options import BusOptions as BusOptions
from kvmesh.bus.connection.outbox import Outbox
from kvmesh.bus.connection.refused.refusals import Refusals
from kvmesh.bus.connection.refused.violations import violation
from kvmesh.bus.connection.translation import bus_errors, to_bus_error
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    BusUnavailable,
    Conflict,
    JetStreamError,
    JetStreamUnavailable,
    MalformedReply,
    MessageTooLarge,
    NotFound,
    RequestTimeout,
    StorageFull,
    cause,
    is_missing_stream,
)
from kvmesh.bus.faults import BusFaults
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import MessageDecoder, encode
from kvmesh.bus.metrics import BusCounts, KvBacklog, PendingReader
from kvmesh.bus.packs import unpacked
from kvmesh.bus.permissions import (
    ANY,
    USER_INFO,
    Permissions,
    User,
    covers,
    inbox_prefix,
    permissions,
)
from kvmesh.bus.promptness import Promptness
from kvmesh.bus.server_clock import ServerClock
from kvmesh.bus.subjects import Subjects

log = logging.getLogger(__name__)
# asyncio logs this for every TLS connection that ends, and no action would help
logging.getLogger("asyncio").addFilter(lambda record: "eof_received() has" not in str(record.msg))
ASK_S = 10.0
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


class Keeper(Protocol):
    """Makes streams that are missing."""

    async def make_missing(self) -> bool:
        """True if the streams are as they should be now; never raises BusError."""


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


class Bus:
    """An open connection that reconnects until closed; it raises only BusError.

    A server that ends the connection, as when a user expires, gets another login with the present
    credentials. One that goes on refusing it ends the connection for good: `on_lost` runs. A broken
    connection loses pending replies: callers that wait for one send
    their requests again when `on_reconnect` runs. JetStream holds whatever needs replay.

    Without `patient`, what a limit of the account forbids fails at once, as in a command.

    `client` is nats-py's client: other packages use the methods of this class.
    """

    def __init__(self, client: DirectClient, options: BusOptions, patient: bool = True) -> None:
        self.client = client
        self.options = options
        self.subjects = Subjects(options.namespace)
        self.js = JetStream(client, options.api_prefix, options.bucket_bytes)
        self._buckets: dict[str, Bucket] = {}
        self.acks = Acks()
        self.specs: dict[str, Any] = {}  # by name: the `StreamSpec`s that this process keeps
        self.keeper: Keeper | None = None
        self.late = False  # the server was not there yet at the first attempt to connect
        self.connected_at = asyncio.get_running_loop().time()
        self.was_connected = False
        self.patient = patient
        self.on_reconnect: list[Callable[[], None]] = []
        self.clock = ServerClock()
        self.stored: dict[str, float] = {}  # streams stored into since the keeper's last look
        self.on_lost: list[Callable[[], None]] = []
        self.closing = False
        self.stopping = asyncio.Event()  # the process is to end, and waits for nothing
        self.counts = BusCounts()
        self.readers: set[PendingReader] = set()
        self.kv_backlogs: set[KvBacklog] = set()
        self.faults = BusFaults()
        self.refusals = Refusals(client, self.faults, self.counts)
        self._posts = Outbox(client, self.counts)
        self._asking: asyncio.Task[None] | None = None
        self._asks_from = 0.0
        client.on_too_large = self._ask_limit
        client.is_foreign = lambda subject, data: self.acks.is_foreign(subject, data, _now())

    @classmethod
    async def connect(
        cls, options: BusOptions, name: str, timeout: float | None = 10.0, once: bool = False
    ) -> "Bus":
        """Connect or raise BusUnavailable, which names the address and the cause.

        Rejected credentials end the attempt. Otherwise it lasts `timeout` seconds (None: until
        cancelled), or with `once` until every server has failed.
        """
        try:
            login = Login(options)
            login.check()
            client = DirectClient(login)
            bus = cls(client, options, patient=not once)
            first = FirstConnection(options.url, len(login.servers) if once else None)
            attempt = asyncio.create_task(_connect_with_retries(bus, name, login, first))
        except ValueError as error:
            raise BusUnavailable(options.url, error) from error
        try:
            await first.result(attempt, timeout)
            bus.late = first.retried
        except (TimeoutError, OSError, ValueError, NatsError) as error:
            client.discard()
            raise BusUnavailable(options.url, first.reason(error, login)) from error
        except asyncio.CancelledError:
            client.discard()
            raise
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
    def promptness(self) -> Promptness:
        """Tells whether replies may be unread: then the silence of others means nothing."""
        return self.client.promptness

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
    def payload_limit(self) -> str:
        """That size, and whose limit it is, as text."""
        return self.client.payload_limit

    @property
    def payload_is_the_servers(self) -> bool:
        """False if the account or the user may send less than the server accepts."""
        return self.client.payload_is_the_servers

    @property
    def server(self) -> str:
        """Host and port of the server of this connection, or of the last one."""
        return self.client.server

    @property
    def server_version(self) -> str:
        version = self.client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    def needs(self, role: User, name: str = ANY) -> Permissions:
        """The subjects of a process in a role, by its table and its own inbox."""
        table = permissions(self.subjects, role, role, name, self.options.api_prefix)
        listens = (p for p in table.subscribe if not covers(f"{inbox_prefix(role)}.>", p))
        # a mesh works without it, as with the configuration of an earlier `kvmesh secure`
        publishes = tuple(p for p in table.publish if p != USER_INFO)
        return Permissions(publishes, (*listens, f"{self.options.inbox_prefix}.>"))

    @property
    def has_own_inbox(self) -> bool:
        """True of users of `kvmesh secure`, which have exactly the permissions of their role."""
        return self.options.inbox_prefix != BusOptions.inbox_prefix

    def absence(self) -> Absence:
        """A record of refusals, for a caller that sends a message again by itself."""
        return Absence(self.client.is_clustered)

    def bucket(self, name: str) -> Bucket:
        """A bucket, which need not exist yet: what it stores makes missing streams first."""
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = Bucket(name, self.js.context, self._storing)
        return found

    @property
    def is_clustered(self) -> bool:
        """True if the server of this connection is one of a cluster."""
        return self.client.is_clustered

    async def ask(self, subject: str, timeout: float) -> bytes:
        """The server's own reply to an empty request, as it is; raises BusError."""
        with bus_errors(subject):
            return (await self.client.request(subject, b"", timeout=timeout)).data

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
            self._ask_limit()
            raise MessageTooLarge(subject, len(data), self.client.payload_limit)
        self._posts.send(subject, data, reply)

    async def store(
        self,
        subject: str,
        data: bytes,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Publish encoded `data` into a stream; return once the server has stored it."""
        stream = stream_of(subject)
        await self._storing(stream, lambda: self._store(subject, data, timeout, headers))

    async def _storing(self, stream: str, operation: Callable[[], Awaitable[T]]) -> T:
        return await self.using(lambda: self._acknowledged(stream, operation))

    async def using(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an operation on a stream; once more if that was missing and was made again."""
        try:
            return await operation()
        except BusError as error:
            if self.keeper is None or not is_missing_stream(error):
                raise
            if not await self.keeper.make_missing():
                raise
        return await operation()

    async def _acknowledged(self, stream: str, operation: Callable[[], Awaitable[T]]) -> T:
        sent = asyncio.get_running_loop().time()
        try:
            result = await operation()
        except BusTimeout:
            if self.connected_at <= sent and self.connected:
                self.acks.missed(stream, sent)
            raise
        except JetStreamError as error:
            if isinstance(error, StorageFull):
                error.args = (f"stream {stream} is full, raise its max_bytes: {cause(error)}",)
            passing = isinstance(error, Conflict | NotFound | JetStreamUnavailable)
            self.acks.arrived(stream, sent, "" if passing else cause(error))
            raise
        self.acks.arrived(stream, sent)
        self.stored.setdefault(stream, self.connected_at)
        return result

    async def _store(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None
    ) -> None:
        subject = self.js.stored_through(subject)
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
        at_once: bool = False,
        repeats: bool = False,
    ) -> T:
        """Send a request and return its one reply.

        One that `repeats` is sent again while there is no reply: its receiver handles it once.

        Raises RequestTimeout after `timeout` seconds, MessageTooLarge, NotPermitted, MalformedReply
        or NotConnected; NoResponder once no process has listened for so long that it is gone
        (`Absence`), or `at_once`, for a caller that can ask another process.
        """
        data = encode(message)
        try:
            reply = await self._asked(subject, data, timeout, at_once, repeats)
        except NatsTimeoutError:
            raise RequestTimeout(subject, timeout) from None
        except (NatsError, OSError) as error:
            raise to_bus_error(error, subject, len(data)) from None
        try:
            return decoder.decode(reply.data)
        except msgspec.MsgspecError as error:
            raise MalformedReply(subject, error) from error

    async def _asked(
        self, subject: str, data: bytes, timeout: float, at_once: bool, repeats: bool
    ) -> Msg:
        """The reply; a request that no process has received is sent again while one may return."""
        try:
            return await self.client.request(subject, data, timeout=timeout, repeats=repeats)
        except NoRespondersError:
            if at_once:
                raise
        loop, absence = asyncio.get_running_loop(), self.absence()
        ends = loop.time() + timeout
        while not absence.refused(loop.time(), self.connected_at):
            await asyncio.sleep(absence.wait_s(loop.time()))
            if (left := ends - loop.time()) <= 0:
                raise NatsTimeoutError
            with contextlib.suppress(NoRespondersError):
                return await self.client.request(subject, data, timeout=left, repeats=repeats)
        raise NoRespondersError

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

    def _ask_limit(self) -> None:
        """Learn the limit from a new login: the server tells no connection that it was raised."""
        now = asyncio.get_running_loop().time()
        if now >= self._asks_from and not self.closing:
            self._asks_from = now + ASK_S
            self._asking = asyncio.create_task(self._log_in_for_limit(), name="limit")

    async def _log_in_for_limit(self) -> None:
        try:
            other = await Bus.connect(self.options, "limit", ASK_S, once=True)
        except BusUnavailable as error:
            log.debug("the limit of messages stays as it is: %s", error)
            return
        self.client.raise_limit(other.client)
        await other.close()

    async def flush(self) -> None:
        """Return once the server has received everything posted before."""
        with bus_errors():
            await self._posts.drained()
            await self.client.flush()

    def may_create(self, stream: str) -> bool:
        """False if this process's role may not create a stream."""
        if not self.has_own_inbox or not self.refusals.needs_any:
            return True
        return self.refusals.is_needed(f"{self.js.prefix}.STREAM.CREATE.{stream}")

    async def close(self) -> None:
        """Flush what was posted and disconnect."""
        self.closing = True
        await self.refusals.close()
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=1)
            self._asking.cancel()
        if self.client.is_closed:
            return
        try:
            async with asyncio.timeout(2 if self.connected else 0):
                await self._posts.drained()
                await self.client.flush()
            await self.client.close()
        except (TimeoutError, NatsError, OSError, RuntimeError) as error:
            # without a server, uvloop raises RuntimeError where asyncio raises OSError
            reason = cause(error) if self.connected else "NATS is away"
            log.warning("closing without a flush: %s", reason)
            await self.client.abort()


def returning(function: Callable[[T], object]) -> Callable[[T, Reply], None]:
    """A handler for `Bus.serve` that replies with the result of `function`."""

    def handler(message: T, reply: Reply) -> None:
        reply(function(message))

    return handler


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_handled_refusal(bus: Bus, text: str) -> bool:
    refused = violation(text)
    if refused is None:
        return False
    failed = refused.publish and bus.client.fail_denied(refused.subject)
    return bus.refusals.note(refused) or failed


async def _connect_with_retries(bus: Bus, name: str, login: Login, first: FirstConnection) -> None:
    while True:
        try:
            await _connect(bus, name, login, first)
        except (OSError, nats.errors.NoServersError):
            await asyncio.sleep(0.2)
        else:
            return


async def _connect(bus: Bus, name: str, login: Login, first: FirstConnection) -> None:
    client = bus.client
    last_error = broken_by = ""
    limit = 0
    lame_duck = LameDuck(client)

    async def on_error(error: Exception) -> None:
        nonlocal last_error, broken_by
        text = cause(error)
        if first.failed(error) or _is_handled_refusal(bus, text):
            return
        text = text.removeprefix("nats: ")
        if isinstance(error, LoginRefused):
            if not bus.was_connected:
                return  # `first` reports it
            client.refused(error)
        if isinstance(error, BROKEN):
            broken_by = text
        elif last_error != text:
            last_error = text
            log.warning("nats: %s", text)

    async def on_reconnect() -> None:
        nonlocal last_error, broken_by, limit
        last_error = broken_by = ""
        client.on_connected()
        bus.connected_at = asyncio.get_running_loop().time()
        bus.acks.reset()
        bus.counts.reconnects += 1
        bus.refusals.try_soon()
        log.info("reconnected to %s", client.server)
        if client.max_payload != limit:
            limit = client.max_payload
            log.warning("the largest message is now %s", client.payload_limit)
        for callback in bus.on_reconnect:
            callback()

    async def on_disconnect() -> None:
        client.on_disconnected()
        leaving = lame_duck.leaving
        lame_duck.stop()
        if not (client.is_closed or leaving):
            reason = client.ended_by or broken_by or "no reply"
            log.warning("lost the connection to NATS, reconnecting: %s", reason)

    async def on_closed() -> None:
        if not bus.closing:
            reason = client.last_error or "no reason"
            log.error("NATS closed the connection permanently: %s%s", reason, login.refusal())
            for callback in bus.on_lost:
                callback()

    await client.connect(
        login.servers,
        name=name,
        error_cb=on_error,
        closed_cb=on_closed,
        reconnected_cb=on_reconnect,
        disconnected_cb=on_disconnect,
        lame_duck_mode_cb=lame_duck.notice,
        max_reconnect_attempts=-1,
        connect_timeout=2,
        ping_interval=10,
        pending_size=64 * 1024 * 1024,
        inbox_prefix=bus.options.inbox_prefix,
        tls=login.tls(),
        tls_handshake_first=bus.options.tls_handshake_first,
    )
    client.on_connected()
    bus.was_connected = True
    limit = client.max_payload
    bus.connected_at = asyncio.get_running_loop().time()
