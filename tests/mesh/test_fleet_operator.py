"""The operator of `kvmesh up` on a real bus: reports, order of events, unusable messages."""

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import DesiredFleet, FleetReport, MessageDecoder, encode
from kvmesh.cli.supervisor.operator import FleetOperator
from kvmesh.cli.supervisor.plan import ProcessSpec
from kvmesh.settings import Settings
from kvmesh.settings.schema import UpSettings

REPORTS = MessageDecoder(FleetReport)


class Processes:
    """Records the started workers, and the stopped ones with the function that ends them."""

    def __init__(self) -> None:
        self.on_retired: Callable[[str], None] | None = None
        self.started: list[str] = []
        self.ends: dict[str, Callable[[str], None]] = {}

    def add(self, spec: ProcessSpec) -> None:
        self.started.append(spec.name)

    def remove(self, name: str, timeout_s: float, on_end: Callable[[str], None]) -> None:
        self.ends[name] = on_end


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest_asyncio.fixture
async def bucket(bus: Bus) -> Bucket:
    return await bus.js.key_value(bus.subjects.plan_bucket)


@pytest_asyncio.fixture
async def operator(bus: Bus, processes: Processes) -> AsyncIterator[FleetOperator]:
    settings = Settings(up=UpSettings(workers=1))
    operator = FleetOperator(bus, settings, processes, lambda _: None)
    yield operator
    await operator.close()


async def want(bus: Bus, bucket: Bucket, revision: int, workers: int) -> None:
    fleet = DesiredFleet(revision=revision, pools={"workers": workers})
    await bucket.put(bus.subjects.desired_key, encode(fleet))


async def reported(bus: Bus, bucket: Bucket, revision: int) -> FleetReport:
    """The report, once it acknowledges a revision."""

    async def seen() -> FleetReport | None:
        try:
            entry = await bucket.get(bus.subjects.report_key)
        except NotFound:
            return None
        report = REPORTS.decode(entry.value or b"")
        return report if report.revision == revision else None

    found = await eventually(seen)
    assert found is not None
    return found


async def test_a_fleet_wanted_earlier_is_not_run(
    bus: Bus, bucket: Bucket, operator: FleetOperator, processes: Processes
) -> None:
    await want(bus, bucket, 5, 3)
    await operator.open()
    operator.start()
    assert (await reported(bus, bucket, 5)).pools == {"workers": 1}
    await want(bus, bucket, 6, 2)
    assert (await reported(bus, bucket, 6)).pools == {"workers": 2}
    assert processes.started == ["worker-1"]


async def test_changes_wait_for_the_start_of_the_mesh(
    bus: Bus, bucket: Bucket, operator: FleetOperator, processes: Processes
) -> None:
    await operator.open()
    assert (await reported(bus, bucket, 0)).workers == {"workers": ["worker-0"]}
    await want(bus, bucket, 1, 2)
    await want(bus, bucket, 2, 3)
    await eventually(lambda: operator._wanted is not None and operator._wanted.revision == 2)
    assert processes.started == []
    operator.start()
    assert (await reported(bus, bucket, 2)).pools == {"workers": 3}
    assert processes.started == ["worker-1", "worker-2"]


async def test_a_malformed_or_deleted_fleet_is_ignored(
    bus: Bus,
    bucket: Bucket,
    operator: FleetOperator,
    processes: Processes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await operator.open()
    operator.start()
    await bucket.put(bus.subjects.desired_key, b"\xff")
    await eventually(lambda: "ignored a malformed wanted fleet" in caplog.text)
    await want(bus, bucket, 1, 2)
    assert (await reported(bus, bucket, 1)).pools == {"workers": 2}
    await bucket.delete(bus.subjects.desired_key)
    await want(bus, bucket, 2, 2)
    await reported(bus, bucket, 2)
    assert processes.started == ["worker-1"]


async def test_a_worker_that_cannot_start_is_reported_and_replaced_on_demand(
    bus: Bus, bucket: Bucket, operator: FleetOperator, processes: Processes
) -> None:
    await operator.open()
    operator.start()
    await want(bus, bucket, 1, 2)
    await reported(bus, bucket, 1)
    assert processes.on_retired is not None
    processes.on_retired("worker-1")
    processes.ends["worker-1"]("worker-1")

    async def known() -> bool:
        report = await reported(bus, bucket, 1)
        return report.pools == {"workers": 1} and "rejects its settings" in report.error

    await eventually(known)
    await want(bus, bucket, 2, 2)
    assert (await reported(bus, bucket, 2)).error == ""
    assert processes.started == ["worker-1", "worker-1"]


async def test_the_report_goes_with_the_operator(
    bus: Bus, bucket: Bucket, operator: FleetOperator
) -> None:
    await operator.open()
    await reported(bus, bucket, 0)
    await operator.close()
    with pytest.raises(NotFound):
        await bucket.get(bus.subjects.report_key)
