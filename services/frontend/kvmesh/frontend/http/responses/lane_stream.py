"""The answer to one request of a WebSocket, as frames among those of other lanes."""

import asyncio

from aiohttp import web

from kvmesh.frontend.apis.responses.socket import Frames
from kvmesh.frontend.http.sse import AnswerStream

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
