"""The server of the page: connections that strangers hold open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("nicegui")

import uvicorn
from support.refusals import POST, REFUSED, answer_after
from support.wait import PATIENCE_S

from kvmesh.dashboard.http import server as servers
from kvmesh.dashboard.http.gate import Message, Receive, Send
from kvmesh.runtime.http.connection import MAX_DISCARDED


async def app(scope: Message, receive: Receive, send: Send) -> None:
    """Answer with 404."""
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def running() -> AsyncIterator[int]:
    """A server of `app`; yields its port."""
    listening = servers._listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, http=servers.PromptConnection, lifespan="off", log_config=None, access_log=False
    )
    server = servers._Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    yield listening.getsockname()[1]
    server.should_exit = True
    await serving


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n\r\nGET /"])
async def test_connections_without_a_whole_request_are_closed(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "REQUEST_S", 0.1)
    async with running() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        await asyncio.wait_for(reader.read(), 3)  # until its end
        writer.close()


@pytest.mark.parametrize(("head", "rest", "times"), REFUSED)
async def test_a_refused_request_is_answered_and_its_rest_bounded(
    head: bytes, rest: bytes, times: int
) -> None:
    async with running() as port:
        work = answer_after(port, head, rest, times)
        answer, sent = await asyncio.wait_for(work, PATIENCE_S)
    assert answer.startswith(b"HTTP/1.1 4")
    assert sent < MAX_DISCARDED + (32 << 20)


async def test_requests_on_one_connection_are_answered() -> None:
    async with running() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in (b"", b"x" * 1000, b""):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert b" 404 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        writer.close()
