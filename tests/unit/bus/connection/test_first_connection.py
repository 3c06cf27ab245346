"""The end of the first connection's attempts."""

import asyncio
import contextlib

import pytest

from kvmesh.bus.connection.first_connection import FirstConnection


async def test_an_attempt_that_loses_a_cancellation_ends_nevertheless() -> None:
    async def attempt() -> None:
        with contextlib.suppress(asyncio.CancelledError):  # as `wait_for` sometimes does
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(attempt())
    with pytest.raises(TimeoutError):
        await FirstConnection("nats://a", None).result(task, timeout=0.01)
    assert task.cancelled()


async def test_the_last_permitted_failure_ends_the_attempts() -> None:
    first = FirstConnection("nats://a", 2)
    task = asyncio.create_task(asyncio.Event().wait())
    assert not first.failed(OSError("one"))
    assert first.failed(OSError("two"))
    with pytest.raises(OSError, match="two"):
        await first.result(task, timeout=None)  # type: ignore[arg-type]
    assert task.cancelled()
