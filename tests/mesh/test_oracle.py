"""`kvmesh oracle` on a real bus: answers and refusals, and a planner that goes on without it."""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest_asyncio
from msgspec.structs import replace
from support.ended_requests import events, question
from support.frontend import MODEL, scripted_worker
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.places.on_bus import BusPlace
from support.planned_model import LinearEngine
from support.planners import Planners, command
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import FleetAnswer, FleetQuestion, MessageDecoder, encode
from kvmesh.bus.streams.configuration import StreamLimits

REQUESTS = 240
_answers = MessageDecoder(FleetAnswer)


class Oracle:
    """An oracle process of a mesh."""

    def __init__(self, mesh: Mesh, bus: Bus) -> None:
        self._bus = bus
        self._mesh = mesh
        self._port = free_port()

    async def start(self) -> None:
        self._mesh.start("oracle", "oracle-0", KVMESH_ORACLE_METRICS_PORT=str(self._port))
        await eventually(self._ready, what="the oracle is ready")

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health") as answer:
                return bool(json.loads(answer.read())["status"] == "ok")
        except urllib.error.HTTPError as answer:  # while it starts
            answer.close()
            return False
        except OSError as error:
            raise AssertionError(str(error)) from error

    def signal(self, number: int) -> None:
        self._mesh.processes["oracle-0"].send_signal(number)

    async def ask(self, asking: object, timeout: float = PATIENCE_S) -> FleetAnswer:
        return await self._bus.request(self._bus.subjects.oracle, asking, _answers, timeout)

    async def ask_at_once(self, asking: object, count: int) -> list[FleetAnswer]:
        """Ask `count` times while the oracle is frozen, so that no answer precedes a question."""
        self.signal(signal.SIGSTOP)
        asked = [asyncio.create_task(self.ask(asking)) for _ in range(count)]
        await asyncio.sleep(0)
        await self._bus.flush()
        self.signal(signal.SIGCONT)
        return await asyncio.gather(*asked)


@pytest_asyncio.fixture
async def mesh(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits, tmp_path: Path
) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path, stream_env(limits), bus.options.namespace)
    yield mesh
    for process in mesh.processes.values():
        process.send_signal(signal.SIGCONT)
    mesh.stop()


async def store(bus: Bus, now: float) -> None:
    """Requests that arrived in the last minutes, one a second."""
    for number in range(REQUESTS):
        await request(bus, number, now - REQUESTS + number)


async def request(bus: Bus, number: int, at: float) -> None:
    placed, ended = events(f"r-{number}", at, range(1 + 8 * number, 9 + 8 * number), output=20)
    for event in (replace(placed, model=MODEL), ended):
        await bus.store(bus.subjects.route(MODEL), encode(event), PATIENCE_S)


async def keep_requesting(bus: Bus) -> None:
    """Go on with one request a second."""
    for number in count(REQUESTS):
        await request(bus, number, time.time())
        await asyncio.sleep(1.0)


def about(fleets: list[list[int]], since: float, **changes: object) -> FleetQuestion:
    asking = question(fleets, 1.0, budget_s=30.0)
    return replace(asking, **{"model": MODEL, "since": since, **changes})


async def test_it_answers_questions_and_refuses_bad_ones(mesh: Mesh, bus: Bus) -> None:
    now = time.time()
    await store(bus, now)
    await bus.store(bus.subjects.route(MODEL), b"\xc1", PATIENCE_S)
    oracle = Oracle(mesh, bus)
    await oracle.start()
    answer = await oracle.ask(about([[2], [1]], now - 300))
    assert answer.error == ""
    assert [each.workers for each in answer.candidates] == [{"workers": 2}, {"workers": 1}]
    assert answer.candidates[0].shares == {"ttft p90=2s": 1.0}
    assert answer.requests == REQUESTS
    half = await oracle.ask(about([[2]], now - REQUESTS / 2))
    assert half.requests <= REQUESTS / 2
    found = await oracle.ask_at_once(about([[2]], now - 300), 3)
    assert sorted(each.error for each in found) == ["", *["busy with another question"] * 2]
    hurried = await oracle.ask(about([[2]], 0.0, budget_s=1e-6))
    assert "take more than 1e-06 s on the first fleet" in hurried.error
    assert "malformed question" in (await oracle.ask({"model": MODEL})).error
    assert "level" in (await oracle.ask(about([[1]], now, level=-1.0))).error
    assert "not one number for each pool" in (await oracle.ask(about([[1, 1]], 0.0))).error
    assert "0 requests of other" in (await oracle.ask(about([[1]], 0.0, model="other"))).error
    status, output = await command(mesh, "status")
    assert (status, "oracle-0" in output) == (0, True), output
    log = (mesh.folder / "oracle-0.log").read_text()
    assert "ignored a malformed decision" in log
    assert "Traceback" not in log
    oracle.signal(signal.SIGTERM)
    assert mesh.processes["oracle-0"].wait(PATIENCE_S) == 0


async def test_a_planner_goes_on_while_the_oracle_is_frozen(
    mesh: Mesh, bus: Bus, limits: StreamLimits
) -> None:
    await store(bus, time.time())
    planners, oracle, place = Planners(mesh, bus), Oracle(mesh, bus), BusPlace(bus)
    await place.start()
    requesting = asyncio.create_task(keep_requesting(bus))
    async with scripted_worker(bus, limits, "worker-0") as worker:
        await planners.start(KVMESH_PLANNER_ORACLE_BUDGET_S="10")
        engine = LinearEngine(worker.instance)

        def asks() -> bool:
            """True once the planner knows the engine, whose first loads may come before it."""
            bus.post(bus.subjects.load(worker.instance), engine.load())
            return "none is running" in planners.warnings()

        await eventually(asks)
        await oracle.start()
        await eventually(lambda: answers(planners, "answered") >= 1, what="an answer")
        oracle.signal(signal.SIGSTOP)
        # a fresh answer to the same question is used for a minute
        await eventually(
            lambda: "fleets are not simulated: no reply" in planners.warnings(),
            timeout=60 + 2 * PATIENCE_S,
        )
        await planners.decides(3)
        oracle.signal(signal.SIGCONT)
        # on a busy machine it may answer that it takes too long
        await eventually(lambda: "no reply" not in planners.warnings(), what="it replies again")
    requesting.cancel()
    assert "Traceback" not in planners.log()
    await place.close()


def answers(planners: Planners, result: str) -> float:
    return planners.metrics().get(f'kvmesh_planner_oracle_answers_total{{result="{result}"}}', 0)
