"""The ASGI layer before the page: judges every request, signs in and out, bounds the viewers."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from html import escape
from typing import Any
from urllib.parse import parse_qs

from kvmesh.dashboard.http.access import (
    FOREIGN,
    SIGN_IN,
    SIGN_OUT,
    Access,
    same_origin,
    same_site_cookie,
)
from kvmesh.frontend.errors import STATUS, ApiError

STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:26rem;margin:15vh auto;padding:0 1rem}
label,input,button{display:block;width:100%;box-sizing:border-box;font:inherit}
input,button{padding:.5rem;margin:.3rem 0 1rem}
[role=alert]{color:#c62828}
@media(prefers-color-scheme:dark){[role=alert]{color:#ef9a9a}}
"""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
FORM_BYTES = 4096
FORM_S = 10.0
POLLING = "/_nicegui_ws"  # its fallback would not count as a viewer
FILES = "/_nicegui/"
PAGES_PER_VIEWER = 3  # a page takes memory from its request on; without a viewer, for a minute
POLICY_VIOLATION, TRY_LATER = 1008, 1013
CHECK_S = 2.0
REFUSALS = 2  # after the first one the page leads its viewer to the sign-in
ENDING_S = 2.0
TEXT = "text/plain"
HTML = "text/html; charset=utf-8"
HEADERS = (
    (b"content-security-policy", b"frame-ancestors 'none'; connect-src 'self'; object-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)


def sign_in_page(fault: str = "") -> str:
    """The page; `fault` says why the last key was refused."""
    alert = f"<p role=alert>{escape(fault)}</p>" if fault else ""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>kvmesh: sign in</title>"
        f"<style>{STYLE}</style><main><h1>kvmesh</h1>{alert}<form method=post>"
        "<label for=key>API key with the scope <code>admin</code></label>"
        "<input id=key name=key type=password required autofocus autocomplete=current-password>"
        "<button>Sign in</button></form></main></html>"
    )


class Gate:
    """Lets requests to `app` pass that `access` allows, and at most `max_viewers` WebSockets.

    A WebSocket that `access` no longer allows is closed: every `check_s` seconds it is asked.
    `pages` counts the pages in memory: with or without a viewer, PAGES_PER_VIEWER times
    `max_viewers` at most. `/health` is 503 while the NATS server `refuses` a subject.
    """

    def __init__(
        self,
        app: App,
        access: Access,
        max_viewers: int,
        pages: Callable[[], int] = lambda: 0,
        check_s: float = CHECK_S,
        refuses: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._refuses = refuses
        self._access = access
        self._max_viewers = max_viewers
        self._pages = pages
        self._check_s = check_s
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
            status, word = (503, "refused") if self._refuses() else (200, "ok")
            await _answer(send, status, f'{{"status": "{word}"}}', "application/json")
        elif path == SIGN_IN and self._access.requires_keys:
            await self._sign_in(scope, receive, send)
        elif path.startswith(POLLING):
            await _answer(send, 426, "WebSocket only.\n", TEXT)
        elif (verdict := self._access.judge(scope["method"], headers)).status:
            if verdict.status == 401 and "text/html" in headers.get("accept", ""):
                await _redirect(send, SIGN_IN)
            else:
                await _answer(send, verdict.status, verdict.reason + "\n", TEXT)
        elif path == SIGN_OUT and scope["method"] == "POST":
            self._access.sign_out(headers)
            await _redirect(send, SIGN_IN, same_site_cookie("", _secure(scope), 0))
        elif not path.startswith(FILES) and self._pages() >= PAGES_PER_VIEWER * self._max_viewers:
            await _answer(send, 503, "Too many pages are open; try again in a minute.\n", TEXT)
        else:
            await self._app(scope, receive, send)

    async def _sign_in(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _answer(send, 200, sign_in_page(), HTML)
            return
        if not same_origin(_headers(scope)):
            await _answer(send, FOREIGN.status, sign_in_page(FOREIGN.reason), HTML)
            return
        address = str((scope.get("client") or ("",))[0])
        try:
            async with asyncio.timeout(FORM_S):
                body = await _body(receive)
        except TimeoutError:
            await _answer(send, 408, "The form did not arrive in time.\n", TEXT)
            return
        key = parse_qs(body.decode(errors="replace")).get("key", [""])[0]
        try:
            token = self._access.sign_in(key, address)
        except ApiError as error:
            await _answer(send, STATUS[error.kind], sign_in_page(error.message), HTML)
            return
        if token is None:
            fault = "The key is not valid, or lacks the scope admin."
            await _answer(send, 401, sign_in_page(fault), HTML)
        else:
            await _redirect(send, "/", same_site_cookie(token, _secure(scope)))

    async def _websocket(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        if self._access.judge("GET", headers, websocket=True).status:
            return await _refuse(receive, send, POLICY_VIOLATION)
        if self.viewers >= self._max_viewers:
            return await _refuse(receive, send, TRY_LATER)
        self.viewers += 1
        viewing = asyncio.ensure_future(self._app(scope, receive, send))
        try:
            await self._watch(viewing, headers)
            if viewing.done():
                viewing.result()
        finally:
            self.viewers -= 1
            await _end(viewing)

    async def _watch(self, viewing: asyncio.Future[None], headers: dict[str, str]) -> None:
        """Return once the viewer has left or may no longer see the page."""
        refusals = 0
        while refusals < REFUSALS:
            await asyncio.wait({viewing}, timeout=self._check_s)
            if viewing.done():
                return
            refused = self._access.judge("GET", headers, websocket=True).status
            refusals = refusals + 1 if refused else 0


async def _end(viewing: asyncio.Future[None]) -> None:
    """Cancel what serves a viewer, repeatedly: it first waits until the viewer has read."""
    for _ in range(3):
        if viewing.done():
            return
        viewing.cancel()
        await asyncio.wait({viewing}, timeout=ENDING_S)


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
