"""The HTTP application: routes and their handlers."""

from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from kvmesh.frontend.apis.base import Api
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.completions import Completions
from kvmesh.frontend.apis.messages.api import CountTokens, Messages
from kvmesh.frontend.apis.responses.api import Compacting, InputTokens, Responses
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.http import request_id
from kvmesh.frontend.http.access_log import AccessEntry
from kvmesh.frontend.http.batches.endpoints import BatchEndpoints
from kvmesh.frontend.http.batches.executor import LineExecutor
from kvmesh.frontend.http.batches.files import FileEndpoints
from kvmesh.frontend.http.bodies import awaits_reader
from kvmesh.frontend.http.dynamo.busy_threshold import BusyThresholdEndpoints
from kvmesh.frontend.http.endpoint import EndpointFactory
from kvmesh.frontend.http.generate import Dependencies, GenerateEndpoint
from kvmesh.frontend.http.intake.cors import CrossOrigin
from kvmesh.frontend.http.intake.unrouted import unrouted
from kvmesh.frontend.http.middleware import RequestMiddleware
from kvmesh.frontend.http.models_health import FrontendReadiness, InformationEndpoints
from kvmesh.frontend.http.openapi import Description
from kvmesh.frontend.http.pooling.endpoints import POOLING, PoolingEndpoints
from kvmesh.frontend.http.responses.conversation_endpoints import ConversationEndpoints
from kvmesh.frontend.http.responses.endpoints import StoredResponseEndpoints
from kvmesh.frontend.http.responses.websocket import SocketEndpoint, Sockets
from kvmesh.frontend.http.tokenize import CountingApi, TokenizeEndpoints
from kvmesh.runtime.warnings import Warnings

ANY = "/{path:.*}"
UNRESTRICTED = frozenset(("/", "/health", "/live"))  # people and probes without keys
ROOT = {
    "service": "kvmesh",
    "docs": "/docs",
    "models": "/v1/models",
    "health": "/health",
    "openai_base_url": "/v1",
    "anthropic_base_url": "/",
}
RESPONSES = "/v1/responses"
GENERATING: dict[str, Api] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/v1/messages": Messages(),
    f"{RESPONSES}/compact": Compacting(),
    RESPONSES: Responses(),  # the last one: a WebSocket is opened by another method of it
}
COUNTING: dict[str, CountingApi] = {
    "/v1/tokenize": Tokenize(),
    "/v1/messages/count_tokens": CountTokens(),
    "/v1/responses/input_tokens": InputTokens(),
}


def application(
    dependencies: Dependencies,
    readiness: FrontendReadiness,
    more: Sequence[web.RouteDef],
    warnings: Warnings,
    sockets: Sockets,
    access_log: Callable[[AccessEntry], None] | None = None,
) -> web.Application:
    """The application with all routes of a frontend, `more` among them."""
    preprocessor = dependencies.preprocessor
    endpoints = EndpointFactory(dependencies.settings, preprocessor.threads, preprocessor.turns)
    generate = GenerateEndpoint(endpoints, dependencies)
    tokenize = TokenizeEndpoints(
        endpoints, dependencies.registry, dependencies.preprocessor, dependencies.responses
    )
    pooling = PoolingEndpoints(
        endpoints, dependencies.registry, dependencies.preprocessor, dependencies.runner
    )
    threads = dependencies.preprocessor.threads
    stored = StoredResponseEndpoints(
        endpoints,
        dependencies.responses,
        threads,
        dependencies.background,
        partial(generate.resumer, GENERATING[RESPONSES]),
    )
    conversations = ConversationEndpoints(endpoints, dependencies.responses, threads)
    busy = BusyThresholdEndpoints(endpoints, dependencies.bus, dependencies.registry)
    information = InformationEndpoints(
        dependencies.registry, readiness, warnings, dependencies.authenticator
    )
    files = FileEndpoints(endpoints, dependencies.batches.store, dependencies.settings)
    batches = BatchEndpoints(endpoints, dependencies.batches, threads, dependencies.settings)
    description = Description()
    settings = dependencies.settings
    cross_origin = CrossOrigin(settings.cors_origins) if settings.cors_origins else None
    middleware = RequestMiddleware(
        dependencies.authenticator,
        dependencies.admission,
        dependencies.promptness,
        UNRESTRICTED,
        {
            **{api.name: api.id_prefix for api in GENERATING.values()},
            **{api.name: api.id_prefix for api in POOLING.values()},
        },
        access_log,
        cross_origin,
    )
    dependencies.batches.execute_with(
        LineExecutor(generate, middleware, dependencies.authenticator, GENERATING)
    )
    socket = SocketEndpoint(generate, middleware, settings, threads, sockets)
    opening = web.get(RESPONSES, socket.open, name="responses", allow_head=False)
    app = web.Application(
        client_max_size=settings.max_body_bytes, middlewares=[web.middleware(middleware)]
    )
    app.on_response_prepare.append(request_id.add_headers)
    if cross_origin is not None:
        app.on_response_prepare.append(cross_origin.add_headers)
    app.add_routes(
        web.RouteDef(
            route.method,
            route.path,
            route.handler,
            {**route.kwargs, "expect_handler": awaits_reader},
        )
        for route in [
            *(web.post(p, generate.handler(api), name=api.name) for p, api in GENERATING.items()),
            *([opening] if settings.websocket_bytes else []),
            *(web.post(p, tokenize.counting(api), name=api.name) for p, api in COUNTING.items()),
            *pooling.routes,
            web.post("/v1/detokenize", tokenize.detokenize(), name="detokenize"),
            *stored.routes,
            *conversations.routes,
            *files.routes,
            *batches.routes,
            *more,
            *busy.routes,
            web.get("/", root),
            web.get("/v1/models", information.models, name="models"),
            web.get("/v1/models/{id:.+}", information.model, name="model"),
            web.get("/health", information.health),
            web.get("/live", information.live),
            web.get("/metrics", information.metrics, name="metrics"),
            web.get("/openapi.json", description.json, name="openapi"),
            web.get("/docs", description.html, name="docs"),
            web.route("*", ANY, unrouted),
        ]
    )
    return app


async def root(_: web.Request) -> web.Response:
    """Answers whoever opens the address itself: with the paths to look at."""
    return web.json_response(ROOT)
