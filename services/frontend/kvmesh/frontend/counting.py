"""Endpoints that only prepare a prompt: exact token counts and tokens for the served template."""

from typing import Protocol

from aiohttp import web

from kvmesh.frontend.bodies import JSON, read_body, refuse, unexpected
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation import Handler, Parts
from kvmesh.frontend.surfaces import openai
from kvmesh.frontend.surfaces.base import Headers, json_encode
from kvmesh.frontend.surfaces.tokens import parse_tokens


class Counter(Protocol):
    """One counting API."""

    def parse(self, body: bytes, headers: Headers) -> GenerateRequest: ...

    def error(self, error: ApiError) -> tuple[int, bytes]: ...

    def answer(self, prompts: list[bytes], context: int) -> bytes:
        """The body for packed prompts; `context` is the model's."""
        ...


class Counting:
    """Makes a handler for each counting surface."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handler(self, surface: Counter) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                account = self._parts.gate.account(http.headers)
                body = await read_body(http, self._parts.settings)
                request = surface.parse(body, http.headers)
                self._parts.gate.bind(request, account)
                model, _ = self._parts.registry.resolve(request.model)
                prompts = await self._parts.preparer.count(request, model)
            except ApiError as error:
                return refuse(surface, error)
            except Exception as error:
                return refuse(surface, unexpected(error))
            body = surface.answer(prompts, model.card.context)
            return web.Response(body=body, content_type=JSON)

        return handle


class Detokenizing:
    """POST /v1/detokenize: the exact text of token ids, special ones included."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def handle(self, http: web.Request) -> web.StreamResponse:
        try:
            self._parts.gate.account(http.headers)
            body = await read_body(http, self._parts.settings)
            parsed = parse_tokens(body)
            model, _ = self._parts.registry.resolve(parsed.model)
        except ApiError as error:
            return refuse(openai.SHAPE, error)
        text = model.dialect.tokenizer.decode(parsed.tokens, skip_special_tokens=False)
        return web.Response(body=json_encode({"prompt": text}), content_type=JSON)
