"""`kvmesh simulate live` on a live mesh: it replays the served requests under any policy."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from mesh.test_replay import replay
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
REQUESTS = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "100", "KVMESH_MOCK_BLOCKS": "2048"}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    try:
        mesh.start_all(2)
        await mesh.ready()
        await replay(mesh, tmp_path_factory.mktemp("trace"), rows())
        yield mesh
    finally:
        mesh.stop()


def rows() -> list[dict[str, Any]]:
    """Prompts of 1,024 tokens, three quarters of them with a common prefix."""
    return [
        {
            "timestamp": 20 * i,
            "input_length": 1024,
            "output_length": 6,
            "hash_ids": [0 if i % 4 else i + 1, 100 + i],
        }
        for i in range(REQUESTS)
    ]


async def whatif(mesh: Mesh, *more: str) -> tuple[int, str]:
    done = await mesh.command("simulate", "live", *more)
    return done.returncode, done.stdout + done.stderr


async def test_served_requests_are_compared_under_policies(mesh: Mesh, tmp_path: Path) -> None:
    file, report = tmp_path / "figures.json", tmp_path / "report.html"
    wanted = ("--policy", "kv,round-robin", "--json", str(file), "--html", str(report))

    async def compared() -> Any:
        """The runs, once the outcomes of all requests are recorded."""
        code, out = await whatif(mesh, "--since", "10m", *wanted)
        assert code == 0, out
        assert "measured under kv" in out
        runs = json.loads(file.read_text())
        assert min(run["rounds"] for run in runs) >= REQUESTS
        return runs

    runs = await eventually(compared)
    assert [run["policy"] for run in runs] == ["kv", "round-robin"]
    for run in runs:
        assert run["failed"] == 0
        assert len(run["workers"]) == 2, "as many as are live"
    assert runs[0]["cache"]["cached_share"] > 0.2
    assert "round-robin" in report.read_text()


async def test_another_fleet(mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    code, out = await whatif(mesh, "--workers", "5", "--json", str(file))
    assert code == 0, out
    (run,) = json.loads(file.read_text())
    assert len(run["workers"]) == 5


async def test_a_window_without_requests_is_reported(mesh: Mesh) -> None:
    code, out = await whatif(mesh, "--since", "10m", "--model", "nobody")
    assert code == 2
    assert out.startswith("kvmesh simulate live: ")
    assert len(out.splitlines()) == 1
