"""`kvmesh plan backtest` on a live mesh: it scores predictors on the requests that it served."""

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
SPACING_MS = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "100", "KVMESH_MOCK_BLOCKS": "2048"}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    rows: list[dict[str, Any]] = [
        {
            "timestamp": SPACING_MS * index,
            "input_length": 512,
            "output_length": 4,
            "hash_ids": [index],
        }
        for index in range(REQUESTS)
    ]
    try:
        mesh.start_all(1)
        await mesh.ready()
        await replay(mesh, tmp_path_factory.mktemp("trace"), rows)
        yield mesh
    finally:
        mesh.stop()


async def backtest(mesh: Mesh, *more: str) -> tuple[int, str]:
    done = await mesh.command("plan", "backtest", *more)
    return done.returncode, done.stdout + done.stderr


async def test_served_requests_are_scored(mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    wanted = ("--interval", "0.01", "--startup", "0.03", "--predictors", "seasonal,kalman")

    async def scored() -> Any:
        """The figures, once the outcomes of all requests are recorded."""
        code, out = await backtest(mesh, "--since", "10m", *wanted, "--json", str(file))
        assert code == 0, out
        assert "captured traffic" in out
        figures = json.loads(file.read_text())
        assert figures["requests"] >= REQUESTS
        return figures

    figures = await eventually(scored)
    assert [each["name"] for each in figures["arrivals"]["predictors"]] == ["seasonal", "kalman"]
    for each in figures["arrivals"]["predictors"]:
        assert [score["steps"] for score in each["horizons"]] == [1, 3]
    assert figures["arrivals"]["best"] in ("seasonal", "kalman")


async def test_a_window_without_requests_is_reported(mesh: Mesh) -> None:
    code, out = await backtest(mesh, "--model", "nobody")
    assert code == 2
    assert out.startswith("kvmesh plan: no finished requests")
    assert len(out.splitlines()) == 1
