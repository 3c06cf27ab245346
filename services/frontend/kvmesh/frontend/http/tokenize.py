"""Endpoints that tokenize a prompt or detokenize ids, exactly as the served model does."""

from typing import Protocol

from kvmesh.frontend.apis.base import CountCall, Headers, RequestStamp, json_encode
from kvmesh.frontend.apis.tokens import DetokenizeBody, parse_tokens
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ContextExceeded
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory
from kvmesh.frontend.http.middleware import Handler
from kvmesh.frontend.http.responses.history import StoredHistory
from kvmesh.frontend.http.responses.store import ResponseStore
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.preprocess.conversation_key import sticky_key
from kvmesh.frontend.preprocess.limits import check_tokens
from kvmesh.frontend.preprocess.preprocessor import Preprocessor

THREAD_SIZE = 8192  # bytes of packed prompts, or tokens, from which work is done in a thread


class CountingApi(Protocol):
    """One API that counts or lists the tokens of a prompt."""

    @property
    def name(self) -> str: ...

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> CountCall: ...

    def answer(self, request: GenerateRequest, prompts: list[bytes], context: int) -> bytes:
        """The response body for packed prompts; `context` is the model's length in tokens."""
        ...


class TokenizeEndpoints:
    """Makes the handlers of the counting APIs and of POST /v1/detokenize."""

    def __init__(
        self,
        endpoints: EndpointFactory,
        registry: ModelRegistry,
        preprocessor: Preprocessor,
        responses: ResponseStore,
    ) -> None:
        self._endpoints = endpoints
        self._history = StoredHistory(responses, preprocessor.threads)
        self._registry = registry
        self._preprocessor = preprocessor

    @property
    def _threads(self) -> FairThreads:
        return self._preprocessor.threads

    def counting(self, api: CountingApi) -> Handler:
        async def act(call: EndpointCall[CountCall]) -> bytes:
            request, caller = call.parsed.request, call.caller
            caller.bind(request, len(call.body), call.light)
            call.turn.keep(request, caller.tenant)
            self._registry.check(request.model)
            await self._history.prepend(request, call.parsed.thread)
            model, _ = self._registry.resolve_for(request, sticky_key)
            caller.model = request.target or request.model
            prompts = await self._preprocessor.count(request, model)
            if sum(map(len, prompts)) < THREAD_SIZE:
                return api.answer(request, prompts, model.card.context)
            return await self._threads.call(
                caller.owner, lambda: api.answer(request, prompts, model.card.context)
            )

        return self._endpoints.with_body(api.parse, act, api=api.name)

    def detokenize(self) -> Handler:
        return self._endpoints.with_body(lambda body, *_: parse_tokens(body), self._detokenize)

    async def _detokenize(self, call: EndpointCall[DetokenizeBody]) -> bytes:
        """The exact text of token ids, special ones included."""
        parsed, caller = call.parsed, call.caller
        if caller.account is not None:
            caller.account.require_model(parsed.model)
        model, _ = self._registry.resolve(parsed.model)
        caller.model = parsed.model
        if len(parsed.tokens) > model.card.context:
            raise ContextExceeded(len(parsed.tokens), None, model.card.context)
        check_tokens(parsed.tokens, model.dialect.vocabulary, "tokens")

        def text() -> bytes:
            # unlike `decode`, a batch releases the GIL
            decoded = model.dialect.tokenizer.decode_batch(
                [parsed.tokens], skip_special_tokens=False
            )
            return json_encode({"prompt": decoded[0]})

        if len(parsed.tokens) < THREAD_SIZE:
            return text()
        return await self._threads.call(caller.owner, text)
