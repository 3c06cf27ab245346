"""Answers the requests of batches, as if each had come by HTTP."""

import asyncio
from collections.abc import Callable, Mapping

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import Api
from kvmesh.frontend.apis.messages import api as messages
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.batches.batch import StoredBatch
from kvmesh.frontend.batches.forms import OK, LineResult
from kvmesh.frontend.batches.lines import LineBody, model_of
from kvmesh.frontend.batches.runner import LineDelayed
from kvmesh.frontend.errors import ApiError, Kind
from kvmesh.frontend.http.bodies import internal_error
from kvmesh.frontend.http.generate import GenerateEndpoint
from kvmesh.frontend.http.middleware import Caller, RequestMiddleware
from kvmesh.frontend.http.request_id import new_stamp

PASSING: frozenset[Kind] = frozenset(("rate_limit", "overloaded", "unavailable", "timeout"))


class LineExecutor:
    """Answers a request on the account of the key that created its batch.

    It counts towards the limits of that key. What only cannot be served now raises LineDelayed.
    """

    def __init__(
        self,
        generate: GenerateEndpoint,
        middleware: RequestMiddleware,
        authenticator: Authenticator,
        apis: Mapping[str, Api],
    ) -> None:
        self._generate = generate
        self._middleware = middleware
        self._authenticator = authenticator
        self._apis = apis

    async def __call__(
        self, batch: StoredBatch, line: LineBody, placed: Callable[[], None]
    ) -> LineResult:
        api, stamp = self._apis[batch.endpoint], new_stamp()
        name = api.id_prefix + stamp.token
        now = asyncio.get_running_loop().time()
        shape = messages.SHAPE if batch.form == "anthropic" else openai.SHAPE
        try:
            account = self._authenticator.account_of(batch.key)
            caller = Caller(self._authenticator, batch.headers, account, now)
            caller.on_placed = placed
        except ApiError as error:
            return LineResult(*shape.error(error, name), name)
        try:
            caller.enter()
            try:
                body = await self._generate.line(
                    api, bytes(line.body), batch.headers, stamp, caller
                )
            finally:
                caller.leave()
            usage = caller.active.usage() if caller.active is not None else None
            result = LineResult(OK, body, name, usage)
        except ApiError as error:
            known = error.code == "model_not_found" and model_of(line) in batch.models
            if error.kind in PASSING or known:
                limited = error.kind == "rate_limit"
                raise LineDelayed(error.retry_after or 0.0, limited) from error
            result = LineResult(*shape.error(error, name), name)
        except Exception as error:
            result = LineResult(*shape.error(internal_error(error, name), name), name)
        self._middleware.note_line(batch.endpoint, api.name, caller, result)
        return result
