"""Mock engines share blocks through the kvbm of their node, in modelled time."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

PROMPT = "one two three four five six seven eight nine ten " * 60


@pytest.fixture
def mesh(nats_server: NatsServer, tmp_path: Path) -> Iterator[Mesh]:
    env = {
        "KVMESH_MOCK_KVBM": "true",
        "KVMESH_MOCK_SPEEDUP": "4",
        "KVMESH_ROUTER_POLICY": "round-robin",
        "KVMESH_KVBM_HOST_BYTES": str(8 << 20),
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


def ask(mesh: Mesh, prompt: str) -> int:
    """Send a prompt; returns the number of its tokens that were cached."""
    body = json.dumps({"model": "kvmesh-demo", "prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{mesh.url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        usage = json.load(answer)["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def logged(mesh: Mesh, name: str, text: str) -> int:
    return (mesh.folder / f"{name}.log").read_text().count(text)


async def test_workers_share_blocks_and_outlive_the_kvbm(mesh: Mesh) -> None:
    mesh.start("kvbm", "kvbm-0")
    mesh.start_all(2)
    await mesh.ready()
    await eventually(lambda: logged(mesh, "kvbm-0", " attached") == 2, what="workers attach")
    assert ask(mesh, PROMPT) == 0
    written = "kvmesh_worker_write_through_blocks_total"
    await eventually(lambda: mesh.metric(written) > 20, what="blocks are written through")
    cached = ask(mesh, PROMPT)
    assert cached > 0
    onboarded = "kvmesh_worker_onboarded_blocks_total"
    await eventually(lambda: mesh.metric(onboarded) * 16 == cached, what="the other one loads")
    mesh.kill("kvbm-0")
    assert [ask(mesh, PROMPT) for _ in range(2)] == [cached, cached]
    assert ask(mesh, f"other {PROMPT}") == 0
    assert mesh.metric("kvmesh_worker_corrupt_blocks_total") == 0
