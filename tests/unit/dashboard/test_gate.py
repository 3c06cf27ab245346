"""The layer before the page: it passes, redirects, refuses, signs in and out."""

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import pytest
from support.dashboard_keys import Clock, KeyRing

from kvmesh.dashboard.http import gate as gates
from kvmesh.dashboard.http.access import ATTEMPTS_PER_MIN, COOKIE, Access
from kvmesh.dashboard.http.gate import FORM_BYTES, PAGES_PER_VIEWER, Gate, Message, Receive, Send

HOST = (b"host", b"127.0.0.1:8090")
BROWSER = (b"accept", b"text/html,*/*")


async def page(scope: Message, receive: Receive, send: Send) -> None:
    """The page behind the gate."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the page"})


@pytest.fixture
def gate() -> Gate:
    keys = KeyRing(root=["admin"], user=[])
    return Gate(page, Access(keys, local=True, clock=Clock()), max_viewers=1)


async def call(
    gate: Gate, method: str, path: str, *headers: tuple[bytes, bytes], body: bytes = b""
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of the response."""
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "scheme": "http",
        "headers": [HOST, *headers],
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await gate(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(m.get("body", b"") for m in sent[1:]).decode()


async def test_a_browser_without_a_key_is_sent_to_the_sign_in(gate: Gate) -> None:
    status, headers, _ = await call(gate, "GET", "/sessions", BROWSER)
    assert (status, headers["location"]) == (303, "/sign-in")
    status, _, text = await call(gate, "GET", "/sign-in", BROWSER)
    assert status == 200
    assert "API key with the scope" in text


async def test_a_program_without_a_key_is_told_so(gate: Gate) -> None:
    status, _, text = await call(gate, "GET", "/")
    assert (status, text) == (401, "An API key is required.\n")
    status, _, text = await call(gate, "GET", "/", (b"authorization", b"Bearer user"))
    assert (status, text) == (403, "This key lacks the scope `admin`.\n")


async def test_signing_in_and_out(gate: Gate) -> None:
    body = urlencode({"key": "root"}).encode()
    status, headers, _ = await call(gate, "POST", "/sign-in", body=body)
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    session = (b"cookie", cookie.partition(";")[0].encode())
    assert (await call(gate, "GET", "/", session))[2] == "the page"
    status, headers, _ = await call(gate, "POST", "/sign-out", session)
    assert headers["set-cookie"].startswith(f"{COOKIE}=; ")
    assert (await call(gate, "GET", "/", session))[0] == 401


@pytest.mark.parametrize(
    "body",
    [b"", b"key=user", b"key=%ff%00", b"k" * FORM_BYTES * 3, b"key=<script>alert(1)</script>"],
)
async def test_a_wrong_key_is_refused_in_words(gate: Gate, body: bytes) -> None:
    status, _, text = await call(gate, "POST", "/sign-in", body=body)
    assert status == 401
    assert "The key is not valid, or lacks the scope admin." in text
    assert "<script>" not in text


async def test_a_form_that_does_not_arrive_is_not_awaited(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "FORM_S", 0.01)
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/sign-in", "headers": [HOST]}
    await asyncio.wait_for(gate(scope, receive, send), 5)
    assert sent[0]["status"] == 408


async def test_guessing_is_slowed_down(gate: Gate) -> None:
    for _ in range(ATTEMPTS_PER_MIN):
        await call(gate, "POST", "/sign-in", body=b"key=guess")
    status, _, text = await call(gate, "POST", "/sign-in", body=b"key=root")
    assert status == 429
    assert "Too many attempts" in text


async def test_pages_of_other_origins_sign_nobody_in(gate: Gate) -> None:
    for origin in (b"http://evil.example", b"null", b"http://["):
        foreign = (b"origin", origin)
        status, headers, _ = await call(gate, "POST", "/sign-in", foreign, body=b"key=root")
        assert status == 403
        assert "set-cookie" not in headers
    own = (b"origin", b"http://127.0.0.1:8090")
    assert (await call(gate, "POST", "/sign-in", own, body=b"key=root"))[0] == 303


async def test_every_answer_forbids_frames_and_sniffing(gate: Gate) -> None:
    for path in ("/", "/sign-in", "/health"):
        _, headers, _ = await call(gate, "GET", path)
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


async def test_health_needs_no_key(gate: Gate) -> None:
    assert (await call(gate, "GET", "/health"))[0] == 200


async def test_health_tells_of_a_refused_subject() -> None:
    access = Access(KeyRing(), local=True, clock=Clock())
    gate = Gate(page, access, 1, refuses=lambda: True)
    status, _, body = await call(gate, "GET", "/health")
    assert (status, body) == (503, '{"status": "refused"}')


async def test_only_websockets_carry_the_live_page(gate: Gate) -> None:
    key = (b"x-api-key", b"root")
    assert (await call(gate, "POST", "/_nicegui_ws/socket.io/", key))[0] == 426


async def test_pages_without_a_viewer_are_limited() -> None:
    gate = Gate(page, Access(KeyRing(), local=True, clock=Clock()), 2, lambda: pages)
    pages = PAGES_PER_VIEWER * 2 - 1
    assert (await call(gate, "GET", "/"))[0] == 200
    pages += 1
    assert (await call(gate, "GET", "/"))[0] == 503
    assert (await call(gate, "GET", "/_nicegui/3/static/nicegui.js"))[0] == 200
    assert (await call(gate, "GET", "/health"))[0] == 200


class Viewer:
    """A WebSocket to the gate."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.scope: Message = {"type": "websocket", "headers": [HOST, *headers]}
        self.sent: list[Any] = []

    async def receive(self) -> Message:
        return {"type": "websocket.connect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


KEY = (b"x-api-key", b"root")
FOREIGN = (b"origin", b"http://evil.example")


async def test_a_websocket_needs_a_key_and_the_own_origin(gate: Gate) -> None:
    for viewer in (Viewer(), Viewer(KEY, FOREIGN)):
        await gate(viewer.scope, viewer.receive, viewer.send)
        assert viewer.sent == [{"type": "websocket.close", "code": 1008}]
    viewer = Viewer(KEY)
    await gate(viewer.scope, viewer.receive, viewer.send)
    assert viewer.sent == [{"type": "websocket.accept"}]


async def test_viewers_are_limited(gate: Gate) -> None:
    gate.viewers = 1
    viewer = Viewer(KEY)
    await gate(viewer.scope, viewer.receive, viewer.send)
    assert viewer.sent == [{"type": "websocket.close", "code": 1013}]
    gate.viewers = 0
    await gate(viewer.scope, viewer.receive, viewer.send)
    assert gate.viewers == 0, "it has left"


async def test_a_viewer_whose_key_is_revoked_is_cut_off() -> None:
    """Also one that swallows its first cancellation, as a server that still wants to write."""
    keys = KeyRing(root=["admin"])
    gate = Gate(stubborn, Access(keys, local=True, clock=Clock()), 1, check_s=0.01)
    viewer = Viewer(KEY)
    watched = asyncio.create_task(gate(viewer.scope, viewer.receive, viewer.send))
    await asyncio.sleep(0.1)
    assert gate.viewers == 1
    keys.set(root=["cache"])
    await asyncio.wait_for(watched, 5)
    assert gate.viewers == 0


async def stubborn(scope: Message, receive: Receive, send: Send) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()
