"""Connections whose client disconnects."""

import asyncio
import logging

import pytest
from aiohttp import web

from kvmesh.frontend.http.server import Runner


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_disconnects_is_not_logged_as_an_error(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if begun:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"one")
        raise ConnectionResetError("Cannot write to closing transport")

    app = web.Application()
    app.router.add_get("/", handle)
    runner = Runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with caplog.at_level(logging.INFO):
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await reader.read()
        writer.close()
    await runner.cleanup()
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_malformed_request_is_refused_in_a_sentence() -> None:
    runner = Runner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    await runner.cleanup()
    assert "Malformed HTTP request: Missing 'Host' header in request.\"" in answer
