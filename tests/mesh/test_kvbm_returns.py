"""A router's forecasts reach the kvbm of the node, which loads blocks back before they are read."""

import json
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest
from support.mesh import Mesh, scrape
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

SOON_S = 30.0


class Node:
    """A mesh of one mock worker with a kvbm that has a disk, and its client."""

    def __init__(self, mesh: Mesh, port: int) -> None:
        self.mesh = mesh
        self.port = port

    def ask(self, session: str, remaining_s: float | None = None) -> int:
        """Send a session's prompt of 60 blocks or so; returns its cached tokens.

        A harness reports a tool of `remaining_s` while the answer comes.
        """
        prompt = f"{session} one two three four five six seven eight nine ten " * 90
        body = {"model": "kvmesh-demo", "prompt": prompt, "max_tokens": 100, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with self._post("/v1/completions", body, session) as answer:
            first = answer.readline()
            if remaining_s is not None:
                event = {"event": "started", "tool": "Bash", "remaining_s": remaining_s}
                self._post(f"/v1/sessions/{session}/tools", event, session).close()
            lines = [line for line in (first + answer.read()).split(b"\n") if b'"usage":{' in line]
        usage = json.loads(lines[-1].removeprefix(b"data: "))["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    def clear_memory(self) -> None:
        """Drop what the engine and the kvbm have in memory."""
        body = {"model": "kvmesh-demo", "tiers": [0, 1]}
        self._post("/v1/cache/clear", body, "operator").close()

    def metric(self, name: str) -> float:
        return scrape(self.port).get(f"kvmesh_kvbm_{name}", 0.0)

    def _post(self, path: str, body: object, session: str) -> HTTPResponse:
        headers = {"content-type": "application/json", "x-kvmesh-session-id": session}
        request = urllib.request.Request(
            f"{self.mesh.url}{path}", json.dumps(body).encode(), headers
        )
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=PATIENCE_S)
        return answer


@pytest.fixture
def node(nats_server: NatsServer, tmp_path: Path) -> Iterator[Node]:
    port = free_port()
    env = {
        "KVMESH_MOCK_KVBM": "true",
        "KVMESH_KVBM_HOST_BYTES": str(1 << 20),
        "KVMESH_KVBM_DISK_PATH": str(tmp_path / "disk"),
        "KVMESH_KVBM_DISK_FREQUENCY": "1",
        "KVMESH_KVBM_METRICS_PORT": str(port),
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield Node(mesh, port)
    mesh.stop()


async def test_the_kvbm_loads_the_prompt_that_is_about_to_return(node: Node) -> None:
    mesh = node.mesh
    mesh.start("kvbm", "kvbm-0")
    mesh.start_all(1)
    await mesh.ready()
    await eventually(lambda: node.metric("workers") == 1, what="the worker attaches")
    node.ask("soon", SOON_S)
    applied = 'return_forecasts_total{result="applied"}'
    await eventually(lambda: node.metric(applied) >= 1, what="the forecast arrives")
    await eventually(lambda: node.metric('blocks{tier="2"}') >= 20, what="the blocks are on disk")
    node.clear_memory()
    await eventually(lambda: node.metric("restored_bytes_total") > 0, what="blocks are restored")
    assert node.ask("soon") >= 64
    assert node.metric("restored_read_bytes_total") > 0
