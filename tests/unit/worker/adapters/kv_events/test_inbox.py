"""A socket that is read by callbacks: fast and slow messages, silences, other ways to end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from support.wait import eventually

from kvmesh.worker.adapters.kv_events.inbox import COLLECT_S, Inbox

STOP = b"stop"


class Line:
    """A sender and an inbox, with the messages that have arrived."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self.sender = context.socket(zmq.PUSH)
        self.sender.bind(f"ipc://{folder}/line")
        self.receiver = context.socket(zmq.PULL)
        self.receiver.connect(f"ipc://{folder}/line")
        self.arrived: list[bytes] = []
        self.sent: list[bytes] = []
        self.inbox = Inbox(self.receiver, self._take)

    def _take(self, frames: list[bytes]) -> bool:
        self.arrived.append(frames[-1])
        return frames[-1] != STOP

    async def send(self, count: int, gap_s: float) -> None:
        for _ in range(count):
            self.sent.append(b"%d" % len(self.sent))
            self.sender.send_multipart([b"", self.sent[-1]])
            await asyncio.sleep(gap_s)

    async def is_complete(self) -> None:
        await eventually(lambda: self.arrived == self.sent)


@pytest_asyncio.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    with zmq.Context() as context:
        made = Line(context, tmp_path)
        yield made
        made.sender.close(linger=0)
        made.receiver.close(linger=0)


async def test_every_message_arrives_in_order_at_any_rate(line: Line) -> None:
    reading = asyncio.create_task(line.inbox.read(30.0))
    for gap_s in (0.0, COLLECT_S / 6, 10 * COLLECT_S, 0.0, 0.9 * COLLECT_S, 20 * COLLECT_S):
        await line.send(40 if gap_s < COLLECT_S else 3, gap_s)
        await line.is_complete()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_silence_ends_the_reading_after_fast_messages_too(line: Line) -> None:
    reading = asyncio.create_task(line.inbox.read(0.1))
    await line.send(50, COLLECT_S / 6)
    assert await reading is True
    assert line.arrived == line.sent


async def test_what_follows_a_message_that_is_not_taken_waits_for_the_next_reading(
    line: Line,
) -> None:
    for _ in range(3):
        await line.send(30, COLLECT_S / 6)
        line.sent.append(STOP)
        line.sender.send_multipart([b"", STOP])
        await line.send(5, 0.0)
        assert await line.inbox.read(30.0) is False
        assert line.arrived == line.sent[:-5]
    assert await line.inbox.read(0.05) is True
    assert line.arrived == line.sent
