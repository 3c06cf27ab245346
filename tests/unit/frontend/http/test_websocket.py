"""WebSockets of a frontend without a mesh: openings, errors as events, bounds, ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType
from support.http_app import HttpApp, http_app
from support.wait import PATIENCE_S, eventually

from kvmesh.frontend.http.responses import websocket

KEY = "secret"
KEYED = {"Authorization": f"Bearer {KEY}"}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
Json = dict[str, Any]


@asynccontextmanager
async def connected(app: HttpApp, **headers: str) -> AsyncIterator[ClientWebSocketResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{app.url}/v1/responses", headers=headers) as ws,
    ):
        yield ws


async def event(ws: ClientWebSocketResponse) -> Json:
    found: Json = await ws.receive_json(timeout=PATIENCE_S)
    return found


async def test_what_is_wrong_is_an_event_and_the_connection_goes_on(tmp_path: Path) -> None:
    async with http_app(tmp_path) as app, connected(app) as ws:
        create = {"type": "response.create", "model": "m", "input": "x"}
        for sent, status, code, param in [
            ("{", 400, None, None),
            ("[]", 400, "invalid_type", None),
            ({"type": "response.creat"}, 400, "invalid_value", "type"),
            ({**create, "stream_id": ""}, 400, "invalid_stream_id", "stream_id"),
            (create, 404, "model_not_found", "model"),
            ({**create, "input": 7}, 400, "invalid_type", "input"),
            ({**create, "background": True}, 400, "invalid_value", "background"),
            ({**create, "previous_response_id": 7}, 400, "invalid_type", "previous_response_id"),
            ({**create, "prompt": {"id": "p"}}, 400, "invalid_value", "prompt"),
        ]:
            await ws.send_str(sent if isinstance(sent, str) else json.dumps(sent))
            found = await event(ws)
            assert (found["type"], found["status"]) == ("error", status), found
            assert (found["error"]["code"], found["error"]["param"]) == (code, param), found
            assert "stream_id" not in found
        await ws.send_json({"type": "response.processed", "response_id": "resp_1"})
        await ws.send_json({**create, "stream_id": "main"})
        assert (await event(ws))["stream_id"] == "main"
        await ws.send_json({"type": "response.steer", "previous_response_id": "r", "input": "x"})
        assert (await event(ws))["type"] == "response.steer.failed"
        await ws.send_bytes(json.dumps(create).encode())
        assert (await event(ws))["status"] == 404


async def test_a_connection_needs_a_key_and_each_request_as_well(tmp_path: Path) -> None:
    async with http_app(tmp_path, KEY) as app:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with connected(app, **headers):
                    raise AssertionError
            assert refused.value.status == 401
        async with connected(app, **KEYED) as ws:
            create = {"type": "response.create", "model": "m", "input": "x"}
            await ws.send_json(create)
            assert (await event(ws))["status"] == 404
            accounts = app.frontend.authenticator.accounts
            accounts.replace([], 0.0)
            await ws.send_json(create)
            found = await event(ws)
            assert (found["status"], found["error"]["code"]) == (401, "invalid_api_key")


async def test_a_page_of_another_origin_may_not_open_one(tmp_path: Path) -> None:
    async with http_app(tmp_path) as app:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connected(app, Origin="https://evil.example"):
                raise AssertionError
        assert refused.value.status == 403
        async with connected(app, Origin="http://localhost:3000") as ws:
            assert not ws.closed


async def test_a_handshake_that_is_none_is_answered(tmp_path: Path) -> None:
    async with http_app(tmp_path) as app, aiohttp.ClientSession() as session:
        for headers, status in (({}, 426), (UPGRADE, 400)):
            async with session.get(f"{app.url}/v1/responses", headers=headers) as answer:
                assert answer.status == status
                if status == 426:
                    assert answer.headers["Upgrade"] == "websocket"
                    assert (await answer.json())["error"]["code"] == "upgrade_required"


@pytest.mark.parametrize("settings", [{"websocket_idle_s": 0.2}, {}])
async def test_an_idle_or_old_connection_says_so_and_closes(
    tmp_path: Path, settings: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings:
        monkeypatch.setattr(websocket, "MAX_AGE_S", 0.2)
    async with http_app(tmp_path, **settings) as app, connected(app) as ws:
        found = await event(ws)
        assert found["error"]["code"] == "websocket_connection_limit_reached"
        assert (await ws.receive(timeout=PATIENCE_S)).type is WSMsgType.CLOSE
        assert ws.close_code == 1001


async def test_a_frontend_that_stops_closes_idle_connections(tmp_path: Path) -> None:
    async with http_app(tmp_path) as app, connected(app) as ws:
        await ws.send_json({"type": "response.create", "model": "m", "input": "x"})
        await event(ws)
        app.frontend.sockets.drain()
        assert (await event(ws))["error"]["code"] == "websocket_connection_limit_reached"
        assert (await ws.receive(timeout=PATIENCE_S)).type is WSMsgType.CLOSE
        async with connected(app) as other:
            assert (await event(other))["error"]["message"].startswith("The server is stopping.")


async def test_a_message_beyond_the_bound_closes_the_connection(tmp_path: Path) -> None:
    async with http_app(tmp_path, max_body_bytes=10_000) as app, connected(app) as ws:
        await ws.send_json({"type": "response.create", "model": "m", "input": "x" * 10_000})
        assert (await ws.receive(timeout=PATIENCE_S)).type is WSMsgType.CLOSE
        assert ws.close_code == 1009


async def test_a_client_that_floods_and_never_reads_is_cut_off(tmp_path: Path) -> None:
    async with http_app(tmp_path, slow_reader_s=0.2) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port, limit=1024)
        head = [
            *(
                "GET /v1/responses HTTP/1.1",
                "Host: localhost",
                "Sec-WebSocket-Key: " + "A" * 22 + "==",
            ),
            *(f"{name}: {value}" for name, value in UPGRADE.items()),
        ]
        writer.write("\r\n".join([*head, "", ""]).encode())
        frame = b"\x81\xfe" + (1000).to_bytes(2, "big") + bytes(4) + b"x" * 1000

        async def flood() -> None:
            while True:
                writer.write(frame * 100)
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flood(), PATIENCE_S)
        writer.close()
        assert reader


async def test_nothing_is_kept_of_a_closed_connection(tmp_path: Path) -> None:
    async with http_app(tmp_path) as app:
        async with connected(app) as ws:
            await ws.send_json({"type": "response.create", "model": "m", "input": "x"})
            await event(ws)
        await eventually(lambda: not app.frontend.sockets.count)
        assert app.frontend.sockets.kept.size == 0
