"""The handler of every endpoint: check the scope, read the body, parse it, act, respond."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiohttp import web

from kvmesh.frontend.apis.base import Headers, RequestStamp, json_encode
from kvmesh.frontend.apis.turns.bodies import TurnBody, Turns
from kvmesh.frontend.auth.accounts import Scope
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.bodies import JSON, check_utf8, parse_heavy, read_body
from kvmesh.frontend.http.middleware import Caller, Handler, caller_of
from kvmesh.frontend.http.request_id import stamp_of
from kvmesh.runtime.fair_slots import FairTurns
from kvmesh.settings.schema import FrontendSettings

T = TypeVar("T")
INTAKE = 8  # light requests that are parsed and prepared in a pass of the event loop


@dataclass(frozen=True, slots=True)
class EndpointCall(Generic[T]):
    """One call of an endpoint: the HTTP request, its caller and body, and the parsed body.

    `turn` tells what of the body an earlier one has. `light`: the rest is light to work on.
    """

    http: web.Request
    caller: Caller
    body: bytes
    parsed: T
    turn: TurnBody
    light: bool = True

    @property
    def headers(self) -> Headers:
        return self.http.headers

    @property
    def path_id(self) -> str:
        """The id in the path; empty if the path has none."""
        return self.http.match_info.get("id", "")


Answer = web.StreamResponse | bytes | dict[str, Any]  # bytes and dicts: a JSON body, status 200
Parse = Callable[[bytes, Headers, RequestStamp, TurnBody], T]
Read = Callable[[web.Request], Awaitable[bytes]]
Action = Callable[[EndpointCall[T]], Awaitable[Answer]]


class EndpointFactory:
    """Makes handlers. They only raise ApiError: the middleware responds to errors."""

    def __init__(self, settings: FrontendSettings, threads: FairThreads, turns: Turns) -> None:
        self._settings = settings
        self._threads = threads
        self._turns = turns
        self._intake = FairTurns(INTAKE)

    def with_body(
        self,
        parse: Parse[T],
        act: Action[T],
        scope: Scope | None = None,
        api: str = "",
        read: Read | None = None,
    ) -> Handler:
        """Handler of a request with a body; `parse` runs in a thread unless the body is light.

        Bodies of the same `api` may continue each other. The event loop begins few of its light
        ones in one pass, of callers in turn: many requests of one do not delay those of another.
        `read` returns a body that is not that of the HTTP request.
        """

        async def received(http: web.Request) -> EndpointCall[T]:
            caller = caller_of(http)
            if scope is not None:
                caller.require_scope(scope)
            if read is not None:
                body = await read(http)
            else:
                body = await read_body(http, self._settings, self._threads, caller.owner)
            turn = self._turns.open(caller.tenant, api, body) if api else TurnBody(body)
            if not turn.rest.isascii():
                await check_utf8(turn.rest)
            light, stamp = turn.is_light, stamp_of(http)
            if api and light:
                await self._intake.take(caller.fair_class)

            def parsed_body() -> T:
                return parse(body, http.headers, stamp, turn)

            parsed = (
                parsed_body()
                if light
                else await parse_heavy(self._threads, caller.owner, body, parsed_body)
            )
            return EndpointCall(http, caller, body, parsed, turn, light)

        async def handle(http: web.Request) -> web.StreamResponse:
            return _response(await act(await received(http)))

        return handle

    @staticmethod
    def without_body(act: Action[None], scope: Scope | None = None) -> Handler:
        """Handler of a request whose body, if any, is not read."""

        async def handle(http: web.Request) -> web.StreamResponse:
            caller = caller_of(http)
            if scope is not None:
                caller.require_scope(scope)
            return _response(await act(EndpointCall(http, caller, b"", None, TurnBody(b""))))

        return handle


def _response(answer: Answer) -> web.StreamResponse:
    if isinstance(answer, web.StreamResponse):
        return answer
    body = answer if isinstance(answer, bytes) else json_encode(answer)
    return web.Response(body=body, content_type=JSON)
