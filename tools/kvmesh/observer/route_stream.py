"""Reads the route stream from a time on, one message at a time."""

import asyncio
from collections.abc import Callable
from datetime import datetime

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import MessageDecoder, Outcome, is_outcome
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader

PROGRESS_S = 10.0
_outcomes = MessageDecoder(Outcome)


def decoded_outcome(data: bytes) -> Outcome | None:
    """The outcome in a message of the route stream; None for any other content."""
    if not is_outcome(data):
        return None
    try:
        return _outcomes.decode(data)
    except msgspec.MsgspecError:
        return None  # of another version


async def each_outcome(bus: Bus, since: datetime | None, handle: Callable[[Outcome], None]) -> None:
    """Pass each outcome since then to `handle`, as `each_message` does."""

    def on_message(data: bytes) -> None:
        outcome = decoded_outcome(data)
        if outcome is not None:
            handle(outcome)

    await each_message(bus, since, on_message)


async def each_message(bus: Bus, since: datetime | None, handle: Callable[[bytes], None]) -> None:
    """Pass each message since then to `handle`, in order, up to the stream's present end.

    Without `since`, from the stream's start. Raises TimeoutError if no message arrives for
    PROGRESS_S seconds.
    """
    read = 0

    def on_message(message: StreamMessage) -> None:
        nonlocal read
        read += 1
        handle(message.data)

    subjects = bus.subjects
    start = Start() if since is None else Start(time=since)
    reader = StreamReader(bus, subjects.route_stream, subjects.route_all, on_message, start)
    await reader.open()
    try:
        seen = -1
        while not reader.caught_up.is_set():
            if read == seen:
                raise TimeoutError(f"the route stream sent nothing for {PROGRESS_S:g} s")
            seen = read
            try:
                await asyncio.wait_for(reader.caught_up.wait(), PROGRESS_S)
            except TimeoutError:
                continue
    finally:
        await reader.close()
