"""nats-py's client with fewer switches of task on the way of a message.

nats-py wakes a flusher task to publish, a task of its subscription for every message, and has a
`wait_for` around every request. Here what one turn of the event loop publishes is written by a
callback, a message may be handed to a plain function as its bytes arrive, and a request is a
future with a timer. This is the only module that touches nats-py's private parts; where it finds
them otherwise than expected, or a connection is not in its plain connected state, nats-py's own
way is taken.
"""

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.protocol.parser import AWAITING_CONTROL_LINE

from kvmesh.bus.protocol_parser import MessageParser

log = logging.getLogger(__name__)
Handle = Callable[[Msg], None]
MOST_BUFFERED = 256 << 10
STORED = b"$JS.ACK."  # begins the reply subject of whatever a stream's consumer delivers
LATE_S = 0.1  # by which a timer is late only in a process that was stopped or stalled
LARGE = 32 << 10  # such a payload is not copied together with others
SEPARATORS = frozenset(" \t\r\n")
DENIED = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)


class PermissionDenied(NatsError):
    """The server does not permit this process to publish on `subject`."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nats: permissions violation for publish to {subject}")
        self.subject = subject


class DirectClient(Client):
    """A `Client` whose owner calls `made` and `broken` as its connection comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self._writer: asyncio.WriteTransport | None = None
        self._flush_planned = False
        self._handles: dict[int, Handle] = {}
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._asked: dict[str, str] = {}  # subjects of what waits, by the subject of the answer
        self._inbox = ""
        self._complaints: set[asyncio.Task[None]] = set()
        self._astray: set[int] = set()  # subscriptions of which it was said

    async def _connect_to_server(self, s: Srv) -> None:
        self.abandon()
        await super()._connect_to_server(s)

    def abandon(self) -> None:
        """Close the connection of an attempt that failed later: nats-py would leave it open."""
        if self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]
            bare = getattr(self._transport, "_bare_io_writer", None)
            if bare is not None:  # under TLS, closing would wait for the server to agree
                bare.transport.abort()

    def made(self) -> None:
        """The connection is up and its subscriptions are known to the server."""
        stream = getattr(self._transport, "_io_writer", None)
        self._writer = getattr(stream, "transport", None)
        reader = getattr(self._transport, "_io_reader", None)
        if isinstance(getattr(reader, "_buffer", None), bytearray):
            self._read_directly(reader)

    def _read_directly(self, reader: Any) -> None:
        """Take messages before the stream reader does, whenever nats-py has none under way."""
        arrivals, parser, feed = MessageParser(self._arrived), self._ps, reader.feed_data

        def feed_data(data: bytes) -> None:
            at_rest = parser.state == AWAITING_CONTROL_LINE and not parser.buf
            if arrivals.waits or (at_rest and not reader._buffer):
                data = arrivals.take(data)
            if data:
                feed(data)

        reader.feed_data = feed_data

    def broken(self) -> None:
        """The connection is gone."""
        self._writer = None

    def try_publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Send with all else that this turn of the loop sends, or return False: then `publish`."""
        writer = self._writer
        if (
            writer is None
            or not self.is_connected
            or self._pending_data_size > MOST_BUFFERED
            or len(payload) > self._max_payload
            or not subject
            or not SEPARATORS.isdisjoint(subject)
            or writer.get_write_buffer_size() > MOST_BUFFERED
        ):
            return False
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        head = f"PUB {subject} {reply} {len(payload)}\r\n".encode()
        if len(payload) < LARGE:
            self._pending.append(b"%b%b\r\n" % (head, payload))
        else:
            self._pending += (head, payload, b"\r\n")
        self._pending_data_size += len(head) + len(payload) + 2
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush_directly)
        return True

    def _flush_directly(self) -> None:
        """What waits while there is no connection is sent by nats-py when there is one again."""
        self._flush_planned = False
        writer = self._writer
        if writer is None or not self.is_connected or writer.is_closing() or not self._pending:
            return
        if self._pending_data_size < LARGE:
            writer.write(b"".join(self._pending))
        else:
            writer.writelines(self._pending)
        self._pending = []
        self._pending_data_size = 0

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: dict[str, Any] | None = None,
    ) -> None:
        if headers is not None or not self.try_publish(subject, payload, reply):
            await super().publish(subject, payload, reply, headers)

    async def subscribe_direct(self, subject: str, handle: Handle, queue: str = "") -> Subscription:
        """Have `handle` called by the reader itself; what it raises goes to the error callback."""

        async def receive(msg: Msg) -> None:
            handle(msg)

        subscription = await self.subscribe(subject, queue=queue, cb=receive)
        self._handles[subscription._id] = handle
        return subscription

    def new_inbox(self) -> str:
        """A subject that nobody guesses, from others of this process neither: nats-py counts."""
        return f"{self._inbox_prefix.decode()}.{_unguessable()}"

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        if not self._inbox:
            self._inbox = self.new_inbox()
            await self.subscribe_direct(f"{self._inbox}.*", self._land)
        loop = asyncio.get_running_loop()
        token = f"{self._inbox}.{_unguessable()}"
        future: asyncio.Future[Msg] = loop.create_future()
        self._waiting[token] = future
        self._asked[token] = subject
        timer = loop.call_later(timeout, _expire, future, loop.time() + timeout)
        try:
            await self.publish(subject, payload, token, headers)
            return await future
        finally:
            timer.cancel()
            del self._waiting[token], self._asked[token]

    def denied(self, text: str) -> bool:
        """Fail the requests that a server's error says it refused; False if there are none."""
        found = DENIED.search(text)  # in small letters, as nats-py has made it
        subject = found[1].casefold() if found else None
        refused = [token for token, asked in self._asked.items() if asked.casefold() == subject]
        for token in refused:
            if not self._waiting[token].done():
                self._waiting[token].set_exception(PermissionDenied(self._asked[token]))
        return bool(refused)

    @property
    def server(self) -> str:
        """Host and port of the server of this connection, or of the last one."""
        url = self.connected_url
        return f"{url.hostname}:{url.port}" if url else "no server"

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Refuse a server that would have the rest sent in the clear where TLS was asked for."""
        assert self._current_server is not None
        wanted = "tls" in self.options or self._current_server.uri.scheme == "tls"
        if initial_connection and wanted and not info.get("tls_required"):
            raise NatsError(
                "the server does not ask for TLS, which nats.url or nats.tls_ca demands"
            )
        await super()._process_info(info, initial_connection)

    def _land(self, msg: Msg) -> None:
        future = self._waiting.get(msg.subject)
        if future is None or future.done():
            return
        if msg.headers is not None and msg.headers.get("Status") == "503":
            future.set_exception(NoRespondersError())
        else:
            future.set_result(msg)

    def _arrived(self, sid: int, subject: bytes, reply: bytes, data: bytes) -> bool:
        handle = self._handles.get(sid)
        if handle is None:
            return False
        if reply.startswith(STORED) and self._strays(sid):
            return True
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            handle(Msg(self, subject.decode(), reply.decode(), data))
        except Exception as error:
            complaint = asyncio.ensure_future(self._error_cb(error))
            self._complaints.add(complaint)
            complaint.add_done_callback(self._complaints.discard)
        return True

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if reply.startswith(STORED) and self._strays(sid):
            return
        handle = self._handles.get(sid)
        if handle is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            known = await self._process_headers(headers) if headers else None
            handle(Msg(self, subject.decode(), reply.decode(), data, known))
        except Exception as error:
            await self._error_cb(error)

    def _strays(self, sid: int) -> bool:
        """Whether what a consumer delivers went elsewhere than into an inbox: then it is dropped.

        The server lets whoever may read a stream have it delivered to any subject.
        """
        subscription = self._subs.get(sid)
        if subscription is None or subscription.subject.startswith(self._inbox_prefix.decode()):
            return False
        if sid not in self._astray:
            self._astray.add(sid)
            subject = subscription.subject
            log.warning("drop what a stream's consumer is told to deliver to %s", subject)
        return True

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._handles.pop(sid, None)
        self._astray.discard(sid)
        super()._remove_sub(sid, max_msgs)


def _unguessable() -> str:
    return secrets.token_hex(12)


def _expire(future: "asyncio.Future[Msg]", due: float) -> None:
    """End a wait. If this process did not run when it should have ended, the answer may have come
    meanwhile and still be to be read: uvloop runs timers first."""
    loop = future.get_loop()
    if future.done():
        return
    if loop.time() - due > LATE_S:
        loop.call_later(LATE_S, _expire, future, math.inf)
    else:
        future.set_exception(NatsTimeoutError())
