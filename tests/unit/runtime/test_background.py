"""Background tasks: logged failures, cancellation at close, bounded waiting, work that ends."""

import asyncio

import pytest

from kvmesh.runtime.background import BackgroundTasks, ended


async def fail() -> None:
    raise ValueError("broken")


async def test_logs_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()
    tasks.start(fail(), "probe")
    await tasks.wait()
    await asyncio.sleep(0)
    assert "background task probe failed" in caplog.text
    assert len(tasks) == 0


async def test_leaves_an_awaited_failure_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()
    with pytest.raises(ValueError, match="broken"):
        await tasks.start(fail(), awaited=True)
    assert not caplog.records


async def test_close_cancels_and_waits(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    tasks.start(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert cleaned == [True]
    assert not caplog.records


async def test_waits_at_most_a_time() -> None:
    tasks = BackgroundTasks()
    tasks.start(asyncio.sleep(60))
    await tasks.wait(timeout=0.001)
    assert len(tasks) == 1
    await tasks.close()
    await tasks.close()


async def test_work_outlives_every_cancellation() -> None:
    work = asyncio.get_running_loop().create_future()
    cancellations: list[bool] = []
    waiting = asyncio.create_task(ended(work, lambda: cancellations.append(True)))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    work.set_exception(ValueError("broken"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cancellations == [True]


async def test_the_result_of_work_is_passed_on() -> None:
    assert await ended(asyncio.create_task(asyncio.sleep(0, "done"))) == "done"
    with pytest.raises(ValueError, match="broken"):
        await ended(asyncio.create_task(fail()))
