"""The generating endpoints: from the body to the answer, the same way for every API."""

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web

from kvmesh.frontend.apis.base import Api, ApiCall, ConversationThread
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation.active_request import ActiveRequest, RequestRuntime
from kvmesh.frontend.http.bodies import JSON, LARGE, internal_error
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory, new_stamp
from kvmesh.frontend.http.middleware import Caller, Handler
from kvmesh.frontend.http.responses.store import ResponseStore
from kvmesh.frontend.http.sse import EventStream, StreamSupervisor
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.sessions.hooks import SessionHooks
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dependencies:
    """Dependencies of the handlers."""

    settings: FrontendSettings
    registry: ModelRegistry
    preparer: Preprocessor
    engine: RequestRuntime
    keeper: StreamSupervisor
    responses: ResponseStore
    authenticator: Authenticator
    turns: SessionHooks


class GenerateEndpoint:
    """Makes the handler of each generating API."""

    def __init__(self, endpoints: EndpointFactory, parts: Dependencies) -> None:
        self._endpoints = endpoints
        self._parts = parts

    def handler(self, api: Api) -> Handler:
        async def act(call: EndpointCall[ApiCall]) -> web.StreamResponse:
            call.caller.bind(call.parsed.request, len(call.body))
            return await self._answer(call.http, api, call.parsed, call.caller)

        return self._endpoints.with_body(
            lambda body, headers: api.parse(body, headers, new_stamp()), act
        )

    async def _answer(
        self,
        http: web.Request,
        api: Api,
        call: ApiCall,
        caller: Caller,
    ) -> web.StreamResponse:
        request = call.request
        model, adapter = self._parts.registry.resolve(request.model)
        caller.model = request.model
        await self._continue(call)
        prepared = await self._parts.preparer.prepare(request, model, adapter)
        model.metrics.prompt_tokens.inc(prepared.prompt_tokens)
        turn = self._parts.turns.begin(prepared)
        engine, renderer = self._parts.engine, call.renderer
        exchange = ActiveRequest(engine, prepared, renderer, caller.started, caller.account)
        try:
            async with exchange:
                if request.stream:
                    return await self._stream(http, api, exchange, call.thread)
                return await self._whole(exchange, call.thread)
        finally:
            self._parts.turns.end(turn, exchange, api.in_order)

    async def _whole(
        self, exchange: ActiveRequest, thread: ConversationThread | None
    ) -> web.Response:
        await exchange.place()
        await exchange.follow()
        request = exchange.prepared.request
        summary = exchange.summary()
        body = exchange.renderer.whole(summary)
        if not await self._keep(thread, request, body):
            body = exchange.renderer.whole(summary)
        return web.Response(body=body, headers={"X-Request-Id": request.id}, content_type=JSON)

    async def _continue(self, call: ApiCall) -> None:
        """Prepend the stored conversation that the request continues."""
        request, thread = call.request, call.thread
        if thread is None or thread.previous is None:
            return
        turns = await self._parts.responses.history(thread.previous, request.cache_salt)
        size = sum(len(item) for turn in turns for item in (*turn.input, *turn.output))
        request.body_bytes += size
        if size < LARGE:
            thread.extend(turns)
        else:
            threads = self._parts.preparer.threads
            await threads.call(request.owner, lambda: thread.extend(turns))

    async def _keep(
        self, thread: ConversationThread | None, request: GenerateRequest, body: bytes
    ) -> bool:
        """Store the response if requested; on failure mark the thread and return False."""
        if thread is None or not thread.store:
            return True
        threads, large = self._parts.preparer.threads, request.body_bytes >= LARGE
        turn = (
            await threads.call(request.owner, lambda: thread.turn(body))
            if large
            else thread.turn(body)
        )
        turn.tenant = request.cache_salt
        if not await self._parts.responses.put(turn):
            thread.mark_unstored()
            return False
        return True

    async def _stream(
        self,
        http: web.Request,
        api: Api,
        exchange: ActiveRequest,
        thread: ConversationThread | None,
    ) -> web.StreamResponse:
        """The stream opens when a worker has the request, or when its first keep-alive is due."""
        stream = EventStream(http, exchange.prepared.request.id)
        placing = asyncio.ensure_future(exchange.place())
        try:
            await asyncio.wait([placing], timeout=self._parts.settings.keepalive_s)
            if placing.done():
                await placing
            await stream.open(exchange.renderer.begin())
            exchange.stream = stream
            self._parts.keeper.add(stream, api.keepalive, exchange.resume)
            return await stream.close(await self._rest(exchange, placing, thread))
        finally:
            placing.cancel()
            self._parts.keeper.remove(stream)

    async def _rest(
        self,
        exchange: ActiveRequest,
        placing: "asyncio.Future[None]",
        thread: ConversationThread | None,
    ) -> bytes:
        """Follow the exchange to its end; what is left to write then, be it an error."""
        try:
            await placing
            exchange.resume()
            await exchange.follow()
            summary = exchange.summary()
            if thread is not None and thread.store:
                body = exchange.renderer.whole(summary)
                await self._keep(thread, exchange.prepared.request, body)
            return b"".join(exchange.last) + exchange.renderer.done(summary)
        except ApiError as error:
            log.warning("request %s failed: %s", exchange.prepared.request.id, error)
            return exchange.renderer.failed(error)
        except ConnectionError:
            raise
        except Exception as error:
            return exchange.renderer.failed(internal_error(error))
