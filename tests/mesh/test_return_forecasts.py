"""Routers send forecasts of returns to the kvbms of the nodes that computed the prompts."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.routers import request_placement, running_router, running_workers, scripted_index
from support.routing import request, sequence
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import (
    ExpectReturns,
    Hints,
    Instance,
    MessageDecoder,
    NodeStore,
    Outcome,
    ReturnForecast,
    Role,
    ToolEvent,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.returns.rates import age_bin, unpack_rates

EXPECT = MessageDecoder(ExpectReturns)
TEN = sequence(*range(10))


@asynccontextmanager
async def heard(bus: Bus, instance: str) -> AsyncIterator[list[ReturnForecast]]:
    """The forecasts for a kvbm from now on."""
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


@asynccontextmanager
async def node(bus: Bus, limits: StreamLimits, name: str, expects: bool) -> AsyncIterator[None]:
    """Cards of a worker and a kvbm on one machine."""
    card = Instance(
        instance=f"{name}-kvbm",
        role=Role.KVBM,
        name=name,
        version="0",
        started=0.0,
        node=name,
        expects_returns=expects,
        store=NodeStore(directory="", tier_bytes=[1], models=["m"]),
    )
    lease = Lease(bus, card, limits)
    await lease.open()
    try:
        async with running_workers(bus, limits, name, node=name):
            yield
    finally:
        await lease.close()


@pytest.mark.parametrize("forecast_returns", [True, False])
async def test_a_harness_that_knows_when_its_tool_ends_is_expected_then(
    bus: Bus, options: BusOptions, limits: StreamLimits, forecast_returns: bool
) -> None:
    await scripted_index(bus, {})
    async with (
        node(bus, limits, "a", True),
        running_router(options, "r1", forecast_returns=forecast_returns),
        running_router(options, "r2", forecast_returns=forecast_returns),
        heard(bus, "a-kvbm") as forecasts,
    ):
        await request_placement(bus, request("1", TEN, hints=Hints(session="s")))
        ended(bus, "1", "a")

        def report() -> bool:
            event = ToolEvent(session="s", event="started", time=time.time(), remaining_s=60.0)
            bus.post(bus.subjects.tool("s"), event)
            rates = [unpack_rates(forecast.rates) for forecast in forecasts]
            return any(each[age_bin(60.0)] > 100 * each[age_bin(6.0)] for each in rates)

        if not forecast_returns:
            report()
            await request_placement(bus, request("2", TEN))
            assert not forecasts
            return
        await eventually(report, what="a forecast for the end of the tool")
        assert {(each.request, each.rank) for each in forecasts} == {("1", 0)}


async def test_a_kvbm_that_does_not_expect_returns_gets_none(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    async with (
        node(bus, limits, "old", False),
        node(bus, limits, "new", True),
        running_router(options),
        heard(bus, "old-kvbm") as by_old,
        heard(bus, "new-kvbm") as by_new,
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
