"""The generating endpoints: from the body to the answer, the same way for every API."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import BATCH_CLASS
from kvmesh.bus.promptness import Promptness
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import (
    AnswerSummary,
    Api,
    ApiCall,
    ConversationThread,
    Ending,
    Headers,
    RequestStamp,
    Usage,
)
from kvmesh.frontend.apis.content.compaction import after_summary
from kvmesh.frontend.auth.admission import Admission
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.batches.runner import BatchRunner
from kvmesh.frontend.conversation import ConversationSummary, GenerateRequest
from kvmesh.frontend.dispatch.route_client import Arrivals
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.failure_log import log_failure
from kvmesh.frontend.generation.active_request import DISCARD, ActiveRequest, RequestRunner
from kvmesh.frontend.http.bodies import JSON, LARGE, internal_error, parse_heavy, too_large
from kvmesh.frontend.http.cache.prefetch import Prefetcher
from kvmesh.frontend.http.cache.prompt_resolver import ResolvedPrompt
from kvmesh.frontend.http.dynamo.annotations import annotations
from kvmesh.frontend.http.endpoint import EndpointCall, EndpointFactory, Read
from kvmesh.frontend.http.middleware import Caller, Handler, caller_of
from kvmesh.frontend.http.request_id import stamp_of
from kvmesh.frontend.http.request_trace import describe, received, summarize, traced
from kvmesh.frontend.http.responses.background import (
    BackgroundResponses,
    Resume,
    Run,
    kept_headers,
)
from kvmesh.frontend.http.responses.history import StoredHistory
from kvmesh.frontend.http.responses.log import EventRecord, RunHead, events
from kvmesh.frontend.http.responses.store import ResponseStore
from kvmesh.frontend.http.sse import AnswerStream, EventStream, StreamSupervisor
from kvmesh.frontend.json_bounds import is_light
from kvmesh.frontend.models import ModelRegistry, ServedModel
from kvmesh.frontend.preprocess.conversation_key import first_message_key, sticky_key
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor
from kvmesh.frontend.sessions.compaction import Compactor
from kvmesh.frontend.sessions.hooks import SessionHooks
from kvmesh.frontend.sessions.shadows import ShadowTraffic
from kvmesh.frontend.turn_memo import NO_MEMO
from kvmesh.settings.schema import FrontendSettings
from kvmesh.tracing.names import STORE_RESPONSE

log = logging.getLogger(__name__)
NO_USAGE = Usage(prompt=0, cached=0, stored=0, output=0)
T = TypeVar("T")


@dataclass(frozen=True)
class Dependencies:
    """Parts of the frontend that the HTTP handlers use."""

    settings: FrontendSettings
    registry: ModelRegistry
    preprocessor: Preprocessor
    runner: RequestRunner
    stream_supervisor: StreamSupervisor
    responses: ResponseStore
    authenticator: Authenticator
    session_hooks: SessionHooks
    arrivals: Arrivals
    promptness: Promptness
    admission: Admission
    background: BackgroundResponses
    batches: BatchRunner
    shadows: ShadowTraffic
    bus: Bus
    prefetcher: Prefetcher


class GenerateEndpoint:
    """Makes the handler of each generating API."""

    def __init__(self, endpoints: EndpointFactory, dependencies: Dependencies) -> None:
        self._endpoints = endpoints
        self._dependencies = dependencies
        threads = dependencies.preprocessor.threads
        self._history = StoredHistory(dependencies.responses, threads)
        self._compactor = Compactor(dependencies.preprocessor, dependencies.runner)

    def handler(
        self,
        api: Api,
        stream_of: Callable[[web.Request], AnswerStream] = EventStream,
        read: Read | None = None,
    ) -> Handler:
        """Handler of one API; `stream_of` makes the stream of an answer, `read` returns the body.

        Without `read`, that is the body of the HTTP request.
        """

        def act(call: EndpointCall[ApiCall]) -> Awaitable[web.StreamResponse]:
            received(call.http, call.parsed.request, call.caller.started)
            call.caller.bind(call.parsed.request, len(call.body), call.light)
            call.turn.keep(call.parsed.request, call.caller.tenant)
            if call.parsed.go_on is not None:
                return self._in_background(api, call)
            if call.parsed.preload:
                return self._preload(call, stream_of)
            stream = stream_of(call.http) if call.parsed.request.stream else None
            # without the call, whose body a long answer needs no more
            return self._answer(stream, api, call.parsed, call.caller)

        handle = self._endpoints.with_body(api.parse, act, api=api.name, read=read)
        handle = traced(handle, api.name)

        async def counted(http: web.Request) -> web.StreamResponse:
            caller, arrivals = caller_of(http), self._dependencies.arrivals
            arrivals.add(caller, caller.started)
            try:
                return await handle(http)
            finally:
                arrivals.discard(caller)

        return counted

    async def line(
        self,
        api: Api,
        body: bytes,
        headers: Headers,
        stamp: RequestStamp,
        caller: Caller,
    ) -> bytes:
        """The whole answer to a request of a batch; raises ApiError."""
        threads = self._dependencies.preprocessor.threads

        def parsed() -> ApiCall:
            return api.parse(body, headers, stamp)

        if len(body) > (most := self._dependencies.settings.max_body_bytes):
            raise too_large(most)
        light = is_light(body)
        call = parsed() if light else await parse_heavy(threads, caller.owner, body, parsed)
        refused = {
            "stream": call.request.stream,
            "background": call.go_on is not None,
            "generate": call.preload,
        }
        for name in (name for name, is_set in refused.items() if is_set):
            raise InvalidRequest(f"`{name}`: not for requests of a batch.", name)
        caller.bind(call.request, len(body), light)
        # nothing is learned from it about agents
        hints = replace(call.request.hints, fair_class=BATCH_CLASS, load_test=True)
        call.request.hints = hints
        answer = await self._answer(None, api, call, caller)
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        return answer.body

    async def _answer(
        self,
        stream: AnswerStream | None,
        api: Api,
        call: ApiCall,
        caller: Caller,
    ) -> web.StreamResponse:
        prepared = await self._prepare(call, caller)
        if prepared.compacts and call.compacted is not None:
            compacted = await self._compact(stream, api, call, caller, prepared)
            if not isinstance(compacted, PreparedRequest):
                return compacted
            prepared = compacted
        hooked = self._dependencies.session_hooks.begin(prepared)
        active = self._dependencies.runner.run(
            prepared, call.renderer, caller.started, stream or DISCARD, caller.account
        )
        caller.active = active
        self._dependencies.arrivals.discard(caller)
        try:
            async with active:
                if stream is not None:
                    return await self._stream(stream, api, active, call)
                if caller.on_placed is not None:
                    await active.accepted(None)
                    caller.on_placed()
                return await self._whole(active, call)
        finally:
            self._copy(caller, active)
            summarize(active, caller.started)
            caller.failed = stream is not None and stream.failed
            self._dependencies.session_hooks.end(hooked, active, api.in_order)

    async def _prepare(self, call: ApiCall, caller: Caller) -> PreparedRequest:
        model, adapter = await self._resolve(call, caller)
        caller.shadows = self._dependencies.shadows.copies(call.request)
        return await self._rendered(call.request, model, adapter)

    async def _rendered(
        self, request: GenerateRequest, model: ServedModel, adapter: str | None
    ) -> PreparedRequest:
        prepared = await self._dependencies.preprocessor.prepare(request, model, adapter)
        describe(prepared)
        model.metrics.prompt_tokens.inc(prepared.prompt_tokens)
        return prepared

    async def _resolve(self, call: ApiCall, caller: Caller) -> tuple[ServedModel, str | None]:
        """The model that serves a request, which has its whole conversation then; its adapter."""
        request, registry = call.request, self._dependencies.registry
        registry.check(request.target or request.model)
        await self._history.prepend(request, call.thread)  # an alias looks at the first message
        model, adapter = registry.resolve_for(request, sticky_key)
        caller.model = request.target or request.model
        self._name_workers(request, model)
        return model, adapter

    async def _preload(
        self, call: EndpointCall[ApiCall], stream_of: Callable[[web.Request], AnswerStream]
    ) -> web.StreamResponse:
        """Have a prompt computed ahead; the response without output can be continued."""
        parsed, caller, dependencies = call.parsed, call.caller, self._dependencies
        request, renderer = parsed.request, parsed.renderer
        model, adapter = await self._resolve(parsed, caller)
        prompt = await dependencies.preprocessor.ahead(request, model, adapter)
        target = ResolvedPrompt(request, model, adapter, prompt)
        summary = AnswerSummary(await dependencies.prefetcher.preload(target, caller.account))
        begun, body = renderer.begin(), renderer.whole(summary)
        if not await self._keep_turn(parsed.thread, request, body):
            body = renderer.whole(summary)
        if not request.stream:
            return web.Response(body=body, content_type=JSON)
        stream = stream_of(call.http)
        await stream.open(begun, lambda: None)
        return await stream.close(renderer.done(summary))

    def _name_workers(self, request: GenerateRequest, model: ServedModel) -> None:
        """Replace the numbers of workers by the names of their instances."""
        placement, name = request.placement, model.card.name
        instances = {"instance": placement.instance, "prefill": placement.prefill}
        known = {
            field: self._dependencies.registry.instance_of(name, each)
            for field, each in instances.items()
            if each is not None
        }
        if known:
            request.placement = replace(placement, **known)

    async def _compact(
        self,
        stream: AnswerStream | None,
        api: Api,
        call: ApiCall,
        caller: Caller,
        prepared: PreparedRequest,
    ) -> PreparedRequest | web.StreamResponse:
        """Have the conversation summarized; the request behind that, or the whole response.

        A stream opens before, and gets keep-alives meanwhile.
        """
        request, dependencies = call.request, self._dependencies
        if not request.messages:
            raise InvalidRequest("The conversation is empty: nothing to compact.", "input")
        if stream is not None:
            await stream.open(call.renderer.begin(), lambda: None)
            dependencies.stream_supervisor.add(stream, api.keepalive, lambda: None)
        try:
            text, usage = await self._compactor.summarize(prepared, caller.account, caller.started)
            edits = request.context_edits
            if call.compacted is None or edits is None or edits.compact is None:
                return prepared
            if not text:
                if edits.compact.always:
                    raise ApiError("internal", "The model has written no summary.")
                return prepared
            summary = ConversationSummary(text, origin=first_message_key(request))
            call.compacted(summary, usage, edits.compact.pauses)
            if not edits.compact.pauses:
                request.messages, request.memo = after_summary(request, summary), NO_MEMO
                request.origin = summary.origin
                return await self._rendered(request, prepared.model, prepared.adapter)
        except ApiError as error:
            if stream is None:
                raise
            stream.failed = caller.failed = True
            log_failure(error.kind, request.id, f"while its conversation was summarized, {error}")
            return await stream.close(call.renderer.failed(error))
        finally:
            if stream is not None:
                dependencies.stream_supervisor.remove(stream)
        end, nothing = call.renderer.end(0, Ending("stop")), AnswerSummary(NO_USAGE)
        body = call.renderer.whole(nothing)
        if not await self._keep_turn(call.thread, request, body):
            body = call.renderer.whole(nothing)
        if stream is not None:
            return await stream.close(end + call.renderer.done(nothing))
        return web.Response(body=body, content_type=JSON)

    async def _in_background(self, api: Api, call: EndpointCall[ApiCall]) -> web.StreamResponse:
        """Start a response that goes on without its client; send its events, or how it begins."""
        parsed, caller, background = call.parsed, call.caller, self._dependencies.background
        request, tenant = parsed.request, call.caller.tenant
        prepared = await self._prepare(parsed, caller)
        begun, stamp = parsed.renderer.begin(), stamp_of(call.http)
        headers = kept_headers(call.headers)
        run = await background.begin(
            request.id, tenant, stamp, call.body, headers, begun, request.target
        )
        leave = caller.outlive()
        work = self._generate(run, api, parsed, caller, prepared, leave)
        background.start(request.id, run, work)
        self._dependencies.arrivals.discard(caller)
        if not request.stream:
            return web.Response(body=run.head.response, content_type=JSON)
        return await background.follow(
            call.http, request.id, tenant, -1, self.resumer(api, call.caller)
        )

    async def _generate(
        self,
        run: Run,
        api: Api,
        call: ApiCall,
        caller: Caller,
        prepared: PreparedRequest,
        leave: Callable[[], None],
        records: Sequence[EventRecord] = (),
    ) -> None:
        """Generate a background response into `run`, behind the `records` that it has."""
        renderer, request, dependencies = call.renderer, call.request, self._dependencies
        hooked = dependencies.session_hooks.begin(prepared)
        active = dependencies.runner.run(prepared, renderer, caller.started, run, caller.account)
        run.tokens, run.rendered = lambda: active.tokens, lambda: active.rendered
        try:
            async with active:
                if records and call.go_on is not None:
                    run.muted = True
                    tokens = [token for record in records for token in record.tokens]
                    active.replay(tokens, [cut for record in records for cut in record.cuts])
                    call.go_on(1 + max(n for r in records for n, _, _ in events(r.frames)))
                    run.replayed(len(tokens))
                last = await active.finished()
                summary = active.summary()
                await self._keep_turn(call.thread, request, renderer.whole(summary))
                run.end(last + renderer.done(summary))
        except ApiError as error:
            log_failure(error.kind, request.id, f"in the background, {error}")
            run.end(renderer.failed(error))
        except Exception as error:
            run.end(renderer.failed(internal_error(error, request.id)))
        finally:
            self._copy(caller, active)
            summarize(active, caller.started)
            dependencies.session_hooks.end(hooked, active, api.in_order)
            leave()

    def resumer(self, api: Api, caller: Caller) -> Resume:
        """A function that goes on with the background response of a frontend that is gone."""

        async def resume(
            response_id: str, head: RunHead, run: Run, records: Sequence[EventRecord]
        ) -> None:
            stamp = RequestStamp(head.token, head.created)
            call = api.parse(head.body, head.headers, stamp)
            begun = call.renderer.begin()
            if not records:
                run.write(begun)
            try:
                # the reader's request may have ended: it no longer counts on its account
                self._dependencies.authenticator.bind(call.request, caller.account)
                call.request.body_bytes += len(head.body)
                call.request.target = head.target
                prepared = await self._prepare(call, caller)
            except ApiError as error:
                run.end(call.renderer.failed(error))
                return
            await self._generate(run, api, call, caller, prepared, lambda: None, records)

        return resume

    def _copy(self, caller: Caller, active: ActiveRequest) -> None:
        """Send the copies of a request that has been answered."""
        if caller.shadows and active.tasks[0].stream.finish in ("stop", "length"):
            now = asyncio.get_running_loop().time()
            self._dependencies.shadows.start(caller.shadows, now)

    async def _whole(self, active: ActiveRequest, call: ApiCall) -> web.Response:
        await active.finished()
        request = call.request
        summary = active.summary()
        body = call.renderer.whole(summary)
        if not await self._keep_turn(call.thread, request, body):
            body = call.renderer.whole(summary)
        return web.Response(body=body, content_type=JSON)

    async def _keep_turn(
        self, thread: ConversationThread | None, request: GenerateRequest, body: bytes
    ) -> bool:
        """Store the response if requested; on failure mark the thread and return False.

        A connection that keeps its conversation keeps the response in any case.
        """
        if thread is None:
            return True
        stored = not thread.store or await self._store(thread, request, body)
        if thread.conversation is not None:
            stored &= await self._add(thread, thread.conversation, request, body)
        if thread.keeps and request.light:
            thread.keep(body)
        elif thread.keeps:
            await self._apart(request, lambda: thread.keep(body))
        return stored

    async def _apart(self, request: GenerateRequest, work: Callable[[], T]) -> T:
        """Do work on a body and its answer, in a thread unless they are short."""
        if request.body_bytes < LARGE:
            return work()
        return await self._dependencies.preprocessor.threads.call(request.owner, work)

    async def _store(
        self, thread: ConversationThread, request: GenerateRequest, body: bytes
    ) -> bool:
        turn = await self._apart(request, lambda: thread.turn(body))
        turn.tenant = request.cache_salt
        storing, stored = request.span.child(STORE_RESPONSE), False
        try:
            stored = await self._dependencies.responses.put(turn)
        finally:
            storing.fail("" if stored else "unstored")
            storing.end()
        if not stored:
            thread.mark_unstored()
        return stored

    async def _add(
        self, thread: ConversationThread, name: str, request: GenerateRequest, body: bytes
    ) -> bool:
        """Add a turn to its stored conversation; on failure log it and return False."""
        items = await self._apart(request, lambda: thread.added(body))
        tenant, conversations = request.cache_salt, self._history.conversations
        try:
            await conversations.change(name, tenant, lambda found: found.add(items))
        except ApiError as error:
            metrics.unstored_responses.inc()
            log.warning("response %s not added to %s: %s", request.id, name, error)
            thread.mark_not_added()
            return False
        return True

    async def _stream(
        self, stream: AnswerStream, api: Api, active: ActiveRequest, call: ApiCall
    ) -> web.StreamResponse:
        """Open the stream once workers accepted the request, or when a keep-alive is due."""
        if not stream.is_open:
            await active.accepted(self._dependencies.settings.keepalive_s)
        renderer, thread = call.renderer, call.thread
        try:
            if not stream.is_open:
                # without a variable, which would hold it as long as the stream
                await stream.open(
                    annotations(active.prepared) + renderer.begin(active.so_far), active.flush
                )
            self._dependencies.stream_supervisor.add(stream, api.keepalive, active.flush)
            try:
                last = await active.finished()
                summary = active.summary()
                if thread is not None and (thread.store or thread.keeps or thread.conversation):
                    await self._keep_turn(thread, call.request, renderer.whole(summary))
                last += renderer.done(summary)
            except ConnectionError:
                raise
            except Exception as error:
                stream.failed = True
                last = _last_frames(call, error)
            return await stream.close(last)
        finally:
            self._dependencies.stream_supervisor.remove(stream)


def _last_frames(call: ApiCall, error: Exception) -> bytes:
    """The frames that end an answer after its head."""
    if isinstance(error, ApiError):
        log_failure(error.kind, call.request.id, f"after its head, {error}")
        call.request.span.fail(error.kind)
        return call.renderer.failed(error)
    call.request.span.fail("internal")
    return call.renderer.failed(internal_error(error, call.request.id))
