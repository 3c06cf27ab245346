"""The endpoints for vectors and scores: from the body to the answer."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from aiohttp import web

from kvmesh.bus.messages import EMBED, SCORE
from kvmesh.frontend.apis.base import Headers, RequestStamp
from kvmesh.frontend.apis.pooling.call import PoolingCall
from kvmesh.frontend.apis.pooling.embeddings import Embeddings
from kvmesh.frontend.apis.pooling.rerank import CohereRerank, Rerank, Score
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.fair_threads import Steps
from kvmesh.frontend.generation.active_request import RequestRunner
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory
from kvmesh.frontend.http.middleware import Handler
from kvmesh.frontend.http.request_trace import describe, received, summarize, traced
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.pooling.inputs import prepare, similarities
from kvmesh.frontend.pooling.run import PoolingRun
from kvmesh.frontend.preprocess.conversation_key import sticky_key
from kvmesh.frontend.preprocess.preprocessor import Preprocessor

SMALL = 16 << 10  # bytes of vectors that are rendered in the event loop
STEP = 256 << 10  # bytes of a body, after which others have their turn


class PoolingApi(Protocol):
    """One API for vectors or scores; `id_prefix` starts the request ids."""

    @property
    def name(self) -> str: ...

    @property
    def id_prefix(self) -> str: ...

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> PoolingCall:
        """Raises ApiError, mostly InvalidRequest with the field."""
        ...


POOLING: dict[str, PoolingApi] = {
    "/v1/embeddings": Embeddings(),
    "/v1/rerank": Rerank(),
    "/v2/rerank": CohereRerank(),
    "/v1/score": Score(),
}


class PoolingEndpoints:
    """Makes the handlers of these APIs."""

    def __init__(
        self,
        endpoints: EndpointFactory,
        registry: ModelRegistry,
        preprocessor: Preprocessor,
        runner: RequestRunner,
    ) -> None:
        self._endpoints = endpoints
        self._registry = registry
        self._preprocessor = preprocessor
        self._runner = runner

    @property
    def routes(self) -> list[web.RouteDef]:
        return [web.post(p, self._handler(api), name=api.name) for p, api in POOLING.items()]

    def _handler(self, api: PoolingApi) -> Handler:
        async def act(call: EndpointCall[PoolingCall]) -> bytes:
            parsed, caller = call.parsed, call.caller
            request, threads = parsed.request, self._preprocessor.threads
            received(call.http, request, caller.started)
            caller.bind(request, len(call.body), call.light)
            model, adapter = self._registry.resolve_for(request, sticky_key)
            caller.model = request.target or request.model
            model.check_task(*((SCORE, EMBED) if parsed.pairs else (EMBED,)))
            prepared = await prepare(parsed, model, adapter, self._preprocessor)
            describe(prepared)
            model.metrics.prompt_tokens.inc(prepared.prompt_tokens)
            run = PoolingRun(self._runner, prepared, caller.started, caller.account)
            caller.active = run
            try:
                vectors = await run.vectors()
            finally:
                summarize(run, caller.started)
            small = sum(map(len, vectors)) < SMALL
            body = _body(parsed, vectors, prepared.prompt_tokens, model.card.task == EMBED)
            return await threads.run_steps(request.owner, body, at_once=small)

        answer = traced(self._endpoints.with_body(api.parse, act), api.name)

        async def handle(http: web.Request) -> web.StreamResponse:
            return await answer(http)  # routes take no plain functions

        return handle


def _body(call: PoolingCall, vectors: Sequence[bytes], tokens: int, embeds: bool) -> Steps[bytes]:
    if sum(map(len, vectors)) >= SMALL:
        yield
    if call.pairs and embeds:
        vectors = similarities(call.pairs, vectors)
    parts, size = [], 0
    rendered: Iterator[bytes] = call.render(vectors, tokens)
    for part in rendered:
        parts.append(part)
        if (size := size + len(part)) >= STEP:
            size = 0
            yield
    return b"".join(parts)
