"""Every program in `examples/` on a real mesh, as its page says."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """A mesh whose router has the policy of the examples."""
    env = {
        "KVMESH_MOCK_SPEEDUP": "50",
        "KVMESH_ROUTER_POLICY": "sticky_policy:StickyWithSpill",
        "PYTHONPATH": str(EXAMPLES),
    }
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    mesh.start_all(workers=2)
    await mesh.ready()
    yield mesh
    mesh.stop()


async def run(mesh: Mesh, name: str, *arguments: str, **env: str) -> str:
    """The output of an example, which must succeed."""
    names = {"KVMESH_NATS_URL": mesh.nats_url, "KVMESH_NATS_NAMESPACE": mesh.namespace}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / name),
        *arguments,
        env={**os.environ, **names, "OPENAI_BASE_URL": f"{mesh.url}/v1", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_second_turn_of_the_chat_finds_the_first_cached(mesh: Mesh) -> None:
    first, second = (await run(mesh, "chat.py")).splitlines()
    assert first.endswith(" 0 of them cached")
    assert int(re.findall(r", (\d+) of", second)[0]) > 100
    decisions = await mesh.command("tail", "route", "--since", "10m", "--no-follow", "--json")
    assert "stayed" in decisions.stdout, "the example's policy has placed the second turn"


async def test_the_embedded_router_places_and_generates(mesh: Mesh) -> None:
    placed, generated = (await run(mesh, "embedded_router.py")).splitlines()
    assert "of the prompt" in placed
    assert re.search(r"generated [1-9]\d* tokens", generated)


async def test_the_fleet_program_starts_and_stops_workers(mesh: Mesh, tmp_path: Path) -> None:
    env = {"FLEET_DIR": str(tmp_path), "KVMESH_WORKER_SERVED_NAME": "scaled"}

    async def fleet(*arguments: str) -> list[str]:
        pools = json.loads(await run(mesh, "fleet_program.py", *arguments, **env))
        assert pools["workers"]["wanted"] == len(pools["workers"]["workers"])
        workers: list[str] = pools["workers"]["workers"]
        return workers

    async def join() -> bool:
        models = (await mesh.command("status", "--json")).stdout
        return models.count('"scaled"') >= 2

    assert await fleet("scale", "workers=2") == ["worker-0", "worker-1"]
    try:
        await eventually(join, what="both workers have joined")
        assert await fleet("state") == ["worker-0", "worker-1"]
        assert await fleet("scale", "workers=1", "--stop", "worker-0") == ["worker-1"]
    finally:
        assert await fleet("scale", "workers=0") == []
