"""A router's forecasts reach the kvbm of the node, and change which blocks it evicts."""

import json
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.client import HTTPResponse
from pathlib import Path

import pytest
from support.mesh import Mesh, scrape
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

SOON_S, LATE_S = 30.0, 7000.0
LATE = 8


class Node:
    """A mesh of one mock worker with a kvbm of 256 blocks, and its client."""

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

    def clear_engine(self) -> None:
        """Drop what the engine itself caches."""
        body = {"model": "kvmesh-demo", "tiers": [0]}
        self._post("/v1/cache/clear", body, "operator").close()

    def has_written(self, blocks: float) -> bool:
        written = self.metric("written_blocks_total") > blocks
        return written and not self.metric("staged_bytes")

    def has_forecasts(self, count: int) -> bool:
        return self.metric('return_forecasts_total{result="applied"}') >= count

    def metric(self, name: str) -> float:
        return scrape(self.port).get(f"kvmesh_kvbm_{name}", 0.0)

    def _post(self, path: str, body: object, session: str) -> HTTPResponse:
        headers = {"content-type": "application/json", "x-kvmesh-session-id": session}
        request = urllib.request.Request(
            f"{self.mesh.url}{path}", json.dumps(body).encode(), headers
        )
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=PATIENCE_S)
        return answer


@pytest.fixture(params=["forecast", "lru"])
def node(nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    port = free_port()
    env = {
        "KVMESH_MOCK_KVBM": "true",
        "KVMESH_KVBM_HOST_BYTES": str(1 << 20),
        "KVMESH_KVBM_METRICS_PORT": str(port),
        "KVMESH_KVBM_EVICTION": request.param,
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield Node(mesh, port)
    mesh.stop()


async def test_the_kvbm_keeps_the_prompt_that_is_about_to_return(node: Node) -> None:
    mesh = node.mesh
    by_forecast = mesh.env["KVMESH_KVBM_EVICTION"] == "forecast"
    mesh.start("kvbm", "kvbm-0")
    mesh.start_all(1)
    await mesh.ready()
    await eventually(lambda: node.metric("workers") == 1, what="the worker attaches")
    sessions = {"soon": SOON_S} | {f"late-{n}": LATE_S for n in range(LATE)}
    for number, (session, remaining_s) in enumerate(sessions.items(), 1):
        before = node.metric("written_blocks_total")
        node.ask(session, remaining_s)
        written = partial(node.has_written, before + 20)
        await eventually(written, what="the blocks are written through")
        if by_forecast:
            await eventually(partial(node.has_forecasts, number), what="the forecast arrives")
    assert node.metric('evicted_blocks_total{tier="1"}') > 0
    unlikely = node.metric('unlikely_blocks_total{tier="1"}')
    assert unlikely > 0 if by_forecast else unlikely == 0
    node.clear_engine()
    cached = node.ask("soon")
    assert cached >= 64 if by_forecast else cached == 0  # the first batch; the rest is computed
