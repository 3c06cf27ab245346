"""Parked workers: one with a scripted engine on a real bus, and real processes."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.tiny import tiny_model
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.ping import ping
from kvmesh.bus.errors import NoResponder
from kvmesh.bus.messages import (
    Clear,
    Control,
    ControlReply,
    Drain,
    Instance,
    MessageDecoder,
    Promote,
    Role,
    StartPhase,
    Unpin,
)
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.engine import EngineConfigError, EngineError
from kvmesh.worker.lifecycle.standby import Standby
from kvmesh.worker.model_card import parked_card
from kvmesh.worker.start.report import StartReport
from kvmesh.worker.start.timeline import StartTimeline

INSTANCE = "w-1"
_replies = MessageDecoder(ControlReply)


class ParkedEngine:
    """Parks at once; fails with `error` if that is set."""

    def __init__(self) -> None:
        self.error: EngineError | None = None
        self.failed = asyncio.Event()

    async def park(self) -> None:
        if self.error is not None:
            raise self.error

    async def lost(self) -> EngineError:
        await self.failed.wait()
        return EngineError("its process died")


class Parked:
    """One worker that parks, and its result."""

    def __init__(self, bus: Bus, limits: StreamLimits) -> None:
        self.bus = bus
        self.limits = limits
        self.engine: Any = ParkedEngine()
        self.stopping = asyncio.Event()
        self.timeline = StartTimeline()

    async def wait(self) -> bool:
        card = parked_card(WorkerSettings(), "m", INSTANCE, "w")
        with StartReport(self.bus, INSTANCE, "m", "mock", self.timeline) as report:
            return await Standby(self.bus, self.limits, self.stopping).park(
                self.engine, card, report
            )

    async def command(self, command: Control) -> ControlReply:
        return await self.bus.request(self.bus.subjects.ctl(INSTANCE), command, _replies, 5)


@pytest_asyncio.fixture
async def parked(bus: Bus, limits: StreamLimits) -> Parked:
    await ensure_streams(bus, limits)
    return Parked(bus, limits)


@pytest_asyncio.fixture
async def cards(parked: Parked) -> AsyncIterator[Callable[[], list[Instance]]]:
    directory = Directory(parked.bus, parked.limits)
    await directory.open()
    yield lambda: directory.instances
    await directory.close()


async def test_it_is_on_the_mesh_until_it_is_promoted(
    parked: Parked, cards: Callable[[], list[Instance]]
) -> None:
    waiting = asyncio.create_task(parked.wait())
    await eventually(cards)
    (card,) = cards()
    assert (card.role, card.parked_for, card.model) == (Role.PARKED, "m", None)
    await ping(parked.bus, INSTANCE, 5)
    assert await parked.command(Unpin("p")) == ControlReply(False, "it is parked")
    assert (await parked.command(Clear())).ok, "it has no blocks"
    assert not waiting.done()
    first, second = await asyncio.gather(*(parked.command(Promote()) for _ in range(2)))
    assert first.ok
    assert second.ok, "it is idempotent"
    assert await waiting
    await eventually(lambda: not cards())
    with pytest.raises(NoResponder):
        await parked.command(Promote())
    stretch = parked.timeline.parked()
    assert stretch is not None
    assert StartPhase.PARKED in [phase.name for phase in parked.timeline.row()]


async def test_it_drains_and_refuses_a_promotion_while_it_leaves(
    parked: Parked, cards: Callable[[], list[Instance]]
) -> None:
    waiting = asyncio.create_task(parked.wait())
    await eventually(cards)
    drained, promoted = await asyncio.gather(parked.command(Drain()), parked.command(Promote()))
    assert drained.ok
    assert promoted == ControlReply(False, "it is leaving")
    assert not await waiting
    await eventually(lambda: not cards())


async def test_an_engine_that_fails_while_it_is_parked_ends_the_wait(
    parked: Parked, cards: Callable[[], list[Instance]]
) -> None:
    waiting = asyncio.create_task(parked.wait())
    await eventually(cards)
    parked.engine.failed.set()
    with pytest.raises(EngineError, match="its process died"):
        await waiting
    await eventually(lambda: not cards())


async def test_an_engine_that_cannot_park_is_refused(parked: Parked) -> None:
    parked.engine.error = EngineConfigError("a worker_cls of its own")
    with pytest.raises(EngineConfigError, match="worker_cls"):
        await parked.wait()
    parked.engine = object()
    with pytest.raises(EngineConfigError, match="the mock engine cannot be parked"):
        await parked.wait()


# --- real processes


def complete(mesh: Mesh, model: str) -> int:
    body = {"model": model, "prompt": "What is a mesh?", "max_tokens": 8}
    request = urllib.request.Request(
        mesh.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


async def status(mesh: Mesh) -> dict[str, dict[str, Any]]:
    """The members of the mesh in `kvmesh status`, by the name of their card."""
    done = await mesh.command("status", "--json")
    found = json.loads(done.stdout)["instances"] if done.returncode == 0 else []
    return {member["card"]["name"]: member for member in found}


@pytest.mark.parametrize("engine", ["mock", "torch"])
async def test_a_promoted_worker_serves_and_a_drained_one_ends(
    nats_server: NatsServer, tmp_path: Path, engine: str
) -> None:
    env = {"KVMESH_WORKER_PARKED": "true", "KVMESH_WORKER_ENGINE": engine}
    if engine == "torch":
        pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
        env |= {"KVMESH_WORKER_MODEL": str(tiny_model()), "KVMESH_TORCH_THREADS": "1"}
    else:
        env |= {"KVMESH_MOCK_PREPARE_S": "1"}
    model = "tiny" if engine == "torch" else "kvmesh-demo"
    mesh = Mesh(nats_server.url, tmp_path, env)
    try:
        mesh.start_all(workers=2)
        found: dict[str, dict[str, Any]] = {}

        async def both_parked() -> bool:
            found.update(await status(mesh))
            roles = [found.get(f"worker-{n}", {}).get("card", {}).get("role") for n in (0, 1)]
            return roles == ["parked", "parked"]

        await until(both_parked)
        card = found["worker-0"]["card"]
        assert card["parked_for"] == model
        assert not found["worker-0"]["eligible"]
        assert "configuration" in {phase["name"] for phase in card["phases"]}
        table = await mesh.command("status")
        assert "parked" in table.stdout
        done = await mesh.command("fleet", "promote", "worker-0", "--wait", "60")
        assert done.returncode == 0, done.stderr
        assert "serves after" in done.stdout
        await mesh.ready()
        assert await asyncio.to_thread(complete, mesh, model) == 8
        again = await mesh.command("fleet", "promote", "worker-0")
        assert again.returncode == 1, "it is not parked any more"
        drained = await mesh.command("fleet", "drain", "worker-1", "--wait", "30")
        assert drained.returncode == 0, drained.stderr
        assert await asyncio.to_thread(mesh.processes["worker-1"].wait, 30) == 0
        serving = (await status(mesh))["worker-0"]["card"]
        seconds = {phase["name"]: phase["seconds"] for phase in serving["phases"]}
        assert 0 < serving["promoted_s"] < serving["startup_s"]
        assert seconds["parked"] > 0
    finally:
        mesh.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.2)
