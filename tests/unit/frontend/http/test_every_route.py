"""Every route of a frontend: wrong methods, near-miss paths, keys, and pages of other origins."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.attack import Reply, check_error
from support.http_app import HttpApp, http_app

from kvmesh.frontend.http.intake.unrouted import nearest
from kvmesh.frontend.http.routes import UNRESTRICTED

pytestmark = pytest.mark.asyncio(loop_scope="module")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
KEY = "secret"
ORIGIN = "https://app.example"
KEYED = {"Authorization": f"Bearer {KEY}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpApp]:
    async with http_app(tmp_path_factory.mktemp("open")) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpApp]:
    """It needs a key, and pages of `ORIGIN` may call it."""
    folder = tmp_path_factory.mktemp("locked")
    async with http_app(folder, KEY, cors_origins=[ORIGIN]) as served:
        yield served


async def ask(app: HttpApp, method: str, path: str, **headers: str) -> Reply:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, app.url + path, headers=headers) as answer,
    ):
        found = {name.lower(): value for name, value in answer.headers.items()}
        return Reply(answer.status, found, await answer.read())


def paths(app: HttpApp) -> list[tuple[str, frozenset[str]]]:
    return [
        (path.replace("{id}", "some").replace("{item}", "one"), methods)
        for path, methods in app.routes.items()
    ]


def wrong(app: HttpApp) -> list[tuple[str, str, list[str]]]:
    """Methods that paths lack, with those that they have."""
    found = []
    for path, methods in paths(app):
        found += [(path, m, sorted(methods)) for m in METHODS if m not in methods]
    also_ids = ("/v1/responses/input_tokens", "/v1/responses/compact")
    return [each for each in found if each[0] not in also_ids]


async def test_a_method_that_a_path_lacks_is_answered_with_those_it_has(app: HttpApp) -> None:
    assert len(app.routes) > 20
    for path, method, allowed in wrong(app):
        reply = await ask(app, method, path)
        assert (reply.status, reply.headers["allow"]) == (405, ", ".join(allowed)), (method, path)
        if method != "HEAD":
            check_error(path, reply)


async def test_a_websocket_is_refused_so_that_clients_go_on_with_http(
    app: HttpApp, tmp_path: Path
) -> None:
    """Codex tries one first, and takes no other status for a final answer."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "WebSocket", "Sec-WebSocket-Version": "13"}
    async with http_app(tmp_path, websocket_bytes=0) as without:
        reply = await ask(without, "GET", "/v1/responses", **upgrade)
    replies = {
        "/v1/responses": reply,
        "/v1/messages": await ask(app, "GET", "/v1/messages", **upgrade),
    }
    for path, reply in replies.items():
        assert (reply.status, reply.headers["upgrade"]) == (426, "HTTP/1.1")
        assert reply.headers["allow"] == "POST"
        check_error(path, reply)
    assert (await ask(app, "GET", "/v1/nowhere", **upgrade)).status == 404


async def test_a_target_without_a_path_has_an_error_too(app: HttpApp) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
    writer.write(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 404")
    assert json.loads(body)["error"]["code"] == "unknown_url"


async def test_a_key_comes_before_the_method(locked: HttpApp) -> None:
    for path, method, allowed in wrong(locked):
        public = path in UNRESTRICTED
        reply = await ask(locked, method, path)
        assert reply.status == (405 if public else 401), (method, path)
        reply = await ask(locked, method, path, **KEYED)
        assert (reply.status, reply.headers["allow"]) == (405, ", ".join(allowed))


async def test_every_route_but_the_probes_needs_a_key(locked: HttpApp) -> None:
    for path, methods in paths(locked):
        for method in methods:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                reply = await ask(locked, method, path, **headers)
                assert (reply.status == 401) == (path not in UNRESTRICTED), (method, path)
                if reply.status == 401 and method != "HEAD":
                    check_error(path, reply)


@pytest.mark.parametrize(
    "headers",
    [
        KEYED,
        {"x-api-key": KEY},
        {"Authorization": f"Bearer {KEY}", "x-api-key": "dummy"},
        {"Authorization": "Bearer dummy", "x-api-key": KEY},
        {"Authorization": "Bearer ", "x-api-key": KEY},
        {"Authorization": "Basic eDp5", "x-api-key": KEY},
    ],
)
async def test_one_valid_key_of_two_is_enough(locked: HttpApp, headers: dict[str, str]) -> None:
    assert (await ask(locked, "GET", "/v1/models", **headers)).status == 200


def near_misses(path: str) -> list[str]:
    """The paths that clients make of one by a wrong base URL or a slip."""
    made = [f"{path}/", f"/{path}", f"/api{path}", f"/v1{path}", f"/v1/v1{path}", f"{path}//"]
    made += [path.upper(), path.title(), path.removeprefix("/v1"), path.replace("/v1", "/v2", 1)]
    stem, _, last = path.rpartition("/")
    if len(last) > 4:
        made += [f"{stem}/{last[:-1]}", f"{stem}/{last}s", f"{stem}/{last[1]}{last[0]}{last[2:]}"]
    return [each for each in made if each != path]


async def test_a_near_miss_names_the_path(app: HttpApp) -> None:
    patterns = list(app.routes)
    for pattern in patterns:
        if pattern == "/":
            continue
        path = pattern.replace("{id}", "resp_1")
        for missed in near_misses(path):
            found = nearest(missed, patterns)
            assert found is not None, missed
            assert found.lower() == path.lower() or found in missed, (missed, found, path)
    for missed in ("/v1/v1/messages", "/messages", "/v1/messages/", "/V1/Messages"):
        reply = await ask(app, "POST", missed)
        assert (reply.status, b"did you mean /v1/messages? See" in reply.body) == (404, True)
        check_error(missed, reply)
    reply = await ask(app, "POST", "/chat/completions")
    error: Any = reply.json()["error"]
    assert (error["code"], "/v1/chat/completions?" in error["message"]) == ("unknown_url", True)


async def test_an_unknown_path_has_no_near_one(app: HttpApp) -> None:
    for path in (
        "/",
        "/favicon.ico",
        "/v1/images/edits",
        "/v1/audio/speech",
        "/a" * 40,
        "/x" * 999,
    ):
        assert nearest(path, list(app.routes)) is None, path
    assert (await ask(app, "GET", "/favicon.ico")).status == 404


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
async def test_an_error_has_the_shape_of_the_path_s_api(
    app: HttpApp, headers: dict[str, str]
) -> None:
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/completions", "/v1/responses"):
        for body in (b"{", b""):
            async with (
                aiohttp.ClientSession() as session,
                session.post(app.url + path, data=body, headers=headers) as answer,
            ):
                reply = Reply(answer.status, {}, await answer.read())
            assert reply.status == 400
            check_error(path, reply)
    anthropic = b'"type":"error"' in (await ask(app, "GET", "/v1/nothing", **headers)).body
    assert anthropic == bool(headers)


# --- pages of other origins ---

EXPOSED = {"x-request-id", "request-id", "retry-after", "x-should-retry"}


def check_readable(reply: Reply, origin: str = ORIGIN) -> None:
    assert reply.headers["access-control-allow-origin"] == origin
    exposed = reply.headers["access-control-expose-headers"].lower().split(", ")
    assert set(exposed) == EXPOSED
    assert "access-control-allow-credentials" not in reply.headers


async def test_a_page_of_an_allowed_origin_may_call_every_route(locked: HttpApp) -> None:
    for path, methods in paths(locked):
        for method in methods:
            asked = {
                "Origin": ORIGIN,
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": "authorization,x-stainless-os",
            }
            reply = await ask(locked, "OPTIONS", path, **asked)
            assert (reply.status, reply.body) == (204, b"")
            assert reply.headers["access-control-allow-methods"] == method
            assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
            check_readable(reply)
            check_readable(await ask(locked, method, path, Origin=ORIGIN))  # its 401, mostly
    check_readable(await ask(locked, "POST", "/nowhere", Origin=ORIGIN, **KEYED))


@pytest.mark.parametrize("origin", ["https://other.example", "null", f"{ORIGIN}.evil", ""])
async def test_a_page_of_another_origin_may_not(locked: HttpApp, origin: str) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for path, _ in paths(locked):
        for headers in (asked, {**asked, **KEYED}):
            reply = await ask(locked, "OPTIONS", path, **headers)
            assert reply.status in (401, 405)
            assert "access-control-allow-origin" not in reply.headers
            assert "Origin" in reply.headers["vary"]


async def test_without_the_setting_no_page_may(app: HttpApp) -> None:
    for origin in (ORIGIN, "http://localhost:3000"):
        reply = await ask(app, "GET", "/live", Origin=origin)
        assert not any(name.startswith("access-control") for name in reply.headers)
    reply = await ask(app, "GET", "/v1/models", Origin=ORIGIN)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (403, "foreign_origin")


async def test_every_origin_may_be_allowed(tmp_path: Path) -> None:
    async with http_app(tmp_path, cors_origins=["*"]) as app:
        reply = await ask(app, "GET", "/v1/models", Origin=ORIGIN)
        assert reply.status == 200
        check_readable(reply, "*")
        reply = await ask(app, "GET", "/v1/models", Origin=ORIGIN, Host="evil.example")
        assert reply.status == 403  # a page whose name was bound to this machine's address
