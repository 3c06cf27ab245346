"""The HTTP application: which path is answered by what."""

from collections.abc import Sequence

from aiohttp import web

from kvmesh.frontend.bodies import refuse
from kvmesh.frontend.counting import Counting, Detokenizing
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation import Generation, Parts
from kvmesh.frontend.information import Information, Readiness
from kvmesh.frontend.openapi import Description
from kvmesh.frontend.stored import StoredResponses
from kvmesh.frontend.surfaces.callers import shape_for
from kvmesh.frontend.surfaces.chat import Chat
from kvmesh.frontend.surfaces.completions import Completions
from kvmesh.frontend.surfaces.messages import CountTokens, Messages
from kvmesh.frontend.surfaces.responses import InputTokens, Responses
from kvmesh.frontend.surfaces.tokens import Tokenize
from kvmesh.runtime.warnings import Warnings


def application(
    parts: Parts, ready: Readiness, more: Sequence[web.RouteDef], warnings: Warnings
) -> web.Application:
    """All routes of a frontend, `more` of them made elsewhere."""
    generation = Generation(parts)
    counting = Counting(parts)
    description = Description()
    tell = Information(parts.registry, parts.gate, ready, warnings)
    app = web.Application(client_max_size=parts.settings.max_body_bytes)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generation.handler(Chat())),
            web.post("/v1/completions", generation.handler(Completions())),
            web.post("/v1/tokenize", counting.handler(Tokenize())),
            web.post("/v1/detokenize", Detokenizing(parts).handle),
            web.post("/v1/messages", generation.handler(Messages())),
            web.post("/v1/messages/count_tokens", counting.handler(CountTokens())),
            web.post("/v1/responses", generation.handler(Responses())),
            web.post("/v1/responses/input_tokens", counting.handler(InputTokens())),
            *StoredResponses(parts).handlers(),
            *more,
            web.get("/v1/models", tell.models),
            web.get("/v1/models/{id:.+}", tell.model),
            web.get("/health", tell.health),
            web.get("/live", tell.live),
            web.get("/metrics", tell.metrics),
            web.get("/openapi.json", description.json),
            web.get("/docs", description.html),
            web.route("*", "/{path:.*}", unknown),
        ]
    )
    return app


async def unknown(http: web.Request) -> web.Response:
    """No such path, or not with this method."""
    error = ApiError("not_found", f"There is no {http.method} {http.path} here; see /docs.")
    return refuse(shape_for(http), error)
