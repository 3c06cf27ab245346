"""Embedded vLLM that retains the blocks of its prefix cache on request."""

from typing import Any

import msgspec

from kvmesh.bus.messages import Clear, Pin, Release, Unpin
from kvmesh.worker.clearing import ClearOutcome, combined
from kvmesh.worker.engine import EngineError
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.engines.vllm.engine import VllmEngine
from kvmesh.worker.engines.vllm.retention.settings import KEPT, STATE

_encode = msgspec.msgpack.Encoder().encode


class RetainingVllmEngine(VllmEngine):
    """A vLLM with `KvmeshRetentionConnector`; commands go to all of its ranks."""

    retains = True

    async def release(self, sessions: list[str]) -> int:
        return await self._execute(Release(sessions=sessions))

    async def pin(self, pin: Pin) -> int:
        return await self._execute(pin)

    async def unpin(self, pin: str) -> int:
        return await self._execute(Unpin(pin))

    async def clear(self, command: Clear) -> ClearOutcome:
        replies = await self._replies(command)
        return combined(ClearOutcome(reply["blocks"], reply[KEPT]) for reply in replies)

    def retention(self) -> list[RetentionState]:
        return [_state(stats.retention, rank) for rank, stats in enumerate(self._stats)]

    async def _execute(self, command: Release | Pin | Unpin) -> int:
        return sum(reply["blocks"] for reply in await self._replies(command))

    async def _replies(self, command: Clear | Release | Pin | Unpin) -> list[dict[str, Any]]:
        """The reply of each rank; raises EngineError."""
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
        return list(replies)


def _state(data: dict[str, Any], rank: int) -> RetentionState:
    return RetentionState(
        rank=rank,
        sessions=data.get("sessions", 0),
        pins=data.get("pins", 0),
        charged_blocks=data.get("charged_blocks", 0),
        outcomes=data.get("outcomes", {}),
        evicted=data.get("evicted", {}),
    )
