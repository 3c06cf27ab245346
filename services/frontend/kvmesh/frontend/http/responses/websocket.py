"""Responses over WebSockets: each `response.create` is a request like a POST, without its head."""

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import msgspec
from aiohttp import WSMsgType, hdrs, web

from kvmesh.bus.messages import owner
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import json_encode
from kvmesh.frontend.apis.responses import socket
from kvmesh.frontend.apis.responses.socket import Frames
from kvmesh.frontend.apis.responses.thread import KeptConversation
from kvmesh.frontend.errors import ApiError, InvalidRequest, UpgradeRequired
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.http.generate import GenerateEndpoint
from kvmesh.frontend.http.middleware import RequestMiddleware, caller_of
from kvmesh.frontend.http.responses.lanes import Lanes
from kvmesh.frontend.http.sse import AnswerStream
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.fair_lru import FairLru
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)
METHOD = "WEBSOCKET"  # of the requests, in logs and traces
MAX_AGE_S = 3600.0
GOING_AWAY = 1001
MESSAGE_BYTES = 1000  # about, of a message of a conversation beside its text
SIZE = 4  # times the bytes of a conversation: its messages, and what their memo holds of them
SENT_BACK = (hdrs.RETRY_AFTER, "X-Should-Retry")
Key = tuple[str, str]  # connection and response
PING = b"\x89\x00"  # of RFC 6455: what keeps a connection alive without being an event


class LaneStream(AnswerStream):
    """Writes the events of an answer to a connection, whose buffer all its lanes share."""

    def __init__(self, http: web.Request, frames: Frames, lane: str) -> None:
        super().__init__()
        self._http = http
        self._frames = frames
        self._lane = lane

    async def _begin(self) -> asyncio.Transport | None:
        return self._http.transport

    async def _send_first(self, frames: bytes) -> None:
        self.write(frames)

    def _on_the_wire(self, frame: bytes) -> bytes:
        return self._frames.of(frame, self._lane) or PING

    async def close(self, last: bytes) -> web.StreamResponse:
        self.write(last)
        await self._http.writer.drain()  # the lane's next answer waits, too
        return web.Response()


class _Create(NamedTuple):
    """A `response.create`: its body, and what the connection has of the conversation."""

    body: bytes
    headers: dict[str, str]
    previous: str | None
    kept: KeptConversation | None


class Sockets:
    """The open WebSockets of this frontend, and what they keep of conversations."""

    def __init__(self, max_bytes: int) -> None:
        self.kept: FairLru[Key, KeptConversation] = FairLru(max_bytes, _size)
        self._open: set[SocketConnection] = set()
        self._draining = False

    @property
    def count(self) -> int:
        """Open connections."""
        return len(self._open)

    @contextmanager
    def opened(self, connection: "SocketConnection") -> Iterator[None]:
        """Count a connection as open."""
        self._open.add(connection)
        metrics.websockets.inc()
        if self._draining:
            connection.retire("The server is stopping.")
        try:
            yield
        finally:
            self._open.discard(connection)
            metrics.websockets.dec()

    def drain(self) -> None:
        """Close each connection once its responses have ended."""
        self._draining = True
        for connection in list(self._open):
            connection.retire("The server is stopping.")


def _size(_: Key, kept: KeptConversation) -> int:
    return SIZE * kept.size + MESSAGE_BYTES * (1 + len(kept.messages))


class SocketEndpoint:
    """Opens WebSockets on the path of responses."""

    def __init__(
        self,
        generate: GenerateEndpoint,
        middleware: RequestMiddleware,
        settings: FrontendSettings,
        threads: FairThreads,
        sockets: Sockets,
    ) -> None:
        self.generate = generate
        self.middleware = middleware
        self.settings = settings
        self.threads = threads
        self.sockets = sockets

    async def open(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get(hdrs.UPGRADE, "").lower() != "websocket":
            raise UpgradeRequired(http.path)
        ws = web.WebSocketResponse(max_msg_size=self.settings.max_body_bytes, decode_text=False)
        if not ws.can_prepare(http):
            raise InvalidRequest("The headers are not those of a WebSocket's opening handshake.")
        await ws.prepare(http)
        connection = SocketConnection(self, http, ws)
        with self.sockets.opened(connection):
            try:
                await connection.run()
            except asyncio.CancelledError:
                if http.transport is not None:
                    raise
                # the client has left without a word, as most do: no request was cut off by that
        return ws


class SocketConnection:
    """One WebSocket: reads events, and runs the requests of its lanes.

    It is *retired* at its greatest age, when nothing has happened for long, and when the frontend
    stops: then it takes no requests, and closes once its responses have ended.
    """

    def __init__(
        self, endpoint: SocketEndpoint, http: web.Request, ws: "web.WebSocketResponse[bool]"
    ) -> None:
        self._endpoint = endpoint
        self._http = http
        self._ws = ws
        agreed = ws.headers.get(hdrs.SEC_WEBSOCKET_EXTENSIONS, "")
        self._frames = socket.Frames(int(ws.compress), "server_no_context_takeover" in agreed)
        self._id = secrets.token_hex(8)
        self._owner = owner(caller_of(http).tenant)
        self._lanes = Lanes[_Create](endpoint.settings.max_body_bytes)
        self._latest: dict[str, str] = {}  # the kept response of each lane
        self._tasks = BackgroundTasks()
        self._loop = asyncio.get_running_loop()
        self._used_at = self._loop.time()
        self._retired = ""
        self._closing = False

    async def run(self) -> None:
        """Serve until either side closes the connection."""
        age = self._loop.call_later(
            MAX_AGE_S, self.retire, f"The connection is {MAX_AGE_S / 60:.0f} minutes old."
        )
        self._idle = self._loop.call_later(self._endpoint.settings.websocket_idle_s, self._look)
        try:
            while True:
                message = await self._ws.receive()
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                self._used_at = self._loop.time()
                await self._receive(message.data)
        finally:
            age.cancel()
            self._idle.cancel()
            await self._tasks.close()
            for response_id in self._latest.values():
                self._endpoint.sockets.kept.pop(self._owner, (self._id, response_id))

    def retire(self, reason: str) -> None:
        self._retired = self._retired or reason
        self._close_if_idle()

    def _look(self) -> None:
        """Retire if nothing has happened for long; else look again when that may be so."""
        idle_s = self._endpoint.settings.websocket_idle_s
        left = idle_s if not self._lanes.idle else self._used_at + idle_s - self._loop.time()
        if left > 0:
            self._idle = self._loop.call_later(left, self._look)
        else:
            self.retire(f"Nothing was sent for {idle_s:.0f} seconds.")

    def _close_if_idle(self) -> None:
        if self._retired and self._lanes.idle and not self._closing:
            self._closing = True
            self._write(socket.refusal(self._refusal(), ""))
            self._tasks.start(self._ws.close(code=GOING_AWAY), "close of a WebSocket")

    def _refusal(self) -> ApiError:
        """The error on which clients open another connection."""
        reason = f"{self._retired} Open another connection."
        return InvalidRequest(reason, code="websocket_connection_limit_reached")

    async def _receive(self, data: bytes) -> None:
        lane = ""
        try:
            event = await self._decoded(data)
            lane = event.lane
            if event.type == socket.STEER:
                self._write(socket.steer_failed(event))
            elif event.type == socket.CREATE:
                self._add(lane, event, data)
                return
            elif event.type not in socket.SILENT:
                reason = f"`type`: the server takes events of the type `{socket.CREATE}`."
                raise InvalidRequest(reason, "type")
        except ApiError as error:
            metrics.rejections.labels(error.kind).inc()
            self._write(socket.refusal(error, lane))
        await self._drained()

    async def _decoded(self, data: bytes) -> socket.ClientEvent:
        if len(data) < LARGE:
            return socket.client_event(data)
        threads, caller = self._endpoint.threads, caller_of(self._http)
        return await threads.call(caller.owner, lambda: socket.client_event(data))

    def _add(self, lane: str, event: socket.ClientEvent, data: bytes) -> None:
        if self._retired:
            raise self._refusal()
        previous = event.previous_response_id
        kept = None
        if isinstance(previous, str):
            kept = self._endpoint.sockets.kept.get(self._owner, (self._id, previous))
        else:
            previous = None
        self._lanes.add(lane, _Create(data, event.headers, previous, kept), len(data))
        self._begin()

    def _begin(self) -> None:
        for lane, request in self._lanes.take():
            self._tasks.start(self._serve(lane, request), "lane of a WebSocket")

    async def _serve(self, lane: str, create: _Create) -> None:
        """Answer one request, as POST does, but by events of its lane."""
        stream = LaneStream(self._http, self._frames, lane)

        async def read(_: web.Request) -> bytes:
            return create.body

        api = socket.SocketResponses(create.kept, partial(self._keep, lane))
        handler = self._endpoint.generate.handler(api, lambda _: stream, read)
        status = 500
        try:
            answer = await self._endpoint.middleware(self._request(create), handler)
            status = answer.status
            if status >= 400 and isinstance(answer, web.Response):
                self._write(_refused(answer, lane))
                await self._drained()
        except ConnectionError:
            log.debug("a WebSocket ended during a response")
        finally:
            if (status >= 400 or stream.failed) and create.previous == self._latest.get(lane, ""):
                del self._latest[lane]  # as OpenAI's: the client sends the whole conversation
                self._endpoint.sockets.kept.pop(self._owner, (self._id, create.previous))
            self._used_at = self._loop.time()
            self._lanes.end(lane)
            self._begin()
            self._close_if_idle()

    def _request(self, create: _Create) -> web.Request:
        """The request that an event stands for: the one that opened the connection, once more."""
        http = self._http
        if create.headers:
            headers = http.headers.copy()
            headers.update(create.headers)
            request = http.clone(method=METHOD, headers=headers)
        else:
            request = http.clone(method=METHOD)
        request._match_info = http._match_info
        return request

    def _keep(self, lane: str, response_id: str, kept: KeptConversation) -> None:
        before = self._latest.get(lane)
        self._latest[lane] = response_id
        store = self._endpoint.sockets.kept
        if before is not None:
            store.pop(self._owner, (self._id, before))
        store.put(self._owner, (self._id, response_id), kept)

    def _write(self, text: bytes) -> None:
        transport = self._http.transport
        if transport is not None and not transport.is_closing():
            transport.write(self._frames.text(text))

    async def _drained(self) -> None:
        """Wait until the client reads what it was sent, or abort the connection."""
        try:
            async with asyncio.timeout(self._endpoint.settings.slow_reader_s):
                await self._http.writer.drain()
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()


class _Refused(msgspec.Struct):
    error: dict[str, object]


def _refused(answer: web.Response, lane: str) -> bytes:
    """The event for an HTTP response with an error."""
    body = answer.body if isinstance(answer.body, bytes) else json_encode({"error": {}})
    error = msgspec.json.decode(body, type=_Refused).error
    headers = {name: text for name, text in answer.headers.items() if name in SENT_BACK}
    return socket.error_event(error, answer.status, lane, headers)
