"""nats-py's client with fewer task switches per message.

nats-py wakes a flusher task to publish and a subscription's task for every message, and wraps each
request in `wait_for`. Here one callback writes everything that one iteration of the event loop
publishes, a plain function receives a message as its bytes arrive, and a request is a future with
a timer. No other module touches nats-py's private parts. If these differ from what is expected, or
the connection is not plainly connected, nats-py's own path runs.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import ssl
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.protocol.command import unsub_cmd
from nats.protocol.parser import AWAITING_CONTROL_LINE

from kvmesh.bus.connection.ack_subject import PREFIX, in_older_layout
from kvmesh.bus.connection.api_errors import TOO_MANY_SUBSCRIPTIONS, with_limit
from kvmesh.bus.connection.login import WEBSOCKET, Login
from kvmesh.bus.connection.oversized import without_oversized
from kvmesh.bus.connection.protocol_parser import MessageParser
from kvmesh.bus.connection.refused.violations import PROBE_REPLY
from kvmesh.bus.errors import CredentialsUnusable, cause
from kvmesh.bus.promptness import LATE_S, Promptness
from kvmesh.bus.subjects import ROOT

log = logging.getLogger(__name__)
Handler = Callable[[Msg], None]
MAX_BUFFERED = 256 << 10
MAX_STARTS = 4096
KEPT = f"{ROOT}."  # inboxes are used once
CONSUMER_REPLY = PREFIX.encode()
REPEAT_S = 0.3  # replies to repeated requests arrive much sooner
REACH_S = 2.0  # for another server to accept a connection
MIN_WAIT_S, MAX_WAIT_S = 0.02, 0.1  # between two attempts: a hundredth of the outage so far
LONGEST_GRACE_S = 2.0  # for a reply, after this process has read late
LARGE = 32 << 10  # payloads from this size on are not copied into a joined buffer
SEPARATORS = frozenset(" \t\r\n")
# A server ends the connection at a longer line, by default of 4096 bytes; it has a reply subject,
# too. Names of other processes are parts of subjects.
MAX_SUBJECT = 3500
CONNECT, INFO, PONG, PING, ERROR = b"CONNECT ", b"INFO ", b"PONG", b"PING", b"-ERR"
SILENT = (
    "it accepts connections but sends nothing: if its tls block has handshake_first, set"
    " nats.tls_handshake_first"
)
TOO_LARGE = "maximum payload violation"
KEPT_OPEN = ("permissions violation", "stale connection")  # errors that nats-py handles well
# Errors of the server that end the connection; more within ENDS_S seconds are no passing fault.
MAX_ENDS, ENDS_S = 5, 30.0
REFUSED_S = 60.0  # a server may refuse the login for this long: credentials are renewed late
REFUSED_WAIT_S = 2.0


class PermissionDenied(NatsError):
    """The server does not permit this process to publish on `subject`, or it `listens` in vain."""

    def __init__(self, subject: str, listens: bool = False) -> None:
        kind = "subscription" if listens else "publish"
        super().__init__(f"nats: permissions violation for {kind} to {subject}")
        self.subject = subject
        self.listens = listens


class PayloadTooLarge(MaxPayloadError):
    """A message exceeds `limit`, which says whose limit that is."""

    def __init__(self, limit: str) -> None:
        super().__init__()
        self.limit = limit


class SubjectTooLong(NatsError):
    """A server would end the connection at this subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"{subject[:64]}… has {len(subject)} characters, more than {MAX_SUBJECT}")


class LoginRefused(NatsError):
    """The server refuses the login of this process, or the login has no usable credentials."""


class DirectClient(Client):
    """A `Client` whose owner calls `on_connected` and `on_disconnected`.

    An error of the server that ends the connection, such as an expired user, is followed by a login
    with the present credentials. `max_payload` is the one of the account or user from then on.
    """

    def __init__(self, login: Login) -> None:
        super().__init__()
        self._login = login
        self._greeted = False
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)  # times of errors that ended connections
        self._refused_since: float | None = None
        self._refusals = 0
        self._server_payload = 0  # the server's own limit; its accounts and users may have less
        self._sizes: dict[str, int] = {}  # of pending requests, by reply subject
        self.ended_by = ""  # the server's error that has ended the last connection
        self.on_too_large: Callable[[], None] = lambda: None
        self.is_foreign: Callable[[str, bytes], bool] = lambda subject, data: False
        self._writer: asyncio.WriteTransport | None = None
        self._flush_planned = False
        self._own_loop = asyncio.get_running_loop()
        self._lost_at = self._own_loop.time()
        self._starts: dict[str, bytes] = {}  # of messages, by subject
        self._handlers: dict[int, Handler] = {}
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._requested: dict[str, str] = {}  # subjects of pending requests, by reply subject
        self._repeated: dict[str, tuple[float, bytes]] = {}  # when sent and what, by reply subject
        self._due: dict[str, float] = {}  # of pending requests, by reply subject
        self._check: asyncio.TimerHandle | None = None  # one for all requests
        self._checks_at = math.inf
        self._inbox = ""
        self.inbox_refused = False  # then no reply arrives, and requests fail at once
        self._error_tasks: set[asyncio.Task[None]] = set()
        self.promptness = Promptness(self._round_trip)
        self._overdue: set[asyncio.Task[None]] = set()
        self._strays_logged: set[int] = set()  # subscription ids

    async def _connect_to_server(self, s: Srv) -> None:
        self.abandon()
        vars(self._transport or self).pop("readline", None)
        self._greeted = False
        await asyncio.sleep(self._login_delay)
        outage_s = self._own_loop.time() - self._lost_at
        self.options["reconnect_time_wait"] = min(max(outage_s / 100, MIN_WAIT_S), MAX_WAIT_S)
        if "tls" in self.options:
            try:
                self.options["tls"] = self._login.tls()
            except CredentialsUnusable as error:
                raise LoginRefused(str(error)) from error
        await super()._connect_to_server(s)

    def _connect_command(self) -> bytes:
        """CONNECT with the present credentials; its reply is read by `_read_login`.

        The account's limits come after the first PONG: a second PING shows when they have arrived.
        """
        assert self._current_server is not None
        assert self._transport is not None
        nonce = self._server_info.get("nonce") or ""
        try:
            fields = self._login.fields(nonce, self._current_server.uri.netloc)
        except CredentialsUnusable as error:
            raise LoginRefused(str(error)) from error
        options = json.loads(super()._connect_command().removeprefix(CONNECT))
        self._transport.readline = self._read_login  # type: ignore[method-assign]
        return CONNECT + json.dumps(options | fields).encode() + b"\r\nPING\r\n"

    async def _read_login(self) -> bytes:
        """The line that ends the login: the second PONG."""
        transport, pongs = self._transport, 0
        assert transport is not None
        del vars(transport)["readline"]
        while frame := await transport.readline():
            for line in frame.splitlines(keepends=True):  # a websocket frame has several
                if line.startswith(INFO):
                    await self._process_info(json.loads(line.removeprefix(INFO)))
                elif line.startswith(PING):
                    transport.write(b"PONG\r\n")
                elif line.startswith(ERROR):
                    raise LoginRefused(f"nats: {_error_text(line)}")
                elif line.startswith(PONG) and (pongs := pongs + 1) == 2:
                    return line
        raise NatsError("the server ended the connection during the login")

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except (TimeoutError, ssl.SSLError, NatsError) as error:
            if self._greeted:
                raise
            if self.options["tls_handshake_first"]:
                text = "no TLS handshake: unset nats.tls_handshake_first if it greets before"
                raise NatsError(f"{text} ({cause(error)})") from error
            raise NatsError(SILENT) from error
        except OSError as error:
            # the server may have said why before it closed the connection
            unread = bytes(getattr(getattr(self._transport, "_io_reader", None), "_buffer", b""))
            if (at := unread.find(ERROR)) >= 0:
                text = _error_text(unread[at:].partition(b"\r\n")[0])
                raise LoginRefused(f"nats: {text}") from error
            raise
        self._drop_oversized()

    def _drop_oversized(self) -> None:
        """Drop what waits to be sent and exceeds the limit of the new login, and log it."""
        kept, dropped = without_oversized(self._pending, self._max_payload)
        if dropped:
            log.warning("%d messages were dropped: they exceed %s", dropped, self.payload_limit)
            self._pending, self._pending_data_size = kept, sum(map(len, kept))

    def raise_limit(self, other: "DirectClient") -> None:
        """Take the limit of another connection of the same user, if that is higher."""
        if other._max_payload > self._max_payload:
            self._max_payload, self._server_payload = other._max_payload, other._server_payload
            log.info("the largest message is now %s", self.payload_limit)

    @property
    def payload_is_the_servers(self) -> bool:
        """False if the account or the user may send less than the server accepts."""
        return self._max_payload >= self._server_payload

    @property
    def server_has_jetstream(self) -> bool:
        return bool(self._server_info.get("jetstream"))

    @property
    def payload_limit(self) -> str:
        """The largest permitted message, and whose limit that is, as text."""
        owner = "server" if self.payload_is_the_servers else "account or user"
        return f"max_payload of the NATS {owner}, {self._max_payload} bytes"

    @property
    def _login_delay(self) -> float:
        """Seconds before the next login: none after one error of the server, more after others.

        In the second in which a JWT expires, a server accepts it and ends the connection again.
        """
        since = self._own_loop.time() - ENDS_S
        repeats = sum(ended > since for ended in self._ends) - 1
        return min(0.1 * self._refusals + 0.5 * max(repeats, 0), REFUSED_WAIT_S)

    def abandon(self) -> None:
        """Close the connection of a failed attempt; nats-py would leave it open."""
        if self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]
            bare = getattr(self._transport, "_bare_io_writer", None)
            if bare is not None:  # under TLS, closing waits for the server's reply
                bare.transport.abort()

    def discard(self) -> None:
        """Abandon a client that nobody will use.

        A connection made just as its attempt was cancelled would be made again, for ever.
        """
        self._status = Client.CLOSED
        for task in (
            *(self._reading_task, self._ping_interval_task, self._flusher_task),
            self._reconnection_task,
        ):
            if task is not None:
                task.cancel()
        self.abandon()

    async def abort(self) -> None:
        """Close without sending what is pending."""
        self._pending, self._pending_data_size = [], 0
        with contextlib.suppress(NatsError, OSError, RuntimeError):
            await self.close()

    def on_connected(self) -> None:
        """Start the direct path: the connection is up and the server knows its subscriptions."""
        self._refused_since, self._refusals = None, 0
        if self.ended_by == TOO_LARGE:
            self._fail_oversized()
        self.ended_by = ""
        stream = getattr(self._transport, "_io_writer", None)
        self._writer = getattr(stream, "transport", None)
        self._repeat_all()
        reader = getattr(self._transport, "_io_reader", None)
        if isinstance(getattr(reader, "_buffer", None), bytearray):
            self._read_directly(reader)

    def _fail_oversized(self) -> None:
        """Fail the requests that the server has refused as too large."""
        for reply_to, size in self._sizes.items():
            if size > self._max_payload and not self._waiting[reply_to].done():
                self._waiting[reply_to].set_exception(PayloadTooLarge(self.payload_limit))

    def _read_directly(self, reader: Any) -> None:
        """Parse messages ahead of the stream reader while nats-py's parser is between messages."""
        messages, parser, feed = MessageParser(self._on_message), self._ps, reader.feed_data
        heard = self.promptness.heard

        def feed_data(data: bytes) -> None:
            heard()
            at_rest = parser.state == AWAITING_CONTROL_LINE and not parser.buf
            if messages.has_partial or (at_rest and not reader._buffer):
                data = messages.feed(data)
            if data:
                feed(data)

        reader.feed_data = feed_data

    def on_disconnected(self) -> None:
        """Stop the direct path: the connection is gone."""
        self._writer = None
        self.promptness.disconnected()
        self._lost_at = self._own_loop.time()

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
        if not 0 < len(subject) <= MAX_SUBJECT or not SEPARATORS.isdisjoint(subject):
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
            if len(subject) > MAX_SUBJECT:
                raise SubjectTooLong(subject)
            if len(payload) + _header_bytes(headers) > self._max_payload:
                # nats-py does not count the headers, the server does
                self.on_too_large()
                raise PayloadTooLarge(self.payload_limit)
            await super().publish(subject, payload, reply, headers)

    async def subscribe(self, subject: str, *args: Any, **kwargs: Any) -> Subscription:
        if len(subject) > MAX_SUBJECT:
            raise SubjectTooLong(subject)
        return await super().subscribe(subject, *args, **kwargs)

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
        repeats: bool = False,
    ) -> Msg:
        """The first reply; `repeats`: to a request that is sent again, as a server may lose it.

        The time is over once what the server has for this process is read, too (`Promptness`).
        """
        if not self._inbox:
            self._inbox = self.new_inbox()
            await self.subscribe_direct(self.own_inbox, self._on_reply)
        if self.inbox_refused:
            raise PermissionDenied(self.own_inbox, listens=True)
        loop = asyncio.get_running_loop()
        reply_to = f"{self._inbox}.{_unguessable()}"
        future: asyncio.Future[Msg] = loop.create_future()
        self._waiting[reply_to] = future
        self._requested[reply_to] = subject
        self._sizes[reply_to] = len(payload)
        now = loop.time()
        self._due[reply_to] = now + timeout
        if repeats:
            self._repeated[reply_to] = now, payload
        self._check_by(now + (min(REPEAT_S, timeout) if repeats else timeout))
        try:
            await self.publish(subject, payload, reply_to, headers)
            return await future
        finally:
            if repeats:
                del self._repeated[reply_to]
            self._due.pop(reply_to, None)
            del self._waiting[reply_to], self._requested[reply_to], self._sizes[reply_to]

    def _expire(self, future: "asyncio.Future[Msg]") -> None:
        if not future.done():
            task = self._own_loop.create_task(self._expire_when_read(future), name="overdue")
            self._overdue.add(task)
            task.add_done_callback(self._overdue.discard)

    async def _expire_when_read(self, future: "asyncio.Future[Msg]") -> None:
        """Time out a request, unless its reply is among what this process has not read yet."""
        took = await self.promptness.caught_up()
        if took > LATE_S and not future.done():
            # the request may have left this process as late as that
            await asyncio.wait([future], timeout=min(took, LONGEST_GRACE_S))
        if not future.done():
            future.set_exception(NatsTimeoutError())

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        if future is None and self.promptness.silent_s < self.options["ping_interval"]:
            self._pings_outstanding = 0  # a server that has just sent something need not be asked
            return
        await super()._send_ping(future)

    async def _round_trip(self, timeout: float) -> None:
        await self.flush(timeout)  # type: ignore[arg-type]

    def _check_by(self, at: float) -> None:
        """Look at the pending requests at a time, or before it."""
        if at < self._checks_at:
            if self._check is not None:
                self._check.cancel()
            self._check, self._checks_at = self._own_loop.call_at(at, self._check_all), at

    def _check_all(self) -> None:
        """Time out the requests that are due, and repeat those without a reply for REPEAT_S.

        Nearly all have their reply long before: a timer for each would be work for nothing.
        """
        now = self._own_loop.time()
        self._check, self._checks_at = None, math.inf
        for reply_to in [each for each, due in self._due.items() if due <= now]:
            del self._due[reply_to]
            self._expire(self._waiting[reply_to])
        for reply_to, (sent_at, _) in list(self._repeated.items()):
            if now - sent_at >= REPEAT_S:
                self._publish_again(reply_to, now)
        repeats = (sent_at + REPEAT_S for sent_at, _ in self._repeated.values())
        self._check_by(min(chain(self._due.values(), repeats), default=math.inf))

    def _repeat_all(self) -> None:
        """Send all of these requests again: their replies were lost with the connection."""
        now = self._own_loop.time()
        for reply_to in self._repeated:
            self._publish_again(reply_to, now)

    def _publish_again(self, reply_to: str, now: float) -> None:
        """Send the same request; without a connection, that is left to the next one."""
        payload = self._repeated[reply_to][1]
        self._repeated[reply_to] = now, payload
        if not self._waiting[reply_to].done():
            self.try_publish(self._requested[reply_to], payload, reply_to)

    @property
    def own_inbox(self) -> str:
        """The subject of the replies to this connection's requests."""
        return f"{self._inbox}.*"

    @property
    def inbox_prefix(self) -> str:
        """The beginning of every inbox of this connection."""
        return f"{self._inbox_prefix.decode()}."

    def fail_denied(self, subject: str) -> bool:
        """Fail the requests on a denied subject, in any case; False if there are none."""
        refused = [
            reply_to
            for reply_to, requested in self._requested.items()
            if requested.casefold() == subject.casefold()
        ]
        for reply_to in refused:
            self._fail(reply_to, PermissionDenied(self._requested[reply_to]))
        return bool(refused)

    def fail_waiting(self, error: NatsError) -> None:
        """Fail every request that waits for its reply."""
        for reply_to in self._waiting:
            self._fail(reply_to, error)

    def _fail(self, reply_to: str, error: NatsError) -> None:
        if not self._waiting[reply_to].done():
            self._waiting[reply_to].set_exception(error)

    def subscriptions(self, subject: str = "", sid: int | None = None) -> dict[int, str]:
        """The subjects of the subscriptions by id: all, those on `subject` in any case, or one."""
        return {
            known: each.subject
            for known, each in self._subs.items()
            if sid in (None, known) and subject.casefold() in ("", each.subject.casefold())
        }

    async def subscribe_again(self, sid: int) -> None:
        """Repeat a subscription that the server has dropped, or may have."""
        subscription = self._subs.get(sid)
        if subscription is not None:
            await self._send_subscribe(subscription)

    async def probe(self, subject: str) -> None:
        """Have the server say, by one of two errors, whether this process may publish on `subject`.

        It delivers the message to nobody: it checks the subject first and then refuses the reply
        subject, whose prefix is its own.
        """
        await self.publish(subject, b"", f"{PROBE_REPLY}{_unguessable()}")

    async def probe_subscription(self, subject: str) -> None:
        """Subscribe, and end it at once: the server reports a subject that it refuses."""
        self._sid += 1
        await self._send_command(
            b"SUB %b  %d\r\nUNSUB %d\r\n" % (subject.encode(), self._sid, self._sid)
        )

    async def round_trip(self) -> None:
        """Return once the server has handled all that was sent before.

        nats-py's PING overtakes what waits for its flusher, so only a second one follows it.
        """
        await self.flush()
        await self.flush()

    def spelled(self, subject: str) -> str:
        """A subject of a late request or message as this process spells it; empty if unknown."""
        known = (*self._requested.values(), *self._starts)
        return next((each for each in known if each.casefold() == subject.casefold()), "")

    @property
    def server(self) -> str:
        """Host and port of the server of this connection, or of the last one."""
        url = self.connected_url
        return f"{url.hostname}:{url.port}" if url else "no server"

    @property
    def is_clustered(self) -> bool:
        """True if the server of this connection is one of a cluster.

        A leaf node alone calls itself a cluster of its own name.
        """
        cluster = self._server_info.get("cluster")
        return bool(cluster) and cluster != self._server_info.get("server_name")

    @property
    def awaits_replies(self) -> bool:
        """True while a reply is pending."""
        return bool(self._waiting)

    async def reaches_another_server(self) -> bool:
        """True if another server of the pool accepts connections now."""
        for server in self._server_pool:
            host, port = server.uri.hostname, server.uri.port
            if server is self._current_server or host is None:
                continue
            with contextlib.suppress(OSError):  # a TimeoutError is one
                async with asyncio.timeout(REACH_S):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return True
        return False

    async def leave_server(self) -> None:
        """Reconnect to another server, after all that this one has for this process.

        A request to this process is from now on refused, not lost, until it listens again.
        """
        if not self.is_connected or self._transport is None:
            return
        for sid in self._subs:
            self._transport.write(unsub_cmd(sid, 0))
        try:
            await self.flush()
        finally:
            await self.force_reconnect()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Refuse a server whose TLS is not as configured; follow limits that change later."""
        assert self._current_server is not None
        own = self._current_server.uri
        if initial_connection:
            self._greeted = True
            wanted = "tls" in self.options or own.scheme in ("tls", "wss")
            if wanted and not info.get("tls_required"):
                raise NatsError(
                    "the server does not offer TLS, which nats.url or nats.tls_ca demands"
                )
            if info.get("tls_verify") and not self._login.has_certificate:
                raise LoginRefused(
                    "the server requires a certificate: set nats.tls_cert and nats.tls_key"
                )
            self._server_payload = info.get("max_payload", self._max_payload)
        else:
            self._max_payload = info.get("max_payload", self._max_payload)
        await super()._process_info(info, initial_connection)
        if own.scheme in WEBSOCKET:  # nats-py takes the others for servers without websockets
            for server in self._server_pool:
                if server.discovered:
                    server.uri = server.uri._replace(scheme=own.scheme)

    async def _process_err(self, err_msg: str) -> None:
        """Log in again after an error that ends the connection; nats-py would close it for good."""
        text = _error_text(err_msg.encode())
        if text.startswith(KEPT_OPEN) or not self.is_connected:
            await super()._process_err(err_msg)
            return
        if text == TOO_MANY_SUBSCRIPTIONS:  # another login would meet the same
            self.give_up(NatsError(with_limit(text)))
            return
        self.ended_by = text
        now = self._own_loop.time()
        self._ends.append(now)
        if len(self._ends) == MAX_ENDS and now - self._ends[0] < ENDS_S:
            self.give_up(NatsError(f"{text}, {MAX_ENDS} times within {ENDS_S:g} s"))
            return
        await self._process_op_err(NatsError(f"nats: {text}"))

    def refused(self, error: LoginRefused) -> None:
        """A server has refused a login after the first one; give up after REFUSED_S seconds."""
        now = self._own_loop.time()
        self._refusals += 1
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > REFUSED_S:
            self.give_up(error)

    def give_up(self, error: NatsError) -> None:
        """Close the connection for good; `last_error` is the reason."""
        self._err = error
        task = asyncio.ensure_future(self._close(Client.CLOSED, True))
        self._error_tasks.add(task)
        task.add_done_callback(self._error_tasks.discard)

    def _on_reply(self, msg: Msg) -> None:
        future = self._waiting.get(msg.subject)
        if future is None or future.done():
            return
        if msg.headers is not None and msg.headers.get("Status") == "503":
            future.set_exception(NoRespondersError())
        elif not (msg.data[:1] == b"{" and self.is_foreign(self._requested[msg.subject], msg.data)):
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
            if reply.startswith(CONSUMER_REPLY):
                reply = in_older_layout(reply)
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


def _error_text(line: bytes) -> str:
    """The text of an -ERR line, without its quotes."""
    return line.decode(errors="replace").strip().removeprefix("-ERR").strip(" '")


def _header_bytes(headers: dict[str, Any] | None) -> int:
    """The size of headers on the wire."""
    if not headers:
        return 0
    pairs = (f"{name}: {value}\r\n" for name, value in headers.items())
    return len(b"NATS/1.0\r\n\r\n") + sum(len(pair.encode()) for pair in pairs)


def _unguessable() -> str:
    return os.urandom(12).hex()
