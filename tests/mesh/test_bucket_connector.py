"""The connector `bucket` beyond the suite of all: acknowledgements, other planners, outages."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.nats import NatsServer
from support.places.on_bus import BusPlace

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import DesiredFleet, FleetReport, MessageDecoder, encode
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.planner.connectors.bucket import BucketConnector
from kvmesh.planner.connectors.interface import ConnectorError

DESIRED = MessageDecoder(DesiredFleet)


@pytest_asyncio.fixture
async def place(bus: Bus) -> AsyncIterator[BusPlace]:
    place = BusPlace(bus)
    await place.start()
    yield place
    await place.close()


async def desired(bus: Bus) -> DesiredFleet:
    bucket = await bus.js.key_value(bus.subjects.plan_bucket)
    return DESIRED.decode((await bucket.get(bus.subjects.desired_key)).value or b"")


async def test_the_wanted_fleet_names_its_planner(bus: Bus, place: BusPlace) -> None:
    await place.connector().scale({"east": 2}, stop=["east-0"])
    await place.connector().scale({"west": 1})
    found = await desired(bus)
    assert (found.revision, found.planner) == (2, "planner-1")
    assert (found.pools, found.stop) == ({"east": 2, "west": 1}, [])
    assert found.time > 0


async def test_an_error_of_the_operator_is_raised(bus: Bus, place: BusPlace) -> None:
    place.error = "no GPU is free"
    with pytest.raises(ConnectorError, match="cannot run what is wanted: no GPU is free"):
        await place.connector().scale({"east": 9})


async def test_an_operator_that_does_not_acknowledge_is_an_error(bus: Bus, place: BusPlace) -> None:
    await place.connector().scale({"east": 3})
    await place.close()  # its report stays
    with pytest.raises(
        ConnectorError,
        match=r"not acknowledged revision 2; its last report is of revision 1 \(waited 0.2 s\)",
    ):
        await place.connector(0.2).scale({"east": 4})
    with pytest.raises(ConnectorError, match="not acknowledged revision 2"):
        await place.connector(0.2).scale({"east": 4})  # waits for the same revision
    assert (await desired(bus)).revision == 2
    assert place.changes == 1


async def test_two_planners_do_not_overwrite_each_other(bus: Bus, place: BusPlace) -> None:
    one, two = place.connector(), place.connector()
    await asyncio.gather(
        *(one.scale({"east": n}) for n in (2, 3, 4)), *(two.scale({"west": n}) for n in (5, 6, 7))
    )
    await one.scale({"east": 4})
    await two.scale({"west": 7})
    assert (await desired(bus)).pools == {"east": 4, "west": 7}
    assert {pool: s.wanted for pool, s in (await one.state()).items()} == {"east": 4, "west": 7}


async def test_revisions_stay_above_the_reports_if_the_wanted_fleet_is_lost(
    bus: Bus, place: BusPlace
) -> None:
    for number in (2, 3):
        await place.connector().scale({"east": number})
    bucket = await bus.js.key_value(bus.subjects.plan_bucket)
    await bucket.delete(bus.subjects.desired_key)
    await place.connector().scale({"east": 1})
    assert (await desired(bus)).revision == 3
    assert await place.running("east") == ["east-0"]


async def test_unreadable_entries_are_replaced_or_reported(bus: Bus, place: BusPlace) -> None:
    bucket = await bus.js.key_value(bus.subjects.plan_bucket)
    await place.close()
    await bucket.put(bus.subjects.desired_key, b"\xff")
    with pytest.raises(ConnectorError, match="not acknowledged revision 1"):
        await place.connector(0.2).scale({"east": 4})
    assert (await desired(bus)).pools == {"east": 4}
    await bucket.put(bus.subjects.report_key, b"\xff")
    for call in (place.connector().open, place.connector().state):
        with pytest.raises(ConnectorError, match="the operator's report cannot be decoded"):
            await call()


async def test_an_operator_that_starts_later_is_awaited(bus: Bus) -> None:
    place = BusPlace(bus)
    opening = asyncio.create_task(place.connector().open())
    await place.start()
    await opening
    await place.close()


async def test_a_missing_bucket_and_a_lost_server_are_errors(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.start()
    bus = await Bus.connect(BusOptions(url=server.url), "test")
    connector = BucketConnector(bus, 0.5)
    with pytest.raises(ConnectorError, match="the bucket kvm-kvmesh-plan is missing"):
        await connector.open()
    await ensure_streams(bus)
    bucket = await bus.js.key_value(bus.subjects.plan_bucket)
    report = FleetReport(revision=0, pools={"a": 1})
    await bucket.put(bus.subjects.report_key, encode(report))
    assert (await connector.state())["a"].wanted == 1
    server.stop()
    for call in (connector.open(), connector.state(), connector.scale({"a": 2})):
        with pytest.raises(ConnectorError):
            await call
    bus.client.abandon()
