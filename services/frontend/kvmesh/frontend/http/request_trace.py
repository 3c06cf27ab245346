"""The first span of a generating request: from its arrival to the last byte of its response."""

import asyncio
from collections.abc import Awaitable
from time import monotonic
from typing import Any

from aiohttp import web

from kvmesh.bus.messages import CacheAccount
from kvmesh.frontend.cache_account.account import lost_by_reason
from kvmesh.frontend.cache_account.comparison import described
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import STATUS as HTTP_STATUSES
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation.accounts import account_of
from kvmesh.frontend.generation.active_request import ActiveRequest
from kvmesh.frontend.http.access_log import CLIENT_CLOSED
from kvmesh.frontend.http.middleware import SPAN, Handler, caller_of
from kvmesh.frontend.pooling.run import PoolingRun
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest
from kvmesh.tracing import names, tracer
from kvmesh.tracing.span import NO_SPAN, TraceSpan

SERVER_ERROR = 500
# Names of the operations of APIs, as OpenTelemetry has them; others chat.
OPERATIONS = {
    "completions": "text_completion",
    "embeddings": "embeddings",
    **dict.fromkeys(("rerank", "rerank-v2", "score"), "rerank"),
}


def traced(handler: Handler, api: str) -> Handler:
    """The handler of an API in a span that continues the client's trace, if it sent one."""
    operation = OPERATIONS.get(api, "chat")

    def handle(http: web.Request) -> Awaitable[web.StreamResponse]:
        headers, started = http.headers, caller_of(http).started
        parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
        span = tracer.begin(names.REQUEST, parent, state, started)
        if not span:
            return handler(http)
        http[SPAN] = span
        span.attributes = {
            names.OPERATION: operation,
            names.METHOD: http.method,
            names.HTTP_ROUTE: http.path,
        }
        return _answer(http, handler, span)

    return handle


async def _answer(http: web.Request, handler: Handler, span: TraceSpan) -> web.StreamResponse:
    status = SERVER_ERROR
    with tracer.logged_as(span):
        try:
            response = await handler(http)
            status = response.status
            return response
        except ApiError as error:
            status = HTTP_STATUSES[error.kind]
            span.set(names.ERROR, error.kind)
            raise
        except (ConnectionError, asyncio.CancelledError):
            status = CLIENT_CLOSED
            raise
        finally:
            span.set(names.HTTP_STATUS, status)
            if status >= SERVER_ERROR:  # by convention an error of the client is none of the server
                span.fail(str(span.attributes.get(names.ERROR, "internal")))
            tracer.finish(span)


def received(http: web.Request, request: GenerateRequest, started: float) -> None:
    """Give the parsed request its span."""
    span: TraceSpan = http.get(SPAN, NO_SPAN)
    if span:
        request.span = span
        span.record(names.RECEIVE, started, monotonic())


def describe(prepared: PreparedRequest) -> None:
    """Set the attributes of a request that is ready for dispatch."""
    request = prepared.request
    span, hints = request.span, request.hints
    if not span:
        return
    span.attributes |= {
        names.REQUEST_ID: request.id,
        names.MODEL: request.model,
        names.STREAM: request.stream,
        names.MAX_TOKENS: prepared.max_tokens,
        names.CHOICES: len(prepared.prompts) * request.n,
        names.PROMPT_TOKENS: prepared.prompt_tokens,
    }
    if hints.session is not None:
        span.set(names.SESSION, hints.session)
    if request.cache_salt:
        span.set(names.TENANT, request.cache_salt)


def summarize(active: ActiveRequest | PoolingRun, started: float) -> None:
    """Set the attributes of a request that has ended."""
    span = active.prepared.request.span
    if not span:
        return
    streams = [task.stream for task in active.tasks]
    first = min((s.first_token_at for s in streams if s.first_token_at is not None), default=None)
    if first is not None:
        span.set(names.TTFT_S, round(first - started, 6))
    span.attributes |= {
        names.CACHED_TOKENS: sum(sum(stream.cached or []) for stream in streams),
        names.OUTPUT_TOKENS: sum(len(stream.tokens) for stream in streams),
        names.FINISH_REASONS: [stream.finish or "cancelled" for stream in streams],
    }
    account = account_of(active.tasks[0])
    if account is not None:
        span.attributes |= _cache_attributes(account)


def _cache_attributes(account: CacheAccount) -> dict[str, Any]:
    """The account of the first prompt."""
    found: dict[str, Any] = {
        names.NEW_TOKENS: account.new,
        names.POSSIBLE_TOKENS: account.possible,
        names.LOST_TOKENS: account.lost,
    }
    if account.losses:
        lost = lost_by_reason(account.losses)
        found[names.LOSSES] = [f"{reason}={tokens}" for reason, tokens in lost.items()]
    if account.change is not None:
        found[names.PROMPT_CHANGE] = described(account.change)
    return found
