"""The HTTP application: which path is answered by what."""

from collections.abc import Sequence

from aiohttp import web

from kvmesh.frontend.apis.base import Api
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.completions import Completions
from kvmesh.frontend.apis.messages.api import CountTokens, Messages
from kvmesh.frontend.apis.responses.api import InputTokens, Responses
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.http.bodies import refuse
from kvmesh.frontend.http.error_shape import shape_for
from kvmesh.frontend.http.generate import Dependencies, GenerateEndpoint
from kvmesh.frontend.http.middleware import RequestMiddleware
from kvmesh.frontend.http.models_health import FrontendReadiness, InformationEndpoints
from kvmesh.frontend.http.openapi import Description
from kvmesh.frontend.http.responses.endpoints import StoredResponseEndpoints
from kvmesh.frontend.http.tokenize import CountingApi, CountingEndpoint, DetokenizeEndpoint
from kvmesh.runtime.warnings import Warnings

ANY = "/{path:.*}"

# They read neither a body nor what is stored: nobody needs a key for them.
OPEN = frozenset(("/health", "/live", ANY))


def application(
    parts: Dependencies, ready: FrontendReadiness, more: Sequence[web.RouteDef], warnings: Warnings
) -> web.Application:
    """All routes of a frontend, `more` of them made elsewhere."""
    generation = GenerateEndpoint(parts)
    counting = CountingEndpoint(parts)
    description = Description()
    tell = InformationEndpoints(parts.registry, ready, warnings, parts.gate)
    entrance = RequestMiddleware(parts.gate, parts.settings.max_in_flight, OPEN)
    app = web.Application(
        client_max_size=parts.settings.max_body_bytes, middlewares=[web.middleware(entrance)]
    )
    generating: dict[str, Api] = {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completions(),
        "/v1/messages": Messages(),
        "/v1/responses": Responses(),
    }
    tokens: dict[str, CountingApi] = {
        "/v1/tokenize": Tokenize(),
        "/v1/messages/count_tokens": CountTokens(),
        "/v1/responses/input_tokens": InputTokens(),
    }
    app.add_routes(
        [
            *(web.post(p, generation.handler(s), name=s.name) for p, s in generating.items()),
            *(web.post(p, counting.handler(s), name=s.name) for p, s in tokens.items()),
            web.post("/v1/detokenize", DetokenizeEndpoint(parts).handle, name="detokenize"),
            *StoredResponseEndpoints(parts.responses).handlers(),
            *more,
            web.get("/v1/models", tell.models, name="models"),
            web.get("/v1/models/{id:.+}", tell.model, name="model"),
            web.get("/health", tell.health),
            web.get("/live", tell.live),
            web.get("/metrics", tell.metrics, name="metrics"),
            web.get("/openapi.json", description.json, name="openapi"),
            web.get("/docs", description.html, name="docs"),
            web.route("*", ANY, unknown),
        ]
    )
    return app


async def unknown(http: web.Request) -> web.Response:
    """No such path, or not with this method."""
    error = ApiError("not_found", f"There is no {http.method} {http.path} here; see /docs.")
    return refuse(shape_for(http), error)
