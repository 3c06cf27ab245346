"""`kvmesh plan` on a live mesh: the present plan, the history, and reports."""

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from mesh.test_planner import route
from support.frontend import MODEL, scripted_worker
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.places.on_bus import BusPlace
from support.planners import Planners, command
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import Outcome, encode
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
REQUESTS = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """A mesh whose planner has decided to start a worker, with requests that kept a promise."""
    folder: Path = tmp_path_factory.mktemp("plan")
    mesh = Mesh(nats_server.url, folder, stream_env(LIMITS))
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    place = BusPlace(bus)
    await place.start()
    planners = Planners(mesh, bus)
    await route(bus, REQUESTS)
    for number in range(REQUESTS):
        outcome = Outcome(
            request=f"{MODEL}-{number}", instance="w", time=0.0, cached_tokens=0,
            output_tokens=9, ttft_s=0.5, total_s=1.0, finish="stop",
        )  # fmt: skip
        await bus.store(bus.subjects.route(MODEL), encode(outcome), PATIENCE_S)
    try:
        async with scripted_worker(bus, LIMITS, "worker-0"):
            await planners.start(
                KVMESH_PLANNER_POOLS="east:min=2,max=6", KVMESH_PLANNER_TTFT="p90=1s"
            )
            await eventually(lambda: "east 1 → 2" in planners.log())
            await planners.decides()
            yield mesh
    finally:
        mesh.stop()
        await place.close()
        await bus.close()


async def test_it_shows_the_present_plan(mesh: Mesh) -> None:
    status, output = await command(mesh, "plan")
    assert status == 0, output
    first, *rest = output.splitlines()
    assert first.startswith(f"{MODEL}: east 1 → 2 (")
    assert "by planner-0-" in first
    assert first.endswith("through bucket)")
    assert any(line.split()[:4] == ["east", "1", "1", "2"] for line in rest)
    assert "mean prompt 640 tokens" in output
    assert "ttft p90=1s: 100.0% of the last minutes' requests kept it" in output
    assert (await command(mesh, "plan", "--model", MODEL))[0] == 0


async def test_it_shows_the_history(mesh: Mesh) -> None:
    status, output = await command(mesh, "plan", "--since", "5m")
    assert status == 0, output
    assert "1→2" in output
    assert "east 1 → 2" in output
    assert "100%" in output
    assert "came true: " in output


async def test_reports_have_plots_and_the_decisions(mesh: Mesh, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html"))
    status, output = await command(mesh, "plan", "--since", "1h", *files)
    assert status == 0, output
    decisions = json.loads((tmp_path / "plan.json").read_text())
    assert decisions[0]["pools"]["east"]["wanted"] == 2
    assert decisions[0]["kept"] == {"ttft p90=1s": 1.0}
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 3
    assert "<td>east 1 → 2</td>" in page
    assert "ttft p90=1s" in page
    assert "http" not in page
    status, output = await command(mesh, "plan", "--html", str(tmp_path))
    assert status == 2
    assert "Traceback" not in output


async def test_without_a_decision_it_says_so(mesh: Mesh, nats_server: NatsServer) -> None:
    status, output = await command(mesh, "plan", "--model", "other")
    assert status == 1
    assert output == (
        "kvmesh plan: no planner has decided anything about other in the last 5 minutes\n"
    )
    status, output = await command(mesh, "plan", KVMESH_NATS_NAMESPACE="nowhere")
    assert (status, "no mesh named nowhere" in output) == (1, True)
    options = BusOptions(url=nats_server.url, namespace="quiet")
    bus = await Bus.connect(options, "test")
    await ensure_streams(bus, LIMITS)
    await bus.close()
    status, output = await command(mesh, "plan", "--since", "1h", KVMESH_NATS_NAMESPACE="quiet")
    assert status == 1
    assert output == "kvmesh plan: no planner has decided anything in this time\n"


async def test_flags_before_the_action_hold(mesh: Mesh) -> None:
    """The environment names a server that does not exist."""
    env = {"KVMESH_NATS_URL": "nats://127.0.0.1:9"}
    status, output = await command(mesh, "plan", "--nats", mesh.nats_url, "set", **env)
    assert (status, output) == (0, "the planners' own settings apply\n")
    status, output = await command(mesh, "plan", "set", "--nats", mesh.nats_url, **env)
    assert (status, output) == (0, "the planners' own settings apply\n")


async def test_the_planner_ends_cleanly(mesh: Mesh) -> None:
    process = mesh.processes["planner-0"]
    process.send_signal(signal.SIGTERM)
    await eventually(lambda: process.poll() is not None)
    assert process.returncode == 0, mesh.logs()
