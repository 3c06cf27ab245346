"""`kvmesh plan fit` on a live mesh: it measures the workers that report, or says why not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace
from support.frontend import MODEL, scripted_worker
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.planned_model import TIMES, LinearEngine
from support.planners import command

from kvmesh.bus.client import Bus
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.step_times.registry import load_step_profile

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("fit"), stream_env(LIMITS))
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    mesh.bus = bus  # type: ignore[attr-defined]
    try:
        yield mesh
    finally:
        mesh.stop()
        await bus.close()


async def test_a_profile_is_fitted_to_the_loads_of_a_worker(mesh: Mesh, tmp_path: Path) -> None:
    bus: Bus = mesh.bus  # type: ignore[attr-defined]
    file = tmp_path / "fitted.npz"
    async with scripted_worker(bus, LIMITS, "worker-0") as worker:
        engine = LinearEngine(worker.instance)

        async def report() -> None:
            while True:
                bus.post(bus.subjects.load(worker.instance), engine.load())
                await asyncio.sleep(0.002)

        reports = asyncio.create_task(report())
        status, output = await command(mesh, "plan", "fit", str(file), "--for", "2s")
        reports.cancel()
    assert status == 0, output
    assert f"1 worker of {MODEL}" in output
    profile = load_step_profile(file)
    assert profile.limits is not None
    assert profile.limits.max_batched_tokens == 2048
    assert profile.prefill(2000) == pytest.approx(TIMES.prefill(2000), rel=0.3)


async def test_workers_that_do_not_report_their_steps_are_refused(
    mesh: Mesh, tmp_path: Path
) -> None:
    bus: Bus = mesh.bus  # type: ignore[attr-defined]
    file = tmp_path / "none.npz"
    status, output = await command(mesh, "plan", "fit", str(file), "--for", "1s")
    assert (status, file.exists()) == (1, False)
    assert "no worker with a known capacity" in output
    async with (
        scripted_worker(bus, LIMITS, "worker-1") as worker,
        scripted_worker(bus, LIMITS, "worker-2", block_size=32),
    ):
        engine = LinearEngine(worker.instance)

        async def report() -> None:
            while True:
                load = replace(engine.load(), busy_s=0.0)
                bus.post(bus.subjects.load(worker.instance), load)
                await asyncio.sleep(0.05)

        reports = asyncio.create_task(report())
        status, output = await command(mesh, "plan", "fit", str(file), "--for", "1s")
        assert status == 1
        assert "(worker-1; worker-2): name those of one kind with --worker" in output
        status, output = await command(
            mesh, "plan", "fit", str(file), "--for", "1s", "--worker", "worker-1"
        )
        reports.cancel()
    assert (status, file.exists()) == (1, False)
    assert "does not report the time of its steps" in output
