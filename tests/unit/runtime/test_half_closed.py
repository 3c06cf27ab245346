"""A client that ends its side behind a request gets its answer; one that has left is noticed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress

import pytest
from aiohttp import web

from kvmesh.runtime.http.connection import SOON_S, RefusingRunner

TIMEOUT_S = 10.0
BODY = b"POST /whole HTTP/%b\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
TICKS = b"GET /ticks HTTP/1.1\r\nHost: x\r\n\r\n"
WAYS = [b"1.0", b"1.1"]
Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Handlers:
    """An answer waits until it is let go; those whose clients have left are counted."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.left = asyncio.Event()

    async def whole(self, http: web.Request) -> web.StreamResponse:
        try:
            body = await http.read()
            self.begun.set()
            await self.go.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        return web.Response(body=b"got " + body)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        self.begun.set()
        await self.go.wait()
        await response.write(b"streamed")
        return response

    async def ticks(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        self.begun.set()
        try:
            while True:
                await response.write(b"tick")
                await asyncio.sleep(0.01)
        finally:
            self.left.set()


@pytest.fixture
async def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def connect(handlers: Handlers) -> AsyncIterator[Open]:
    app = web.Application()
    app.router.add_post("/whole", handlers.whole)
    app.router.add_get("/stream", handlers.stream)
    app.router.add_get("/ticks", handlers.ticks)
    runner = RefusingRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield lambda: asyncio.open_connection("127.0.0.1", port)
    handlers.go.set()
    await runner.cleanup()


@pytest.mark.parametrize("version", WAYS)
@pytest.mark.parametrize("late", [False, True])
async def test_a_client_that_has_ended_its_side_gets_the_whole_answer(
    handlers: Handlers, connect: Open, version: bytes, late: bool
) -> None:
    reader, writer = await connect()
    writer.write(BODY % version + b"text")
    if late:
        await handlers.begun.wait()
    writer.write_eof()
    await handlers.begun.wait()
    handlers.go.set()
    answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    assert answer.endswith(b"got text")
    assert not handlers.left.is_set()
    writer.close()


async def test_requests_that_wait_are_answered_too(handlers: Handlers, connect: Open) -> None:
    reader, writer = await connect()
    writer.write((BODY % b"1.1" + b"text") * 3)
    writer.write_eof()
    handlers.go.set()
    answers = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    assert answers.count(b"got text") == 3
    writer.close()


@pytest.mark.parametrize("version", WAYS)
async def test_a_stream_goes_on(handlers: Handlers, connect: Open, version: bytes) -> None:
    reader, writer = await connect()
    writer.write(b"GET /stream HTTP/%b\r\nHost: x\r\n\r\n" % version)
    writer.write_eof()
    await handlers.begun.wait()
    handlers.go.set()
    assert b"streamed" in await asyncio.wait_for(reader.read(), TIMEOUT_S)
    writer.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("request_", [BODY % b"1.1" + b"text", TICKS])
@pytest.mark.parametrize("relayed", [False, True])
async def test_a_client_that_has_left_is_noticed(
    handlers: Handlers, connect: Open, request_: bytes, late: bool, relayed: bool
) -> None:
    async with relay(connect) if relayed else nullcontext(connect) as open_connection:
        _, writer = await open_connection()
        writer.write(request_)
        await handlers.begun.wait()
        if late:
            await asyncio.sleep(1.5 * SOON_S)
        writer.close()
        await asyncio.wait_for(handlers.left.wait(), TIMEOUT_S)


async def test_a_proxy_that_speaks_http_1_0_and_leaves_is_noticed(
    handlers: Handlers, connect: Open
) -> None:
    _, writer = await connect()
    writer.write(BODY % b"1.0" + b"text")
    await handlers.begun.wait()
    await asyncio.sleep(1.5 * SOON_S)
    writer.close()
    await asyncio.wait_for(handlers.left.wait(), TIMEOUT_S)


@asynccontextmanager
async def relay(connect: Open) -> AsyncIterator[Open]:
    """Passes on bytes and the end of each side, as Docker's proxy of ports does."""

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await connect()
        with suppress(OSError):
            await asyncio.gather(passed(reader, to_server), passed(from_server, writer))
        for side in (writer, to_server):
            side.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield lambda: asyncio.open_connection(host, port)
    server.close()


async def test_a_body_that_is_cut_is_no_request(handlers: Handlers, connect: Open) -> None:
    reader, writer = await connect()
    writer.write(BODY % b"1.1" + b"te")
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
    assert not handlers.begun.is_set()
    writer.close()


async def test_an_idle_connection_is_closed(connect: Open) -> None:
    reader, writer = await connect()
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
    writer.close()
