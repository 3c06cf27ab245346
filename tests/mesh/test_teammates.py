"""Four workers on one node: each loads the blocks that another has computed. Real processes."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from openai import AsyncOpenAI
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.tiny import tiny_model
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.streams.configuration import StreamLimits

TEAM = [f"mate-{i}" for i in range(4)]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
SHARED = "Read the whole repository before you change a line of it. " * 190


class Team:
    """A mesh of four torch workers and a block manager."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ports = {name: free_port() for name in [*TEAM, "kvbm-0"]}

    def start(self) -> None:
        mesh = self.mesh
        mesh.start("indexer", "indexer-0")
        mesh.start("router", "router-0")
        self.start_kvbm()
        for name in TEAM:
            port = str(self.ports[name])
            mesh.start("worker", name, KVMESH_WORKER_METRICS_PORT=port)
        mesh.start("frontend", "frontend-0")

    def start_kvbm(self) -> None:
        self.mesh.start("kvbm", "kvbm-0", KVMESH_KVBM_METRICS_PORT=str(self.ports["kvbm-0"]))

    def metric(self, process: str, name: str) -> float:
        """The sum of a metric of one process over all labels."""
        url = f"http://127.0.0.1:{self.ports[process]}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith(name))
        return sum(float(value) for key, _, value in samples if key.partition("{")[0] == name)

    def computed(self) -> float:
        """Prompt tokens that the workers have computed."""
        return sum(
            self.metric(name, "kvmesh_worker_prompt_tokens_total")
            - self.metric(name, "kvmesh_worker_cached_tokens_total")
            for name in TEAM
        )

    def onboarded(self) -> float:
        """Blocks that they have loaded."""
        return self.metric("kvbm-0", "kvmesh_kvbm_onboarded_blocks_total")

    async def ready(self) -> None:
        await self.mesh.ready(180)
        await eventually(self._attached, 100, what="all workers are attached")

    def _attached(self) -> bool:
        try:
            return self.metric("kvbm-0", "kvmesh_kvbm_workers") == len(TEAM)
        except OSError:
            return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def team(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Team]:
    folder: Path = tmp_path_factory.mktemp("team")
    env = {
        "KVMESH_WORKER_ENGINE": "torch",
        "KVMESH_WORKER_MODEL": str(tiny_model()),
        "KVMESH_WORKER_SERVED_NAME": "tiny",
        "KVMESH_WORKER_SHARED_WAIT_S": "60",
        "KVMESH_WORKER_HANG_TIMEOUT_S": "300",
        "KVMESH_TORCH_THREADS": "1",
        "KVMESH_TORCH_BLOCKS": "512",
        "KVMESH_KVBM_DIRECTORY": str(folder / "node"),
        "KVMESH_KVBM_HOST_BYTES": str(64 << 20),
    }
    team = Team(Mesh(nats_server.url, folder, env))
    try:
        team.start()
        await team.ready()
        yield team
    finally:
        team.mesh.stop()


async def complete(
    client: AsyncOpenAI, task: str, worker: str = "", system: str = SHARED
) -> tuple[str, int, int]:
    """Request an output, from this instance if given; returns its prompt and cached tokens."""
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": task}],
        max_tokens=8,
        temperature=0,
        extra_headers={"x-kvmesh-worker-instance-id": worker} if worker else None,
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return answer.choices[0].message.content or "", usage.prompt_tokens, cached


async def instances(mesh: Mesh) -> list[str]:
    """The workers' instance ids, in order."""
    bus = await Bus.connect(mesh.options, "test")
    directory = Directory(bus, StreamLimits())
    await directory.open()

    def found() -> list[str]:
        names = {card.name: card.instance for card in directory.instances}
        return [names[name] for name in TEAM] if names.keys() >= set(TEAM) else []

    try:
        return await eventually(found, what="all workers have joined")
    finally:
        await directory.close()
        await bus.close()


async def test_a_shared_prefix_is_computed_once(team: Team) -> None:
    workers = await instances(team.mesh)
    computed, onboarded = team.computed(), team.onboarded()
    system = f"You are one of four. {SHARED}"
    async with AsyncOpenAI(base_url=f"{team.mesh.url}/v1", api_key="none", max_retries=0) as api:
        outputs = [complete(api, f"Task {i}.", worker, system) for i, worker in enumerate(workers)]
        answers = await asyncio.gather(*outputs)
    prompts = [prompt for _, prompt, _ in answers]
    cached = sorted(cached for _, _, cached in answers)
    assert min(prompts) > 2000
    assert cached[0] == 0
    assert cached[1] >= max(prompts) - 3 * 16
    assert team.computed() - computed == sum(prompts) - sum(cached) <= 1.1 * max(prompts)
    assert team.onboarded() - onboarded == sum(cached) / 16


async def test_killed_workers_cause_no_lost_or_wrong_answers(team: Team) -> None:
    tasks = [f"Task {i}: {'look again, ' * (3 * i)}done." for i in range(10)]
    async with AsyncOpenAI(base_url=f"{team.mesh.url}/v1", api_key="none", max_retries=0) as api:
        expected = {task: (await complete(api, task))[0] for task in tasks}

        async def work() -> None:
            for task in tasks:
                assert (await complete(api, task))[0] == expected[task]

        working = [asyncio.create_task(work()) for _ in range(3)]
        for victim in ("kvbm-0", TEAM[1], "kvbm-0"):
            await asyncio.wait(working, timeout=0.5)
            team.mesh.kill(victim)
            team.mesh.restart(victim)
        await asyncio.gather(*working)
