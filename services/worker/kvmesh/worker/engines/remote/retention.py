"""Retention in a vLLM server that has kvmesh's plugin, over HTTP."""

import asyncio
import logging
from typing import Any

import aiohttp
import msgspec

from kvmesh.bus.errors import cause
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import Clear, Pin, Release, Unpin
from kvmesh.settings import redacted
from kvmesh.worker.adapters.engine_stores import LOWER
from kvmesh.worker.clearing import ClearOutcome, named_tiers
from kvmesh.worker.engine import EngineError
from kvmesh.worker.enginecore.counters import RetentionState

log = logging.getLogger(__name__)
PATH = "/v1/kvmesh/retention"
TIMEOUT_S = 10.0
LOADED_S = 1.0
OLD_PLUGIN = "the server's plugin of kvmesh is older, and does not clear the stores of connectors"
_encode = msgspec.msgpack.Encoder().encode


class _State(msgspec.Struct):
    ranks: list[RetentionState]
    tells_tiers: bool = False


class _Reply(msgspec.Struct):
    blocks: int
    ranks: list[dict[str, Any]]
    kept: dict[int, str] | None = None


class _Outcomes(msgspec.Struct):
    prompt: list[str] | None = None
    decode: str | None = None
    loaded: list[int] = []


class ServerRetention:
    """Commands and queries of the plugin's endpoints; `states` is what they told last.

    `tells_tiers`: the server knows from which tier it has loaded the tokens of a request.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url + PATH
        self._timeout = aiohttp.ClientTimeout(TIMEOUT_S)
        self.states: list[RetentionState] = []
        self.problem = ""
        self.tells_tiers = False
        self._logged = LogOnce()

    async def find(self) -> bool:
        """True if the server has the plugin and its connector; `problem` is what a plugin lacks."""
        try:
            async with self._http.get(self._url, timeout=self._timeout) as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(redacted(f"{self._url}: {cause(error)}")) from error
        if status == 200:
            self._read(content)
            return True
        if status == 404:
            log.info("the server retains no blocks on request: it has no plugin of kvmesh")
        else:
            told = content[:500].decode(errors="replace")
            self.problem = f"the server's plugin of kvmesh replied {status}: {told}"
        return False

    async def update(self) -> None:
        """Query the state; a failure leaves the former one, since health probes tell the rest."""
        try:
            async with self._http.get(self._url, timeout=self._timeout) as response:
                if response.status == 200:
                    self._read(await response.read())
        except (aiohttp.ClientError, TimeoutError):
            return

    async def clear(self, command: Clear) -> ClearOutcome:
        """Clear the server's memory and stores; raises EngineError."""
        reply = await self._execute(command)
        if reply.kept is not None:
            return ClearOutcome(reply.blocks, reply.kept)
        return ClearOutcome(
            reply.blocks, {tier: OLD_PLUGIN for tier in LOWER if tier in named_tiers(command)}
        )

    async def execute(self, command: Pin | Release | Unpin) -> int:
        """Execute a command; the number of blocks affected. Raises EngineError."""
        return (await self._execute(command)).blocks

    async def _execute(self, command: Clear | Pin | Release | Unpin) -> _Reply:
        content = await self._call("POST", "/command", _encode(command))
        try:
            reply = msgspec.json.decode(content, type=_Reply)
            states = msgspec.convert(
                [{**state, "rank": rank} for rank, state in enumerate(reply.ranks)],
                list[RetentionState],
            )
        except msgspec.MsgspecError as error:
            raise EngineError(f"the plugin of another version replied: {error}") from error
        self.states = states
        return reply

    async def outcomes(self, request: str) -> tuple[list[str] | None, str | None]:
        """Outcomes of the directives for a request's prompt and for its output, as known now.

        An outcome that the server cannot tell is None.
        """
        try:
            content = await self._call("GET", f"/outcomes/{request}", None)
            found = msgspec.json.decode(content, type=_Outcomes)
        except (EngineError, msgspec.MsgspecError) as error:
            log.warning("the outcome of request %s is unknown: %s", request, error)
            return None, None
        return found.prompt, found.decode

    async def loaded(self, request: str) -> list[int]:
        """Tokens that the server has loaded for a request, by tier from tier 1 on; empty if none.

        A server that does not tell costs an answer at most LOADED_S.
        """
        try:
            async with asyncio.timeout(LOADED_S):
                status, content = await self._reply("GET", f"/outcomes/{request}", None)
            if status == 404:  # nothing was loaded
                return []
            content = self._checked("/outcomes", status, content)
            return msgspec.json.decode(content, type=_Outcomes).loaded
        except (EngineError, TimeoutError, msgspec.MsgspecError) as error:
            if self._logged.first("loaded"):
                log.warning("the tiers of a request's cached tokens are unknown: %s", cause(error))
            return []

    async def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        return self._checked(path, *await self._reply(method, path, body))

    async def _reply(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        url = self._url + path
        try:
            async with self._http.request(
                method, url, data=body, timeout=self._timeout
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(redacted(f"{url}: {cause(error)}")) from error

    def _checked(self, path: str, status: int, content: bytes) -> bytes:
        if status != 200:
            told = content[:500].decode(errors="replace")
            raise EngineError(redacted(f"{self._url}{path} replied {status}: {told}"))
        return content

    def _read(self, content: bytes) -> None:
        try:
            state = msgspec.json.decode(content, type=_State)
            self.states, self.tells_tiers = state.ranks, state.tells_tiers
        except msgspec.MsgspecError as error:
            log.warning("the plugin of another version told no state: %s", error)
