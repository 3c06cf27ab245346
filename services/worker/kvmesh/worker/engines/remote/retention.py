"""Retention in a vLLM server that has kvmesh's plugin, over HTTP."""

import logging
from typing import Any

import aiohttp
import msgspec

from kvmesh.bus.errors import cause
from kvmesh.bus.messages import Clear, ExpectReturns, Pin, Release, Unpin
from kvmesh.settings import redacted
from kvmesh.worker.adapters.engine_stores import LOWER
from kvmesh.worker.clearing import ClearOutcome, named_tiers
from kvmesh.worker.engine import EngineError
from kvmesh.worker.enginecore.counters import RetentionState

log = logging.getLogger(__name__)
PATH = "/v1/kvmesh/retention"
TIMEOUT_S = 10.0
OLD_PLUGIN = "the server's plugin of kvmesh is older, and does not clear the stores of connectors"
_encode = msgspec.msgpack.Encoder().encode


class _State(msgspec.Struct):
    ranks: list[RetentionState]


class _Reply(msgspec.Struct):
    blocks: int
    ranks: list[dict[str, Any]]
    kept: dict[int, str] | None = None


class _Outcomes(msgspec.Struct):
    prompt: list[str] | None = None
    decode: str | None = None


class ServerRetention:
    """Commands and queries of the plugin's endpoints; `states` is what they told last."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url + PATH
        self._timeout = aiohttp.ClientTimeout(TIMEOUT_S)
        self.states: list[RetentionState] = []
        self.problem = ""

    @property
    def expects_returns(self) -> bool:
        """True if the plugin orders eviction by forecasts: a former version counts none."""
        return any(state.forecasts for state in self.states)

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

    async def execute(self, command: Pin | Release | Unpin | ExpectReturns) -> int:
        """Execute a command; the number of blocks affected. Raises EngineError."""
        return (await self._execute(command)).blocks

    async def _execute(self, command: Clear | Pin | Release | Unpin | ExpectReturns) -> _Reply:
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

    async def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        url = self._url + path
        try:
            async with self._http.request(
                method, url, data=body, timeout=self._timeout
            ) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(redacted(f"{url}: {cause(error)}")) from error
        if status != 200:
            raise EngineError(redacted(f"{url} replied {status}: {content[:500].decode()}"))
        return content

    def _read(self, content: bytes) -> None:
        try:
            self.states = msgspec.json.decode(content, type=_State).ranks
        except msgspec.MsgspecError as error:
            log.warning("the plugin of another version told no state: %s", error)
