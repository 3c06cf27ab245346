"""vLLM's endpoint plugin `kvmesh`: commands and reports of retention over HTTP.

vLLM loads it if `VLLM_PLUGINS` names it. The paths begin with `/v1`, so that the server's
`--api-key` protects them.
"""

import asyncio
import logging
from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from kvmesh.bus.messages import Clear, MessageDecoder, Pin, Release, Unpin
from kvmesh.hashing import HASH_BYTES
from kvmesh.retention.claims import MAX_LEVEL
from kvmesh.worker.clearing import ClearOutcome, combined
from kvmesh.worker.engines.vllm.retention.hints import Name, namespace, plain_fault
from kvmesh.worker.engines.vllm.retention.settings import (
    CONNECTOR,
    KEPT,
    STATE,
    TELLS_TIERS,
    QueryOutcomes,
    QueryState,
)
from kvmesh.worker.engines.vllm.scheduler_stats import managed_ranks
from kvmesh.worker.engines.vllm.transfer_config import (
    connectors_of,
    tells_tiers,
    transfer_config_of,
)

log = logging.getLogger(__name__)
PATH = "/v1/kvmesh/retention"
COMMAND_S = 10.0
MAX_BODY_BYTES = 4 << 20
_encode = msgspec.msgpack.Encoder().encode
_commands = MessageDecoder(Clear | Pin | Release | Unpin)
_Command = Clear | Pin | Release | Unpin | QueryState | QueryOutcomes


class _ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    sessions: list[Name]


class _UnpinBody(msgspec.Struct, forbid_unknown_fields=True):
    id: Name


class _ClearBody(msgspec.Struct, forbid_unknown_fields=True):
    cache_salt: str | None = None


class RefusedCommand(Exception):
    """A command was refused with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RetentionEndpoints:
    """Implements vLLM's `EndpointPlugin`."""

    name = "kvmesh"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._client: Any = None
        self._ranks = 1
        self._missing = "vLLM has no engine here"
        self._tells_tiers = False

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's server."""
        router = APIRouter(prefix=PATH)
        for path, method, handler in (
            ("", "GET", self._state),
            ("/outcomes/{name}", "GET", self._outcomes),
            ("/release", "POST", self._release),
            ("/unpin", "POST", self._unpin),
            ("/clear", "POST", self._clear),
            ("/command", "POST", self._command),
        ):
            router.add_api_route(path, _answering(handler), methods=[method])
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take vLLM's client of its engine."""
        if engine_client is None:
            return
        self._client = engine_client
        config = engine_client.vllm_config
        self._ranks = len(managed_ranks(engine_client))
        transfer = transfer_config_of(config)
        self._tells_tiers = tells_tiers(transfer)
        given = connectors_of(transfer)
        used = [str(connector.get("kv_connector")) for connector in given]
        self._missing = (
            ""
            if CONNECTOR in used
            else f"{CONNECTOR} does not run, vLLM's KV connectors are: {', '.join(used) or 'none'}"
        )
        if self._missing:
            log.warning("retention has no effect: %s", self._missing)

    async def _state(self, _: Request) -> Any:
        replies = await self._execute(QueryState())
        return {
            "ranks": [{**reply[STATE], "rank": i} for i, reply in enumerate(replies)],
            "blocks": sum(reply["blocks"] for reply in replies),
            TELLS_TIERS: self._tells_tiers,
        }

    async def _outcomes(self, http: Request) -> Any:
        name = http.path_params["name"]
        replies = await self._execute(QueryOutcomes(name))
        found = [reply["report"] for reply in replies if reply["report"] is not None]
        if not found:
            raise RefusedCommand(404, f"no recent request {name} had a hint")
        return found[0]

    async def _release(self, http: Request) -> Any:
        body = await _body(http, _ReleaseBody)
        return await self._affected(Release(sessions=body.sessions))

    async def _unpin(self, http: Request) -> Any:
        return await self._affected(Unpin((await _body(http, _UnpinBody)).id))

    async def _clear(self, http: Request) -> Any:
        salt = (await _body(http, _ClearBody)).cache_salt
        command = Clear() if salt is None else Clear(salt=namespace(salt), tenant=salt)
        replies = await self._execute(command)
        kept = _kept(replies)
        return {"blocks": _blocks(replies), **({KEPT: kept} if kept else {})}

    async def _command(self, http: Request) -> Any:
        """Execute a command of a mesh's worker, in msgpack."""
        try:
            command = _commands.decode(await _bytes(http))
        except msgspec.MsgspecError as error:
            raise RefusedCommand(400, str(error)) from error
        if isinstance(command, Pin) and not (
            len(command.sequence_hashes) % HASH_BYTES == 0
            and 0 < command.ttl_s < inf
            and 0 <= command.priority <= MAX_LEVEL
        ):
            raise RefusedCommand(400, "the pin is invalid")
        replies = await self._execute(command)
        states = [reply[STATE] for reply in replies]
        return {"blocks": _blocks(replies), "ranks": states, KEPT: _kept(replies)}

    async def _affected(self, command: _Command) -> dict[str, int]:
        return {"blocks": _blocks(await self._execute(command))}

    async def _execute(self, command: _Command) -> list[dict[str, Any]]:
        """The reply of each data-parallel rank; raises RefusedCommand."""
        if self._missing:
            raise RefusedCommand(501, self._missing)
        core, packed = self._client.engine_core, _encode(command)
        try:
            async with asyncio.timeout(COMMAND_S):
                if self._ranks > 1:
                    replies = await core.call_utility_all_async("kvmesh_retention", packed)
                else:
                    replies = [await core.call_utility_async("kvmesh_retention", packed)]
        except TimeoutError:
            raise RefusedCommand(504, f"the engine did not reply in {COMMAND_S:g} s") from None
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            raise RefusedCommand(501, errors[0])
        return list(replies)


def _kept(replies: list[dict[str, Any]]) -> Mapping[int, str]:
    """By tier, why blocks that a clear named are still there; of several ranks the first reason."""
    return combined(ClearOutcome(0, reply.get(KEPT, {})) for reply in replies).kept


def _blocks(replies: list[dict[str, Any]]) -> int:
    return sum(reply["blocks"] for reply in replies)


def _answering(handler: Any) -> Any:
    """A route that answers with JSON, errors in the form of the OpenAI API."""

    async def answer(http: Request) -> Response:
        try:
            content, status = await handler(http), 200
        except RefusedCommand as error:
            kind = "BadRequestError" if error.status == 400 else "RetentionError"
            content = {"error": {"message": str(error), "type": kind, "code": error.status}}
            status = error.status
        return Response(msgspec.json.encode(content), status, media_type="application/json")

    return answer


async def _bytes(http: Request) -> bytes:
    content = b""
    async for chunk in http.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise RefusedCommand(400, f"the body has more than {MAX_BODY_BYTES} bytes")
    return content


async def _body(http: Request, kind: Any) -> Any:
    try:
        return msgspec.json.decode(await _bytes(http), type=kind)
    except msgspec.MsgspecError as error:
        raise RefusedCommand(400, plain_fault(error)) from error
