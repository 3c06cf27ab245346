"""nats-py's client with fewer task switches per message.

nats-py wakes a flusher task to publish and a subscription's task for every message, and wraps each
request in `wait_for`. Here one callback writes everything that one iteration of the event loop
publishes, a plain function receives a message as its bytes arrive, and a request is a future with
a timer. No other module touches nats-py's private parts. If these differ from what is expected, or
the connection is not plainly connected, nats-py's own path runs.
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

from kvmesh.bus.connection.protocol_parser import MessageParser
from kvmesh.bus.subjects import ROOT

log = logging.getLogger(__name__)
Handler = Callable[[Msg], None]
MAX_BUFFERED = 256 << 10
MAX_STARTS = 4096
KEPT = f"{ROOT}."  # inboxes are used once
CONSUMER_REPLY = b"$JS.ACK."  # prefix of the reply subject of a consumer's deliveries
LATE_S = 0.1  # a timer is this late only if the process was stopped or stalled
LARGE = 32 << 10  # payloads from this size on are not copied into a joined buffer
SEPARATORS = frozenset(" \t\r\n")
DENIED = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)


class PermissionDenied(NatsError):
    """The server does not permit this process to publish on `subject`."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nats: permissions violation for publish to {subject}")
        self.subject = subject


class DirectClient(Client):
    """A `Client` whose owner calls `on_connected` and `on_disconnected`."""

    def __init__(self) -> None:
        super().__init__()
        self._writer: asyncio.WriteTransport | None = None
        self._flush_planned = False
        self._own_loop = asyncio.get_running_loop()
        self._starts: dict[str, bytes] = {}  # of messages, by subject
        self._handlers: dict[int, Handler] = {}
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._requested: dict[str, str] = {}  # subjects of pending requests, by reply subject
        self._inbox = ""
        self._error_tasks: set[asyncio.Task[None]] = set()
        self._strays_logged: set[int] = set()  # subscription ids

    async def _connect_to_server(self, s: Srv) -> None:
        self.abandon()
        await super()._connect_to_server(s)

    def abandon(self) -> None:
        """Close the connection of a failed attempt; nats-py would leave it open."""
        if self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]
            bare = getattr(self._transport, "_bare_io_writer", None)
            if bare is not None:  # under TLS, closing waits for the server's reply
                bare.transport.abort()

    def on_connected(self) -> None:
        """Start the direct path: the connection is up and the server knows its subscriptions."""
        stream = getattr(self._transport, "_io_writer", None)
        self._writer = getattr(stream, "transport", None)
        reader = getattr(self._transport, "_io_reader", None)
        if isinstance(getattr(reader, "_buffer", None), bytearray):
            self._read_directly(reader)

    def _read_directly(self, reader: Any) -> None:
        """Parse messages ahead of the stream reader while nats-py's parser is between messages."""
        messages, parser, feed = MessageParser(self._on_message), self._ps, reader.feed_data

        def feed_data(data: bytes) -> None:
            at_rest = parser.state == AWAITING_CONTROL_LINE and not parser.buf
            if messages.has_partial or (at_rest and not reader._buffer):
                data = messages.feed(data)
            if data:
                feed(data)

        reader.feed_data = feed_data

    def on_disconnected(self) -> None:
        """Stop the direct path: the connection is gone."""
        self._writer = None

    def try_publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Send with the rest of this iteration of the loop; False if the caller must `publish`."""
        writer, size = self._writer, len(payload)
        if (
            writer is None
            or not self.is_connected
            or self._pending_data_size > MAX_BUFFERED
            or size > self._max_payload
            or not (start := self._starts.get(subject) or self._start_of(subject))
            or not (self._flush_planned or writer.get_write_buffer_size() <= MAX_BUFFERED)
        ):
            return False
        stats = self.stats
        stats["out_msgs"] += 1
        stats["out_bytes"] += size
        head = b"%b%b %d\r\n" % (start, reply.encode(), size)
        if size < LARGE:
            self._pending.append(b"%b%b\r\n" % (head, payload))
        else:
            self._pending += (head, payload, b"\r\n")
        self._pending_data_size += len(head) + size + 2
        if not self._flush_planned:
            self._flush_planned = True
            self._own_loop.call_soon(self._flush_directly)
        return True

    def _start_of(self, subject: str) -> bytes:
        """The bytes that begin each message on `subject`; empty if it is not a subject."""
        if not subject or not SEPARATORS.isdisjoint(subject):
            return b""
        start = b"PUB %b " % subject.encode()
        if subject.startswith(KEPT):
            if len(self._starts) >= MAX_STARTS:
                self._starts.clear()
            self._starts[subject] = start
        return start

    def _flush_directly(self) -> None:
        """Write the pending messages; nats-py sends those of an outage after it reconnects."""
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

    async def subscribe_direct(
        self, subject: str, handler: Handler, queue: str = ""
    ) -> Subscription:
        """Have the read loop call `handler`; its exceptions go to the error callback."""

        async def receive(msg: Msg) -> None:
            handler(msg)

        subscription = await self.subscribe(subject, queue=queue, cb=receive)
        self._handlers[subscription._id] = handler
        return subscription

    def new_inbox(self) -> str:
        """An unguessable subject; nats-py's own are consecutive numbers."""
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
            await self.subscribe_direct(f"{self._inbox}.*", self._on_reply)
        loop = asyncio.get_running_loop()
        reply_to = f"{self._inbox}.{_unguessable()}"
        future: asyncio.Future[Msg] = loop.create_future()
        self._waiting[reply_to] = future
        self._requested[reply_to] = subject
        timer = loop.call_later(timeout, _expire, future, loop.time() + timeout)
        try:
            await self.publish(subject, payload, reply_to, headers)
            return await future
        finally:
            timer.cancel()
            del self._waiting[reply_to], self._requested[reply_to]

    def fail_denied(self, text: str) -> bool:
        """Fail the requests that a server's error names as denied; False if there are none."""
        found = DENIED.search(text)  # nats-py has lowercased it
        subject = found[1].casefold() if found else None
        refused = [
            reply_to
            for reply_to, requested in self._requested.items()
            if requested.casefold() == subject
        ]
        for reply_to in refused:
            if not self._waiting[reply_to].done():
                error = PermissionDenied(self._requested[reply_to])
                self._waiting[reply_to].set_exception(error)
        return bool(refused)

    @property
    def is_clustered(self) -> bool:
        """True if the server is one of a cluster."""
        return "cluster" in self._server_info

    @property
    def server(self) -> str:
        """Host and port of the server of this connection, or of the last one."""
        url = self.connected_url
        return f"{url.hostname}:{url.port}" if url else "no server"

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Refuse a server without TLS where TLS was configured."""
        assert self._current_server is not None
        wanted = "tls" in self.options or self._current_server.uri.scheme == "tls"
        if initial_connection and wanted and not info.get("tls_required"):
            raise NatsError("the server does not offer TLS, which nats.url or nats.tls_ca demands")
        await super()._process_info(info, initial_connection)

    def _on_reply(self, msg: Msg) -> None:
        future = self._waiting.get(msg.subject)
        if future is None or future.done():
            return
        if msg.headers is not None and msg.headers.get("Status") == "503":
            future.set_exception(NoRespondersError())
        else:
            future.set_result(msg)

    def _on_message(self, sid: int, subject: bytes, reply: bytes, data: bytes) -> bool:
        handler = self._handlers.get(sid)
        if handler is None:
            return False
        if reply.startswith(CONSUMER_REPLY) and self._is_stray(sid):
            return True
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            handler(Msg(self, subject.decode(), reply.decode(), data))
        except Exception as error:
            task = asyncio.ensure_future(self._error_cb(error))
            self._error_tasks.add(task)
            task.add_done_callback(self._error_tasks.discard)
        return True

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if reply.startswith(CONSUMER_REPLY) and self._is_stray(sid):
            return
        handler = self._handlers.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            known = await self._process_headers(headers) if headers else None
            handler(Msg(self, subject.decode(), reply.decode(), data, known))
        except Exception as error:
            await self._error_cb(error)

    def _is_stray(self, sid: int) -> bool:
        """True if a consumer delivered to a subscription other than an inbox: drop the message.

        The server lets every reader of a stream choose any subject for the delivery.
        """
        subscription = self._subs.get(sid)
        if subscription is None or subscription.subject.startswith(self._inbox_prefix.decode()):
            return False
        if sid not in self._strays_logged:
            self._strays_logged.add(sid)
            subject = subscription.subject
            log.warning("dropping deliveries of a stream's consumer to %s", subject)
        return True

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._handlers.pop(sid, None)
        self._strays_logged.discard(sid)
        super()._remove_sub(sid, max_msgs)


def _unguessable() -> str:
    return secrets.token_hex(12)


def _expire(future: "asyncio.Future[Msg]", due: float) -> None:
    """Time out a request, later if this process did not run when the timer was due: the reply may
    have arrived but not been read, since uvloop runs timers first."""
    loop = future.get_loop()
    if future.done():
        return
    if loop.time() - due > LATE_S:
        loop.call_later(LATE_S, _expire, future, math.inf)
    else:
        future.set_exception(NatsTimeoutError())
