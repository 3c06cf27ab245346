"""Endpoints that only prepare a prompt: exact token counts and tokens for the served template."""

from typing import Protocol

from aiohttp import web

from kvmesh.frontend.apis.base import Headers, json_encode
from kvmesh.frontend.apis.tokens import parse_tokens
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, ContextExceeded
from kvmesh.frontend.http.bodies import JSON, parsed, read_body
from kvmesh.frontend.http.generate import Dependencies
from kvmesh.frontend.http.middleware import Handler, caller_of

LONG = 8192  # tokens, or bytes of them, that go to a thread


class CountingApi(Protocol):
    """One counting API."""

    @property
    def name(self) -> str: ...

    def parse(self, body: bytes, headers: Headers) -> GenerateRequest: ...

    def error(self, error: ApiError) -> tuple[int, bytes]: ...

    def answer(self, prompts: list[bytes], context: int) -> bytes:
        """The body for packed prompts; `context` is the model's."""
        ...


class CountingEndpoint:
    """Makes a handler for each counting surface."""

    def __init__(self, parts: Dependencies) -> None:
        self._parts = parts

    def handler(self, surface: CountingApi) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            caller, threads = caller_of(http), self._parts.preparer.threads
            body = await read_body(http, self._parts.settings)
            request = await parsed(
                threads, caller.owner, body, lambda: surface.parse(body, http.headers)
            )
            caller.take(request, body)
            model, _ = self._parts.registry.resolve(request.model)
            caller.model = request.model
            prompts = await self._parts.preparer.count(request, model)
            if sum(map(len, prompts)) < LONG:
                answer = surface.answer(prompts, model.card.context)
            else:
                answer = await threads.call(
                    caller.owner, lambda: surface.answer(prompts, model.card.context)
                )
            return web.Response(body=answer, content_type=JSON)

        return handle


class DetokenizeEndpoint:
    """POST /v1/detokenize: the exact text of token ids, special ones included."""

    def __init__(self, parts: Dependencies) -> None:
        self._parts = parts

    async def handle(self, http: web.Request) -> web.StreamResponse:
        caller, threads = caller_of(http), self._parts.preparer.threads
        body = await read_body(http, self._parts.settings)
        asked = await parsed(threads, caller.owner, body, lambda: parse_tokens(body))
        if caller.account is not None:
            caller.account.allow(asked.model)
        model, _ = self._parts.registry.resolve(asked.model)
        caller.model = asked.model
        if len(asked.tokens) > model.card.context:
            raise ContextExceeded(len(asked.tokens), None, model.card.context)

        def text() -> bytes:
            # a batch lets other threads go on
            decoded = model.dialect.tokenizer.decode_batch(
                [asked.tokens], skip_special_tokens=False
            )
            return json_encode({"prompt": decoded[0]})

        small = len(asked.tokens) < LONG
        answer = text() if small else await threads.call(caller.owner, text)
        return web.Response(body=answer, content_type=JSON)
