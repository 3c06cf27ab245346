"""A small OpenAI-compatible server: replies with as many words as requested, caches prefixes."""

import asyncio
import json
from typing import Any

from aiohttp import web


class ChatServer:
    """Counts one token per word plus `overhead`; reports shared leading 16-word blocks as cached.

    `fail` maps the ordinal of a streamed request to an error status; the streams of the ordinals in
    `cut` end early.
    """

    def __init__(self, overhead: int = 8, tokens_per_word: int = 1) -> None:
        self.overhead = overhead
        self.tokens_per_word = tokens_per_word
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.fail: dict[int, int] = {}
        self.cut: set[int] = set()
        self.in_flight = 0
        self.most_in_flight = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self._held: set[int] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> "ChatServer":
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "small"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        usage = self._usage(body)
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": usage})
        ordinal = len(self.requests)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if ordinal in self.fail:
            error = {"message": f"refused req-{ordinal:08}", "type": "server_error"}
            return web.json_response({"error": error}, status=self.fail[ordinal])
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._stream(request, body, usage, cut=ordinal in self.cut)
        finally:
            self.in_flight -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], usage: dict[str, Any], cut: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._frame(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await self.hold.wait()
        for _ in range(body["max_tokens"]):
            await self._frame(response, {"choices": [{"delta": {"content": " word"}}]})
        if not cut:
            await self._frame(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
            await self._frame(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _frame(self, response: web.StreamResponse, content: dict[str, Any]) -> None:
        await response.write(
            b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
        )

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        words = body["messages"][0]["content"].split()
        prefixes: list[int] = []
        for end in range(16, len(words) + 1, 16):
            prefixes.append(hash((prefixes[-1] if prefixes else 0, *words[end - 16 : end])))
        cached = sum(1 for prefix in prefixes if prefix in self._held) * 16
        self._held.update(prefixes)
        return {
            "prompt_tokens": len(words) * self.tokens_per_word + self.overhead,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached * self.tokens_per_word},
        }
