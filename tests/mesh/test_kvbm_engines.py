"""Torch engines above a real kvbm process: the same answers from every tier and through crashes."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from msgspec.structs import replace

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from support.mesh import Mesh
from support.nats import NatsServer
from support.redis import RedisServer
from support.torch_tiers import Answer, Host, make_work
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear
from kvmesh.bus.streams.configuration import StreamLimits

Start = Callable[..., Awaitable[Host]]
BLOCK_BYTES = 16384


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(8000) for _ in range(length)]


class Nodes:
    """The kvbm processes of nodes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def start(self, node: str = "here", **settings: str) -> None:
        settings = {
            "node": node,
            "directory": str(self.mesh.folder / f"node-{node}"),
            "host_bytes": str(8 << 20),
            **settings,
        }
        env = {f"KVMESH_KVBM_{name.upper()}": value for name, value in settings.items()}
        self.mesh.start("kvbm", node, **env)


@pytest_asyncio.fixture
async def nodes(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Nodes]:
    mesh = Mesh(nats_server.url, tmp_path, namespace=bus.options.namespace)
    yield Nodes(mesh)
    mesh.stop()


@pytest_asyncio.fixture
async def start(bus: Bus, limits: StreamLimits) -> AsyncIterator[Start]:
    hosts: list[Host] = []

    async def begin(name: str, blocks: int = 256, attach: bool = True, node: str = "here") -> Host:
        host = Host(bus, limits, name, blocks, node)
        hosts.append(host)
        await host.start(attach)
        return host

    yield begin
    for host in hosts:
        await host.engine.close()


async def expected(start: Start, prompts: dict[str, list[int]], tokens: int) -> dict[str, Answer]:
    """The outputs of an engine without any kvbm."""
    alone = await start("alone", attach=False)
    await alone.run(*(make_work(name, p, tokens) for name, p in prompts.items()))
    return {name: alone.answer(name) for name in prompts}


async def test_every_tier_in_turn(nodes: Nodes, start: Start, tmp_path: Path) -> None:
    prompts = {f"r{i}": prompt(200 + i, i) for i in range(8)}
    answers = await expected(start, prompts, 6)
    disk = str(tmp_path / "disk")
    nodes.start(host_bytes=str(64 * BLOCK_BYTES), disk_path=disk, disk_frequency="1")
    one, two = await start("w-1"), await start("w-2")
    for name, tokens in prompts.items():
        await one.run(make_work(name, tokens, 6))
        await one.written()
    tiers: set[int] = set()
    for host in (two, one):
        for name, tokens in [(name, p) for name, p in prompts.items() for _ in range(2)]:
            await host.engine.clear(Clear())
            host.sink.deltas.clear()
            await host.run(make_work(name, tokens, 6))
            await host.written()
            assert host.answer(name) == answers[name]
            tiers.update(tier for tier, held in enumerate(host.cached(name)) if held)
        await host.check_accounting()
    assert tiers >= {1, 2}


async def test_an_ephemeral_request_leaves_nothing_in_the_tiers(nodes: Nodes, start: Start) -> None:
    """Nor does a sibling wait for the blocks that it computes."""
    nodes.start()
    one, two = await start("w-1"), await start("w-2")
    await one.run(replace(make_work("ephemeral", prompt(200, 1)), ephemeral=True))
    await one.run(make_work("lasting", prompt(200, 2)))
    await one.written()
    for name, seed, held in (("again", 1, False), ("loaded", 2, True)):
        await two.run(make_work(name, prompt(200, seed)))
        assert bool(sum(two.cached(name))) == held  # it computes what is not loaded in time
    assert await one.lower_tiers.hand_down(5.0) == 0
    third = await start("w-3")
    await third.run(make_work("third", prompt(200, 1)))
    assert sum(third.cached("third")) == 192  # the second worker has written it


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings by which nodes share blocks: a folder, Redis, or memory found through the index."""
    if request.param == "folder":
        yield {"remote_url": f"file://{tmp_path / 'shared'}", "remote_frequency": "1"}
    elif request.param == "memory":
        yield {"peers": "true"}
    else:
        server = RedisServer(tmp_path)
        server.start()
        yield {"remote_url": server.url, "remote_frequency": "1"}
        server.kill()


def check_equal_output(one: Host, other: Host, name: str) -> None:
    """Fail the test at once, even inside `eventually`, which retries failed assertions."""
    if one.answer(name) != other.answer(name):
        pytest.fail(f"{name} has two different outputs")


@pytest.mark.parametrize("settings", ["folder", "redis", "memory"], indirect=True)
async def test_blocks_that_another_node_holds(
    nodes: Nodes, start: Start, settings: dict[str, str]
) -> None:
    nodes.mesh.start("indexer", "indexer-0")
    nodes.start("here", **settings)
    nodes.start("there", **settings)
    one, two = await start("w-1"), await start("w-2", node="there")
    attempts = count()

    async def prompt_one_then_the_other() -> bool:
        """Send a prompt new to both; its blocks become available elsewhere after a varying time."""
        attempt = next(attempts)
        name, tokens = f"r{attempt}", prompt(200, attempt)
        await one.run(make_work(name, tokens))
        await one.written()
        await asyncio.sleep(0.2 * attempt)
        await two.run(make_work(name, tokens))
        check_equal_output(one, two, name)
        return two.cached(name) == [0, 0, 0, 192]

    await eventually(prompt_one_then_the_other, 60, "all comes from the other node")
    await two.written()
    await two.check_accounting()


async def test_blocks_that_another_node_computes(nodes: Nodes, start: Start) -> None:
    nodes.mesh.start("indexer", "indexer-0")
    nodes.mesh.env["KVMESH_TRANSFER_VIA"] = "tcp"
    for node in ("here", "there"):
        nodes.start(node, peers="true", host_bytes=str(32 << 20))
    one, two = await start("w-1"), await start("w-2", node="there")
    attempts = count()

    async def prompt_both_at_once() -> bool:
        """Send the same prompt to both at almost the same time, in any order."""
        attempt = next(attempts)
        name, tokens = f"r{attempt}", prompt(3000, attempt)
        pending = asyncio.create_task(one.run(make_work(name, tokens)))
        await asyncio.sleep(0.02 * attempt)
        await two.run(make_work(name, tokens))
        await pending
        check_equal_output(one, two, name)
        return sorted([one.cached(name), two.cached(name)]) == [[0], [0, 0, 0, 2992]]

    await eventually(prompt_both_at_once, 120, "one computes it and the other loads it")
    for host in (one, two):
        await host.written()
        await host.check_accounting()


async def test_the_kvbm_is_killed_repeatedly(nodes: Nodes, start: Start) -> None:
    rng = Random(7)
    shared = prompt(120)
    prompts = {f"r{i}": [*shared[: 16 * (i % 8)], *prompt(40 + 3 * i, i)] for i in range(12)}
    answers = await expected(start, prompts, 10)
    nodes.start()
    hosts = [await start("w-1", blocks=40), await start("w-2", blocks=60)]

    async def work(host: Host) -> None:
        for _ in range(4):
            await host.engine.clear(Clear())
            host.sink.deltas.clear()
            names = rng.sample(list(prompts), 6)
            await host.run(*(make_work(name, prompts[name], 10) for name in names))
            assert {name: host.answer(name) for name in names} == {n: answers[n] for n in names}

    working = [asyncio.create_task(work(host)) for host in hosts]

    def loads_again(before: int) -> bool:
        done = all(task.done() for task in working)
        return done or sum(host.lower_tiers.counts.loaded[1] for host in hosts) > before

    while not all(task.done() for task in working):
        loaded = sum(host.lower_tiers.counts.loaded[1] for host in hosts)
        await asyncio.wait(working, timeout=0.3)
        nodes.mesh.kill("here")
        nodes.mesh.restart("here")
        await eventually(partial(loads_again, loaded), what="blocks are loaded again")
    await asyncio.gather(*working)
    for host in hosts:
        await host.written()
        await host.check_accounting()
        await host.attached()


async def test_the_kvbm_freezes_during_work_and_thaws(nodes: Nodes, start: Start) -> None:
    shared = prompt(120)
    prompts = {f"r{i}": [*shared[: 16 * (i % 8)], *prompt(40 + 3 * i, i)] for i in range(6)}
    answers = await expected(start, prompts, 10)
    nodes.start()
    hosts = [await start("w-1", blocks=40), await start("w-2", blocks=60)]
    turns = [0, 0]
    over = asyncio.Event()

    async def work(number: int) -> None:
        host = hosts[number]
        while not over.is_set():
            await host.engine.clear(Clear())
            host.sink.deltas.clear()
            await host.run(*(make_work(name, tokens, 10) for name, tokens in prompts.items()))
            assert {name: host.answer(name) for name in prompts} == answers
            turns[number] += 1

    def further(before: list[int], loaded: int) -> bool:
        moved = all(now > then for now, then in zip(turns, before, strict=True))
        return moved and sum(host.lower_tiers.counts.loaded[1] for host in hosts) > loaded

    working = [asyncio.create_task(work(number)) for number in range(2)]
    process = nodes.mesh.processes["here"]
    for _ in range(3):
        loaded = sum(host.lower_tiers.counts.loaded[1] for host in hosts)
        await eventually(partial(further, turns.copy(), loaded), what="blocks are loaded")
        process.send_signal(signal.SIGSTOP)
        try:
            await eventually(partial(further, turns.copy(), -1), what="they continue without it")
        finally:
            process.send_signal(signal.SIGCONT)
    over.set()
    await asyncio.gather(*working)
    for host in hosts:
        await host.written()
        await host.check_accounting()
        await host.attached()


def resources() -> tuple[int, int]:
    """Open descriptors and resident pages of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(list(Path("/proc/self/fd").iterdir())), pages


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_nothing_grows_in_a_long_run(nodes: Nodes, start: Start, tmp_path: Path) -> None:
    rng = Random(3)
    prompts = {f"r{i}": [*prompt(80)[: 16 * (i % 5)], *prompt(90, i)] for i in range(40)}
    answers = await expected(start, prompts, 4)
    disk = str(tmp_path / "disk")
    nodes.start(host_bytes=str(96 * BLOCK_BYTES), disk_path=disk, disk_frequency="1")
    hosts = [await start("w-1", blocks=40), await start("w-2", blocks=40)]
    before = (0, 0)
    for turn in range(400):
        host = rng.choice(hosts)
        host.sink.deltas.clear()
        names = rng.sample(list(prompts), 4)
        await host.run(*(make_work(name, prompts[name], 4) for name in names))
        assert all(host.answer(name) == answers[name] for name in names)
        if rng.random() < 0.2:
            await host.engine.clear(Clear())
        if turn == 100:
            before = resources()
    for host in hosts:
        await host.written()
        await host.check_accounting()
        assert min(host.lower_tiers.counts.loaded[1:3]) > 0
    files, pages = resources()
    assert files <= before[0] + 4
    assert pages <= before[1] * 1.1
