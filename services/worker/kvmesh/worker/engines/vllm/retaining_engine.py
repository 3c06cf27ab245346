"""Embedded vLLM that retains the blocks of its prefix cache on request."""

from collections.abc import Container
from typing import Any

import msgspec

from kvmesh.bus.messages import Clear, ExpectReturns, Pin, Release, ReturnForecast, Unpin
from kvmesh.worker.engine import EngineError
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.engines.vllm.engine import VllmEngine
from kvmesh.worker.engines.vllm.retention.settings import STATE

_encode = msgspec.msgpack.Encoder().encode
ENGINE = 0


class RetainingVllmEngine(VllmEngine):
    """A vLLM with `KvmeshRetentionConnector`; commands go to all of its ranks."""

    retains = True

    async def release(self, sessions: list[str]) -> int:
        return await self._execute(Release(sessions=sessions))

    async def pin(self, pin: Pin) -> int:
        return await self._execute(pin)

    async def unpin(self, pin: str) -> int:
        return await self._execute(Unpin(pin))

    async def drop(self, salt: int | None, tenant: str, tiers: Container[int]) -> int:
        if ENGINE not in tiers:
            return 0
        return await self._execute(Clear(salt=salt, tenant=tenant))

    async def expect_returns(self, forecasts: list[ReturnForecast]) -> None:
        await self._execute(ExpectReturns(forecasts))

    def retention(self) -> list[RetentionState]:
        return [_state(stats.retention, rank) for rank, stats in enumerate(self._stats)]

    async def _execute(self, command: Clear | Release | Pin | Unpin | ExpectReturns) -> int:
        client = self._llm.engine_core
        packed = _encode(command)
        if len(self._stats) > 1:
            replies = await client.call_utility_all_async("kvmesh_retention", packed)
        else:
            replies = [await client.call_utility_async("kvmesh_retention", packed)]
        for stats, reply in zip(self._stats, replies, strict=False):
            stats.retention = reply.get(STATE, stats.retention)
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            raise EngineError(f"vLLM could not execute the command: {errors[0]}")
        return sum(reply["blocks"] for reply in replies)


def _state(data: dict[str, Any], rank: int) -> RetentionState:
    return RetentionState(
        rank=rank,
        sessions=data.get("sessions", 0),
        pins=data.get("pins", 0),
        charged_blocks=data.get("charged_blocks", 0),
        outcomes=data.get("outcomes", {}),
        evicted=data.get("evicted", {}),
        forecasts=data.get("forecasts", {}),
        returns=data.get("returns", {}),
    )
