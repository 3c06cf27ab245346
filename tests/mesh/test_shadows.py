"""Shadow traffic: another model gets copies of an alias's requests, and nobody pays for them."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

SESSIONS = 12
HEADERS = {"Authorization": "Bearer own"}


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    digest = hashlib.sha256(b"own").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "own"\nsha256 = "{digest}"\ntenant = "t"\n')
    mesh = Mesh(nats_server.url, tmp_path, {"KVMESH_MOCK_SPEEDUP": "10"})
    try:
        mesh.start_all(workers=1)
        mesh.start("worker", "other-0", KVMESH_WORKER_SERVED_NAME="other")
        mesh.processes["frontend-0"].terminate()
        mesh.processes.pop("frontend-0").wait(60)
        mesh.start("frontend", "frontend-0", KVMESH_FRONTEND_KEYS_FILE=str(keys))
        await mesh.ready()
        yield mesh
    finally:
        mesh.stop()


async def ask(mesh: Mesh, session: int, stream: bool = False) -> str:
    """The model that an answer names."""
    body: dict[str, Any] = {
        "model": "chat",
        "max_tokens": 5,
        "stream": stream,
        "messages": [{"role": "user", "content": f"This is session {session}. " * 8}],
    }
    headers = {**HEADERS, "x-kvmesh-session-id": f"s{session}"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:
        reply = await client.post(f"{mesh.url}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return "chat" if stream else str(reply.json()["model"])


async def alias(mesh: Mesh, *arguments: str) -> str:
    done = await mesh.command("model", "alias", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def use(mesh: Mesh) -> dict[str, dict[str, Any]]:
    """The models of the alias, by name."""
    report = json.loads(await alias(mesh, "--json"))
    return {model["model"]: model for model in report[0]["models"]}


def shadows(mesh: Mesh, outcome: str) -> float:
    name = f'kvmesh_frontend_shadow_requests_total{{model="other",outcome="{outcome}"}}'
    return mesh.metrics().get(name, 0.0)


async def serves_alias(mesh: Mesh) -> bool:
    async with httpx.AsyncClient(headers=HEADERS) as client:
        models = (await client.get(f"{mesh.url}/v1/models")).json()["data"]
        return {"chat", "other"} <= {model["id"] for model in models}


async def test_a_shadow_gets_copies_that_nobody_pays_for(mesh: Mesh) -> None:
    text = await alias(mesh, "chat=kvmesh-demo", "--shadow", "other:100")
    assert text == "chat is kvmesh-demo:1, shadowed by other:100 %\n"
    await eventually(lambda: serves_alias(mesh))
    for session in range(SESSIONS):
        assert await ask(mesh, session, stream=session % 2 == 0) == "chat"
    await eventually(lambda: shadows(mesh, "answered") == SESSIONS)

    async def counted() -> bool:
        found = await use(mesh)
        return [found[m]["requests"] for m in ("kvmesh-demo", "other")] == [SESSIONS, SESSIONS]

    await eventually(counted)
    found = await use(mesh)
    assert [found[m]["shadow"] for m in ("kvmesh-demo", "other")] == [False, True]
    assert found["other"]["ttft_p50_s"] > 0
    status = (await mesh.command("status")).stdout
    assert "100.0% copied" in status

    samples = mesh.metrics()
    charged = [k for k in samples if "tenant" in k and 'tenant="t"' in k and "tokens" in k]
    assert charged
    assert not any('model="other"' in name for name in charged)
    usage = (await mesh.command("usage", "--by", "tenant", "--json")).stdout
    by_tenant = {row["group"]["tenant"]: row["use"] for row in json.loads(usage)["rows"]}
    assert by_tenant["t"]["requests"] == SESSIONS


async def test_a_shadow_that_fails_or_ends_disturbs_nobody(mesh: Mesh) -> None:
    await alias(mesh, "chat=kvmesh-demo", "--shadow", "other:100")
    await eventually(lambda: serves_alias(mesh))
    mesh.kill("other-0")
    assert await ask(mesh, 0) == "chat"
    await eventually(lambda: shadows(mesh, "failed") == 1)
    text = await alias(mesh, "chat=kvmesh-demo")
    assert text == "chat is kvmesh-demo:1\n"
    assert set(await use(mesh)) == {"kvmesh-demo"}
    back = await alias(mesh, "chat", "--back")
    assert back == "chat is kvmesh-demo:1, shadowed by other:100 %\n"


@pytest.mark.parametrize(
    ("shadow", "reason"),
    [
        ("other", "'other' is not MODEL:PERCENT"),
        ("other:0", "more than 0 and at most 100 percent"),
        ("other:101", "more than 0 and at most 100 percent"),
        ("a:5", "a serves the alias already"),
    ],
)
async def test_wrong_shadows_are_one_line(tmp_path: Path, shadow: str, reason: str) -> None:
    mesh = Mesh("nats://127.0.0.1:1", tmp_path)
    done = await mesh.command("model", "alias", "chat=a", "--shadow", shadow)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
