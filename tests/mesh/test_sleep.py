"""Sleep and wake of workers in a whole mesh: no request is lost, and answers stay the same."""

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.mesh import Mesh, scrape
from support.nats import NatsServer
from support.tiny import tiny_model
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import ControlReply, Instance, MessageDecoder, Role, Sleep
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams

PROMPT = "What is a mesh? " * 40
_replies = MessageDecoder(ControlReply)


def complete(mesh: Mesh, model: str, tokens: int = 16) -> tuple[str, int]:
    """The answer to one request, and the number of its tokens."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        mesh.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    return found["choices"][0]["text"], int(found["usage"]["completion_tokens"])


class Seen:
    """The workers on the mesh, by role."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def names(self, role: Role) -> list[str]:
        return sorted(c.name for c in self._directory.instances if c.role is role)

    def card(self, name: str) -> Instance:
        return next(c for c in self._directory.instances if c.name == name)

    async def until(self, serving: list[str], parked: list[str]) -> None:
        await eventually(
            lambda: (self.names(Role.WORKER), self.names(Role.PARKED)) == (serving, parked),
            60,
            f"{serving} serve, {parked} are parked",
        )


async def watched(mesh: Mesh, check: Callable[[Bus, Seen], Awaitable[None]]) -> None:
    bus = await Bus.connect(mesh.options, "test")
    limits = StreamLimits()
    await ensure_streams(bus, limits)
    directory = Directory(bus, limits)
    await directory.open()
    try:
        await check(bus, Seen(directory))
    finally:
        await directory.close()
        await bus.close()
        mesh.stop()


@pytest.fixture(params=["mock", "torch"])
def engine(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    env = {"KVMESH_WORKER_ENGINE": request.param}
    if request.param == "torch":
        pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
        env |= {"KVMESH_WORKER_MODEL": str(tiny_model()), "KVMESH_TORCH_THREADS": "1"}
        env |= {"KVMESH_TORCH_BLOCKS": "64"}
    return "tiny" if request.param == "torch" else "kvmesh-demo", env


async def test_a_worker_sleeps_and_wakes_with_the_same_answers(
    nats_server: NatsServer, tmp_path: Path, engine: tuple[str, dict[str, str]]
) -> None:
    model, env = engine
    mesh = Mesh(nats_server.url, tmp_path, env)

    async def check(bus: Bus, seen: Seen) -> None:
        await mesh.ready()
        await seen.until(["worker-0"], [])
        before = await asyncio.to_thread(complete, mesh, model)
        first = seen.card("worker-0")
        assert first.sleeps
        # a stream that runs ends on the worker before it sleeps
        running = asyncio.create_task(asyncio.to_thread(complete, mesh, model, 200))
        await eventually(lambda: mesh.metric("kvmesh_worker_running_requests") > 0, 60)
        done = await mesh.command("fleet", "sleep", "worker-0", "--wait", "60")
        assert done.returncode == 0, done.stderr
        assert "no other worker serves" in done.stderr
        assert (await running)[1] == 200
        await seen.until([], ["worker-0"])
        asleep = seen.card("worker-0")
        assert (asleep.instance, asleep.asleep, asleep.parked_for) == (first.instance, True, model)
        assert (asleep.phases, asleep.served) == (first.phases, first.model)
        assert "asleep" in (await mesh.command("status")).stdout
        assert not any(
            value
            for name, value in scrape(mesh.worker_ports["worker-0"]).items()
            if name.startswith("kvmesh_worker_cached_blocks")
        )
        again = await mesh.command("fleet", "sleep", "worker-0")
        assert again.returncode == 1, "it does not serve"
        for _ in range(2):
            done = await mesh.command("fleet", "promote", "worker-0", "--wait", "60")
            assert done.returncode == 0, done.stderr
            await mesh.ready()
            woken = seen.card("worker-0")
            assert woken.instance == first.instance
            assert woken.startup_s == first.startup_s
            assert woken.promoted_s > 0
            assert await asyncio.to_thread(complete, mesh, model) == before
            await until_indexed(mesh)
            done = await mesh.command("fleet", "sleep", "worker-0", "--wait", "60")
            assert done.returncode == 0, done.stderr
        drained = await mesh.command("fleet", "drain", "worker-0", "--wait", "30")
        assert drained.returncode == 0, drained.stderr
        assert await asyncio.to_thread(mesh.processes["worker-0"].wait, 30) == 0

    mesh.start_all(workers=1)
    await watched(mesh, check)


async def until_indexed(mesh: Mesh) -> None:
    """Wait until the index has exactly the blocks of the workers."""
    async with asyncio.timeout(60):
        while True:
            done = await mesh.command("doctor")
            if "equal to the workers" in done.stdout:
                return
            await asyncio.sleep(0.2)


def running_on(mesh: Mesh) -> str:
    """The worker that runs a request; empty while none does."""
    for name, port in mesh.worker_ports.items():
        samples = scrape(port).items()
        if any(n.startswith("kvmesh_worker_running_requests") and value for n, value in samples):
            return name
    return ""


async def test_requests_move_to_another_worker_or_keep_the_last_one_awake(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    env = {"KVMESH_WORKER_DRAIN_TIMEOUT_S": "1", "KVMESH_MOCK_SPEEDUP": "0.2"}
    mesh = Mesh(nats_server.url, tmp_path, env)

    async def command(bus: Bus, seen: Seen, name: str) -> ControlReply:
        subject = bus.subjects.ctl(seen.card(name).instance)
        return await bus.request(subject, Sleep(), _replies, 5)

    async def check(bus: Bus, seen: Seen) -> None:
        await mesh.ready()
        await seen.until(["worker-0"], [])
        running = asyncio.create_task(asyncio.to_thread(complete, mesh, "kvmesh-demo", 150))
        await eventually(lambda: mesh.metric("kvmesh_worker_running_requests") > 0, 60)
        assert (await command(bus, seen, "worker-0")).ok
        await eventually(lambda: seen.card("worker-0").draining, 30)
        await eventually(lambda: not seen.card("worker-0").draining, 30, "it stays awake")
        assert (await running)[1] == 150
        mesh.start("worker", "worker-1")
        await seen.until(["worker-0", "worker-1"], [])
        running = asyncio.create_task(asyncio.to_thread(complete, mesh, "kvmesh-demo", 150))
        busy = await eventually(lambda: running_on(mesh), 60)
        (other,) = {"worker-0", "worker-1"} - {busy}
        assert (await command(bus, seen, busy)).ok
        assert (await command(bus, seen, busy)).ok, "it is idempotent"
        await seen.until([other], [busy])
        assert (await running)[1] == 150, "the other worker has continued it"

    mesh.start_all(workers=1)
    await watched(mesh, check)
