"""The connection of one process to NATS: typed publish, request and subscribe.

Hot paths use callbacks: async iterators cost four times the CPU in nats-py, and a coroutine
function is called from a task of its subscription, a plain one at once by whoever reads.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.client import JetStreamContext
from nats.js.errors import APIError
from nats.js.kv import KeyValue
from nkeys import NkeysError

from kvmesh.bus.direct_client import DirectClient, PermissionDenied
from kvmesh.bus.errors import (
    BusUnavailable,
    MessageTooLarge,
    NoResponder,
    NotPermitted,
    RequestTimeout,
    cause,
)
from kvmesh.bus.first_connection import BROKEN, FirstConnection
from kvmesh.bus.messages import encode
from kvmesh.bus.outbox import Outbox
from kvmesh.bus.subjects import Subjects
from kvmesh.bus.tls import tls_context

log = logging.getLogger(__name__)
# asyncio says so of every TLS connection that ends, and there is nothing to do about it
logging.getLogger("asyncio").addFilter(lambda record: "eof_received() has" not in str(record.msg))
T = TypeVar("T")
Respond = Callable[[object], Awaitable[None]]
Reply = Callable[[object], None]


class _Ack(msgspec.Struct):
    """What JetStream answers to a message for a stream, as far as it matters."""

    error: dict[str, Any] | None = None


_ack_decoder = msgspec.json.Decoder(_Ack)


@dataclass(frozen=True)
class BusOptions:
    """Where and as whom to connect. `url` may list several servers, separated by commas.

    With an authority in `tls_ca`, or a certificate, every server must offer TLS.
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
    """An open connection. Reconnects for ever; what needs replay lives in JetStream.

    What a server objects to (credentials, too large a message) ends it for good: `on_lost` calls.

    Answers that were under way when the connection broke are lost: whoever waits long for one
    asks again when `on_reconnect` calls.
    """

    def __init__(self, client: DirectClient, options: BusOptions) -> None:
        self.client = client
        self.options = options
        self.subjects = Subjects(options.namespace)
        self.js: JetStreamContext = client.jetstream(timeout=10)
        self.buckets: dict[str, KeyValue] = {}
        self.connected_at = asyncio.get_running_loop().time()
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_lost: list[Callable[[], None]] = []
        self.closing = False
        self._posts = Outbox(client)

    @classmethod
    async def connect(
        cls, options: BusOptions, name: str, timeout: float | None = 10.0, once: bool = False
    ) -> "Bus":
        """Connect or raise BusUnavailable naming the address and cause.

        Credentials that a server refuses are final. Otherwise tries for `timeout` seconds, with
        None for ever, or with `once` until every server has failed.
        """
        client = DirectClient()
        bus = cls(client, options)
        servers = [url.strip() for url in options.url.split(",")]
        joining = FirstConnection(len(servers) if once else None)
        try:
            security = _security(options)
            attempt = asyncio.create_task(
                _connect_patiently(client, servers, bus, name, joining, security)
            )
            await joining.result(attempt, timeout)
        except (TimeoutError, OSError, ValueError, NkeysError, NatsError) as error:
            client.abandon()
            reason = joining.reason(error, _credentials(options))
            raise BusUnavailable(options.url, reason) from error
        return bus

    @property
    def connected_for(self) -> float:
        """Seconds since the connection was last (re)made; 0 while there is none."""
        if not self.client.is_connected:
            return 0.0
        return asyncio.get_running_loop().time() - self.connected_at

    async def publish(self, subject: str, message: object) -> None:
        """Send without waiting; during an outage messages are kept in a bounded buffer."""
        await self.client.publish(subject, encode(message))

    async def request(self, subject: str, message: object, reply: type[T], timeout: float) -> T:
        """One answer within `timeout` seconds, else NoResponder or RequestTimeout.

        Raises MessageTooLarge for a message that the server would not take.
        """
        data = encode(message)
        try:
            answer = await self.client.request(subject, data, timeout=timeout)
        except MaxPayloadError:
            raise MessageTooLarge(subject, len(data)) from None
        except NoRespondersError:
            raise NoResponder(subject) from None
        except PermissionDenied:
            raise NotPermitted(subject) from None
        except NatsTimeoutError:
            raise RequestTimeout(subject, timeout) from None
        return msgspec.msgpack.decode(answer.data, type=reply)

    async def store(self, subject: str, data: bytes, timeout: float) -> None:
        """Publish into a stream; returns once it is there, or raises the server's NatsError."""
        answer = await self.client.request(subject, data, timeout=timeout)
        if (error := _ack_decoder.decode(answer.data).error) is not None:
            APIError.from_error(error)

    async def subscribe(
        self,
        subject: str,
        decoder: "msgspec.msgpack.Decoder[T]",
        handler: Callable[[T], Awaitable[None] | None],
    ) -> Subscription:
        """Call `handler` with each message, in order. Undecodable ones are logged and dropped."""

        def decode(msg: Msg) -> T | None:
            try:
                return decoder.decode(msg.data)
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed message on %s: %s", msg.subject, error)
                return None

        def at_once(msg: Msg) -> None:
            if (message := decode(msg)) is not None:
                handler(message)

        async def in_task(msg: Msg) -> None:
            if (message := decode(msg)) is not None:
                handled = handler(message)
                if handled is not None:
                    await handled

        if inspect.iscoroutinefunction(handler):
            return await self.client.subscribe(subject, cb=in_task)
        return await self.client.subscribe_direct(subject, at_once)

    async def serve(
        self,
        subject: str,
        decoder: "msgspec.msgpack.Decoder[T]",
        handler: Callable[[T, Respond], Awaitable[None]],
        queue: str = "",
        on_malformed: Callable[[str], object] | None = None,
    ) -> Subscription:
        """Answer requests. `handler` must return soon: it may respond later, from a task."""

        async def receive(msg: Msg) -> None:
            async def respond(answer: object) -> None:
                if msg.reply:
                    await self.client.publish(msg.reply, encode(answer))

            if (message := self._understood(msg, decoder, on_malformed)) is not None:
                await handler(message, respond)

        return await self.client.subscribe(subject, queue=queue, cb=receive)

    async def handle(
        self,
        subject: str,
        decoder: "msgspec.msgpack.Decoder[T]",
        handler: Callable[[T, Reply], object],
        queue: str = "",
        on_malformed: Callable[[str], object] | None = None,
    ) -> Subscription:
        """Have `handler` called by the reader itself; it may reply then or later, once."""

        def receive(msg: Msg) -> None:
            def reply(answer: object) -> None:
                if msg.reply:
                    self.post(msg.reply, answer)

            if (message := self._understood(msg, decoder, on_malformed)) is not None:
                handler(message, reply)

        return await self.client.subscribe_direct(subject, receive, queue)

    def _understood(
        self,
        msg: Msg,
        decoder: "msgspec.msgpack.Decoder[T]",
        on_malformed: Callable[[str], object] | None,
    ) -> T | None:
        try:
            return decoder.decode(msg.data)
        except msgspec.MsgspecError as error:
            log.warning("refused a malformed request on %s: %s", msg.subject, error)
            if on_malformed is not None and msg.reply:
                self.post(msg.reply, on_malformed(str(error)))
            return None

    async def answer(
        self,
        subject: str,
        decoder: "msgspec.msgpack.Decoder[T]",
        answer: Callable[[T], object],
        on_malformed: Callable[[str], object],
        queue: str = "",
    ) -> Subscription:
        """Answer each request at once with what `answer` returns, which must not take long."""

        def handler(message: T, reply: Reply) -> None:
            reply(answer(message))

        return await self.handle(subject, decoder, handler, queue, on_malformed)

    def post(self, subject: str, message: object, reply: str = "") -> None:
        """Send from plain code, in the order of the calls; failures are logged.

        What the connection does not take at once waits for it, as with `publish`. Answers go to
        the subject `reply`.
        """
        self._posts.send(subject, encode(message), reply)

    def ask(self, subject: str, message: object, reply: str) -> None:
        """`post` a question; raises MessageTooLarge for one that the server would not take."""
        data = encode(message)
        if len(data) > self.client.max_payload:
            raise MessageTooLarge(subject, len(data))
        self._posts.send(subject, data, reply)

    async def close(self) -> None:
        """Flush what was published and disconnect."""
        self.closing = True
        if self.client.is_closed:
            return
        try:
            async with asyncio.timeout(2):
                await self._posts.sent()
                await self.client.flush()
        except (TimeoutError, NatsError) as error:
            log.warning("closing without a flush: %s", cause(error))
        await self.client.close()


def _credentials(options: BusOptions) -> str:
    """The settings by which the server knows who this is; empty if there are none."""
    settings = {
        "nats.nkey_seed": options.nkey_seed,
        "nats.credentials": options.credentials,
        "nats.token": options.token,
        "nats.user and nats.password": options.user,
        "the user in nats.url": "@" in options.url,
    }
    return next((name for name, value in settings.items() if value), "")


def _security(options: BusOptions) -> dict[str, Any]:
    """The client's arguments that say who this is and whom it trusts.

    Raises OSError or ValueError for files that cannot be used.
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


async def _connect_patiently(
    client: DirectClient,
    servers: list[str],
    bus: Bus,
    name: str,
    joining: FirstConnection,
    security: dict[str, Any],
) -> None:
    while True:
        try:
            await _connect(client, servers, bus, name, joining, security)
        except (OSError, nats.errors.NoServersError):
            await asyncio.sleep(0.2)
        else:
            return


async def _connect(
    client: DirectClient,
    servers: list[str],
    bus: Bus,
    name: str,
    joining: FirstConnection,
    security: dict[str, Any],
) -> None:
    last_error = broken_by = ""

    async def on_error(error: Exception) -> None:
        nonlocal last_error, broken_by
        text = cause(error)
        if joining.failed(error) or client.denied(text):
            return
        if isinstance(error, BROKEN):
            broken_by = text
        elif last_error != text:
            last_error = text
            log.warning("nats: %s", text)

    async def on_reconnect() -> None:
        nonlocal last_error, broken_by
        last_error = broken_by = ""
        client.made()
        bus.connected_at = asyncio.get_running_loop().time()
        log.info("reconnected to %s", client.server)
        for callback in bus.on_reconnect:
            callback()

    async def on_disconnect() -> None:
        client.broken()
        if not client.is_closed:
            log.warning("lost the connection to NATS, reconnecting: %s", broken_by or "no answer")

    async def on_closed() -> None:
        if not bus.closing:
            log.error("NATS ended the connection for good: %s", client.last_error or "no reason")
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
        reconnect_time_wait=0.2,  # type: ignore[arg-type]  # slept on as it is
        connect_timeout=2,
        ping_interval=10,
        pending_size=64 * 1024 * 1024,
        **security,
    )
    client.made()
    bus.connected_at = asyncio.get_running_loop().time()
