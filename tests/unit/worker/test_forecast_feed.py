"""Forecasts of returns on their way to an engine that is slow, fails or is flooded."""

import asyncio

import pytest
from support.wait import eventually

from kvmesh.bus.messages import ReturnForecast
from kvmesh.worker.control import FORECASTS, MAX_FORECASTS, ForecastFeed
from kvmesh.worker.engine import EngineError


def forecasts(*numbers: int) -> list[ReturnForecast]:
    return [ReturnForecast(f"r-{number}", 0, 0.0, b"") for number in numbers]


class SlowEngine:
    """Takes forecasts once its gate is open; fails as told."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.calls: list[list[str]] = []
        self.error: EngineError | None = None

    async def expect_returns(self, forecasts: list[ReturnForecast]) -> None:
        self.calls.append([one.request for one in forecasts])
        await self.gate.wait()
        if self.error is not None:
            raise self.error


async def test_forecasts_that_wait_are_bounded_and_go_in_small_calls() -> None:
    engine = SlowEngine()
    feed = ForecastFeed(engine)
    feed.put(forecasts(1))
    await eventually(lambda: engine.calls == [["r-1"]])
    feed.put([])
    for start in range(0, 2 * MAX_FORECASTS, 64):
        feed.put(forecasts(*range(start, start + 64)))
    engine.gate.set()
    calls = MAX_FORECASTS // FORECASTS
    await eventually(lambda: len(engine.calls) == 1 + calls)
    assert {len(call) for call in engine.calls[1:]} == {FORECASTS}
    assert engine.calls[1][0] == f"r-{MAX_FORECASTS}"
    assert engine.calls[-1][-1] == f"r-{2 * MAX_FORECASTS - 1}"
    await feed.close()


async def test_failures_are_logged_once_until_a_call_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = SlowEngine()
    engine.gate.set()
    feed = ForecastFeed(engine)

    async def call(number: int) -> None:
        feed.put(forecasts(number))
        await eventually(lambda: engine.calls[-1:] == [[f"r-{number}"]] and not len(feed._tasks))

    engine.error = EngineError("the server is gone")
    for number in range(3):
        await call(number)
    engine.error = None
    await call(3)
    engine.error = EngineError("again")
    await call(4)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [
        f"the engine takes no forecasts of returns: {text}"
        for text in ("the server is gone", "again")
    ]
    await feed.close()
