"""Routers send forecasts of returns to the workers that computed the prompts."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.routers import request_placement, running_router, running_workers, scripted_index
from support.routing import request, sequence
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import (
    ExpectReturns,
    Hints,
    MessageDecoder,
    Outcome,
    ReturnForecast,
    ToolEvent,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.returns.rates import age_bin, unpack_rates

EXPECT = MessageDecoder(ExpectReturns)
TEN = sequence(*range(10))


@asynccontextmanager
async def heard(bus: Bus, instance: str) -> AsyncIterator[list[ReturnForecast]]:
    """The forecasts for a worker from now on."""
    forecasts: list[ReturnForecast] = []

    def receive(message: ExpectReturns) -> None:
        forecasts.extend(message.forecasts)

    subscription = await bus.subscribe(bus.subjects.returns(instance), EXPECT, receive)
    yield forecasts
    await subscription.drain()


def ended(bus: Bus, name: str, instance: str) -> None:
    """Publish what a frontend does at the end of a request that calls a tool."""
    outcome = Outcome(
        request=name,
        instance=instance,
        time=time.time(),
        cached_tokens=0,
        output_tokens=10,
        ttft_s=0.1,
        total_s=0.2,
        finish="tool_calls",
        waits_for=["tool", "Bash", "sleep"],
    )
    bus.post(bus.subjects.route("m"), outcome)


@pytest.mark.parametrize("forecast_returns", [True, False])
async def test_a_harness_that_knows_when_its_tool_ends_is_expected_then(
    bus: Bus, options: BusOptions, limits: StreamLimits, forecast_returns: bool
) -> None:
    await scripted_index(bus, {})
    async with (
        running_workers(bus, limits, "a", expects_returns=True),
        running_router(options, "r1", forecast_returns=forecast_returns),
        running_router(options, "r2", forecast_returns=forecast_returns),
        heard(bus, "a") as forecasts,
    ):
        await request_placement(bus, request("1", TEN, hints=Hints(session="s")))
        ended(bus, "1", "a")

        def report() -> bool:
            event = ToolEvent(session="s", event="started", time=time.time(), remaining_s=60.0)
            bus.post(bus.subjects.tool("s"), event)
            return bool(forecasts)

        if not forecast_returns:
            report()
            await request_placement(bus, request("2", TEN))
            assert not forecasts
            return
        await eventually(report, what="a forecast")
        forecast = forecasts[0]
        assert (forecast.request, forecast.rank) == ("1", 0)
        rates = unpack_rates(forecast.rates)
        assert rates[age_bin(60.0)] > 100 * rates[age_bin(6.0)]


async def test_a_worker_that_does_not_expect_returns_gets_none(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    async with (
        running_workers(bus, limits, "old", expects_returns=False),
        running_workers(bus, limits, "new", expects_returns=True),
        running_router(options),
        heard(bus, "old") as by_old,
        heard(bus, "new") as by_new,
    ):
        for name in ("1", "2", "3", "4"):
            placed = await request_placement(
                bus,
                request(
                    name,
                    sequence(*range(int(name) * 10, int(name) * 10 + 5)),
                    hints=Hints(session=name),
                ),
            )
            ended(bus, name, placed.instance)

        def report() -> bool:
            for name in ("1", "2", "3", "4"):
                event = ToolEvent(session=name, event="ended", time=time.time())
                bus.post(bus.subjects.tool(name), event)
            return bool(by_new)

        await eventually(report, what="a forecast")
        assert not by_old
