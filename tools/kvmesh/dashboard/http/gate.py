"""The ASGI layer before the page: judges every request, signs in and out, bounds the viewers."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from kvmesh.dashboard.http.access import (
    SIGN_IN,
    SIGN_OUT,
    Access,
    same_site_cookie,
)
from kvmesh.dashboard.http.sign_in import sign_in_page
from kvmesh.frontend.errors import STATUS, ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
FORM_BYTES = 4096
POLLING = "/_nicegui_ws"  # its fallback would not count as a viewer
POLICY_VIOLATION, TRY_LATER = 1008, 1013
HTML = "text/html; charset=utf-8"
HEADERS = (
    (b"content-security-policy", b"frame-ancestors 'none'; connect-src 'self'; object-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)


class Gate:
    """Lets requests to `app` pass that `access` allows, and at most `max_viewers` WebSockets."""

    def __init__(self, app: App, access: Access, max_viewers: int) -> None:
        self._app = app
        self._access = access
        self._max_viewers = max_viewers
        self.viewers = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, _with_headers(send))
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        headers, path = _headers(scope), scope["path"]
        if path == "/health":
            await _answer(send, 200, '{"status": "ok"}', "application/json")
        elif path == SIGN_IN and self._access.requires_keys:
            await self._sign_in(scope, receive, send)
        elif path.startswith(POLLING):
            await _answer(send, 426, "WebSocket only.\n", "text/plain")
        elif (verdict := self._access.judge(scope["method"], headers)).status:
            if verdict.status == 401 and "text/html" in headers.get("accept", ""):
                await _redirect(send, SIGN_IN)
            else:
                await _answer(send, verdict.status, verdict.reason + "\n", "text/plain")
        elif path == SIGN_OUT and scope["method"] == "POST":
            self._access.sign_out(headers)
            await _redirect(send, SIGN_IN, same_site_cookie("", _secure(scope), 0))
        else:
            await self._app(scope, receive, send)

    async def _sign_in(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _answer(send, 200, sign_in_page(), HTML)
            return
        key = parse_qs((await _body(receive)).decode(errors="replace")).get("key", [""])[0]
        try:
            token = self._access.sign_in(key)
        except ApiError as error:
            await _answer(send, STATUS[error.kind], sign_in_page(error.message), HTML)
            return
        if token is None:
            fault = "The key is not valid, or lacks the scope admin."
            await _answer(send, 401, sign_in_page(fault), HTML)
        else:
            await _redirect(send, "/", same_site_cookie(token, _secure(scope)))

    async def _websocket(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._access.judge("GET", _headers(scope), websocket=True).status:
            return await _refuse(receive, send, POLICY_VIOLATION)
        if self.viewers >= self._max_viewers:
            return await _refuse(receive, send, TRY_LATER)
        self.viewers += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.viewers -= 1


async def _refuse(receive: Receive, send: Send, code: int) -> None:
    await receive()  # the connection request, which must be read before it is answered
    await send({"type": "websocket.close", "code": code})


def _headers(scope: Message) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _secure(scope: Message) -> bool:
    return bool(scope.get("scheme") == "https")


async def _body(receive: Receive) -> bytes:
    """The first FORM_BYTES of a request's body."""
    body = b""
    while len(body) < FORM_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            break
    return body[:FORM_BYTES]


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await send(message)

    return sending


async def _redirect(send: Send, path: str, cookie: str = "") -> None:
    cookies = [(b"set-cookie", cookie.encode())] if cookie else []
    await _answer(send, 303, "", HTML, [(b"location", path.encode()), *cookies])


async def _answer(
    send: Send,
    status: int,
    text: str,
    content_type: str,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    body = text.encode()
    shown = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": body})
