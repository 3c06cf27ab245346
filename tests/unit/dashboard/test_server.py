"""The server of the page: connections that strangers hold open."""

import asyncio

import pytest

pytest.importorskip("nicegui")

import uvicorn

from kvmesh.dashboard.http import server as servers
from kvmesh.dashboard.http.gate import Message, Receive, Send


async def app(scope: Message, receive: Receive, send: Send) -> None:
    """Answer with 204."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n\r\nGET /"])
async def test_connections_without_a_whole_request_are_closed(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "REQUEST_S", 0.1)
    listening = servers._listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, http=servers.PromptConnection, lifespan="off", log_config=None, access_log=False
    )
    server = servers._Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
    writer.write(head)
    await asyncio.wait_for(reader.read(), 3)  # until its end
    writer.close()
    server.should_exit = True
    await serving
