"""Reading the planner's decisions from their stream."""

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import MessageDecoder, ScalingDecision
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader

READ_S = 30.0
LATEST_MINUTES = 5  # a planner records a decision every two minutes at least
_decisions = MessageDecoder(ScalingDecision)


async def read_decisions(
    bus: Bus, since: datetime | None, model: str | None
) -> list[ScalingDecision]:
    """The decisions since a time, oldest first; without one, the latest of each model.

    Raises BusError, or TimeoutError after READ_S seconds.
    """
    found: list[ScalingDecision] = []

    def add(message: StreamMessage) -> None:
        try:
            decision = _decisions.decode(message.data)
        except msgspec.MsgspecError:
            return  # of another version
        if model in (None, decision.model):
            found.append(decision)

    start = Start(time=since or datetime.now(UTC) - timedelta(minutes=LATEST_MINUTES))
    subjects = bus.subjects
    reader = StreamReader(bus, subjects.scaling_stream, subjects.scaling_all, add, start)
    await reader.open()
    try:
        async with asyncio.timeout(READ_S):
            await reader.caught_up.wait()
    finally:
        await reader.close()
    found.sort(key=lambda decision: decision.time)
    if since is not None:
        return found
    return list({decision.model: decision for decision in found}.values())
