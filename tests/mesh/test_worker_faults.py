"""Faults of a worker leave no request waiting: crash, hang, loss, overload."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import forks
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually
from support.worker import FAST, SLOW, ScriptedFrontend, Workers, prompt, work

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import NoResponder
from kvmesh.bus.messages import Cleared, KvEvent, Stored
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.streams.publisher import KvPublisher
from kvmesh.settings.schema import WorkerSettings


async def test_a_crash_fails_its_requests_with_the_reason(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(replace(SLOW, crash_step=6))
    await frontend.dispatch("w-1", work("a", prompt(40), 100))
    assert await eventually(lambda: frontend.finish("a")) == "abort"
    assert len(frontend.tokens("a")) == 5
    assert "injected crash" in (frontend.chunks["a"][-1].error or "")
    assert "injected crash at step 6" in str(started.ends[0])
    assert (await frontend.dispatch("w-1", work("b", prompt(40)))).status == "draining"


async def test_a_hung_engine_is_detected_and_given_up(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(replace(FAST, hang_step=4), WorkerSettings(hang_timeout_s=1.0))
    await frontend.dispatch("w-1", work("a", prompt(40), 100))
    assert await eventually(lambda: frontend.finish("a")) == "abort"
    assert len(frontend.tokens("a")) == 3
    assert "took no step for 1 s" in str(started.ends[0])


async def test_an_idle_engine_is_not_hung(frontend: ScriptedFrontend, workers: Workers) -> None:
    started = await workers.start(FAST, WorkerSettings(hang_timeout_s=0.05, load_interval_s=0.01))
    seen = len(frontend.loads)
    await eventually(lambda: len(frontend.loads) > seen + 1)
    assert not started.ends
    assert started.node.ready


async def test_lost_events_show_as_a_gap_and_a_dump_repairs_it(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(replace(FAST, lose_every=3))
    frontend.contents.tolerant = True
    for i in range(12):
        await frontend.dispatch("w-1", work(f"r{i}", prompt(100, first=i)))
        await frontend.done(f"r{i}")
    await eventually(lambda: frontend.contents.gaps > 1)
    assert (await frontend.dump("w-1", 0)).ok
    (load,) = started.node.load()
    await eventually(lambda: len(frontend.contents.held["w-1", 0]) == load.cached_blocks)


async def test_a_backlog_beyond_its_bound_becomes_a_dump(
    bus: Bus, frontend: ScriptedFrontend, nats_server: NatsServer
) -> None:
    held: list[KvEvent] = []

    def dump(rank: int) -> None:
        publisher.add(rank, [Cleared(), *held])

    subject = bus.subjects.kv("m", "w")
    publisher = KvPublisher(bus, subject, "w", "w-1", 0.0, dump, max_backlog=1000)
    publisher.start()
    for i in range(50):
        event = Stored(0, None, i.to_bytes(8, "little"), bytes(8), 11)
        held.append(event)
        publisher.add(0, [event])
    await eventually(lambda: len(frontend.contents.held.get(("w-1", 0), ())) == 50)
    assert publisher.overflows == 1
    assert frontend.contents.dumps == 1
    await publisher.close()


async def test_the_same_worker_comes_back_as_another_instance(
    bus: Bus, frontend: ScriptedFrontend, workers: Workers, limits: StreamLimits
) -> None:
    first = await workers.start(FAST)
    await frontend.dispatch("w-1", work("a", prompt(100)))
    tokens = await frontend.done("a")
    await first.node.drain(5)
    await first.stop()
    with pytest.raises(NoResponder):
        await frontend.dispatch("w-1", work("b", prompt(100)))
    await workers.start(FAST, instance="w-2")
    directory = Directory(bus, limits)
    await directory.open()
    assert [card.instance for card in directory.instances] == ["w-2"]
    await directory.close()
    await frontend.dispatch("w-2", work("c", prompt(100)))
    assert await frontend.done("c") == tokens
    assert frontend.chunks["c"][0].cached == [0]
    await eventually(lambda: frontend.contents.next_id.get(("w-2", 0)))


@pytest.fixture
def mesh(nats_server: NatsServer, tmp_path: Path) -> Mesh:
    return Mesh(nats_server.url, tmp_path, {"KVMESH_MOCK_SPEEDUP": "2"})


async def _card(directory: Directory, name: str) -> str:
    found = await eventually(lambda: [c for c in directory.instances if c.name == name])
    return found[0].instance


async def test_a_process_drains_on_sigterm_and_exits_cleanly(
    mesh: Mesh, limits: StreamLimits
) -> None:
    bus = await Bus.connect(mesh.options, "test")
    mesh.start("worker", "w")
    frontend = ScriptedFrontend(bus)
    await eventually(lambda: _streams_exist(bus))
    await frontend.open()
    directory = Directory(bus, limits)
    await directory.open()
    instance = await _card(directory, "w")
    for i in range(5):
        await frontend.dispatch(instance, work(f"r{i}", prompt(100, first=i), 100))
    await eventually(lambda: len(frontend.chunks) == 5)
    process = mesh.processes["w"]
    process.send_signal(signal.SIGTERM)
    for i in range(5):
        assert len(await frontend.done(f"r{i}")) == 100
        assert frontend.finish(f"r{i}") == "length"
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    await eventually(lambda: not directory.instances)
    await directory.close()
    await frontend.reader.close()
    await bus.close()


async def _streams_exist(bus: Bus) -> bool:
    names = [info.config.name for info in await bus.js.streams_info()]
    return {bus.subjects.kv_stream, f"KV_{bus.subjects.instances_bucket}"} <= set(names)


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"KVMESH_WORKER_MODEL": "/nonexistent"}, "/nonexistent is not a Hugging Face model"),
        ({"KVMESH_MOCK_PROFILE": "/no.npz"}, "/no.npz is not a performance profile"),
        ({"KVMESH_MOCK_SCRIPT": "/no.jsonl"}, "cannot read the script /no.jsonl"),
    ],
)
def test_a_worker_that_cannot_start_reports_why_and_exits(
    mesh: Mesh, env: dict[str, str], complaint: str
) -> None:
    settings = {"KVMESH_NATS_URL": mesh.nats_url, "KVMESH_NATS_NAMESPACE": mesh.namespace}
    done = forks.run(["worker"], {**os.environ, **settings, **env}, PATIENCE_S)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
