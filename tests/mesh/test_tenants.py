"""Two tenants on one mesh: neither reads, times, pins out, cancels or clears the other's data."""

import asyncio
import hashlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.tenants import EVIL, FORGED, VICTIM
from support.tiny import tiny_model
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS: dict[str, dict[str, Any]] = {
    "victim": {"tenant": VICTIM, "scopes": ["cache"]},
    "twin": {"tenant": VICTIM, "scopes": ["cache"]},
    "evil": {"tenant": EVIL, "scopes": ["cache"]},
    "nobody": {"scopes": ["cache"]},
}
CLAIMS: list[tuple[str, dict[str, str]]] = [
    ("evil", {}),
    ("evil", {"x-tenant-id": FORGED}),
    ("evil", {"x-tenant-id": VICTIM}),
    ("nobody", {}),
    ("nobody", {"x-tenant-id": VICTIM}),
    ("nobody", {"x-tenant-id": f"{EVIL}/{VICTIM}"}),
]
JSON = {"Content-Type": "application/json"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
_numbers = count()


@dataclass
class Stage:
    """A mesh whose worker has two tiers. `model` is what it serves."""

    mesh: Mesh
    model: str

    def call(
        self,
        key: str,
        path: str,
        body: dict[str, Any] | None = None,
        method: str = "POST",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}", **JSON, **headers}
        data = None if body is None else json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.mesh.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def complete(self, key: str, text: str, nvext: Any = None, **headers: str) -> list[int]:
        """Request one token; returns the cached tokens by tier."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "nvext": {"extra_fields": ["cache"], **(nvext or {})},
        }
        status, answer = self.call(key, CHAT, body, headers=headers)
        assert status == 200, answer
        tiers: list[int] = answer["nvext"]["cache"]["tiers"]
        assert sum(tiers) == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tiers

    def clear(self, key: str, *tiers: int, **headers: str) -> int:
        status, answer = self.call(key, "/v1/cache/clear", {"tiers": tiers}, headers=headers)
        assert status == 200, answer
        return int(answer["blocks"])


def secret() -> str:
    """A prompt unique to this test."""
    return f"What nobody else may know, number {next(_numbers)}. " * 12


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["mock", "torch"])
async def stage(
    request: pytest.FixtureRequest,
    nats_server: NatsServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    mesh = locked(nats_server, folder)
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    model = "kvmesh-demo"
    if request.param == "torch":
        pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
        model = "tiny"
        node = {"KVMESH_KVBM_NODE": "here", "KVMESH_KVBM_DIRECTORY": str(folder / "node")}
        mesh.start("kvbm", "kvbm-0", KVMESH_KVBM_HOST_BYTES=str(32 << 20), **node)
        tiny = {"KVMESH_WORKER_ENGINE": "torch", "KVMESH_WORKER_MODEL": str(tiny_model())}
        tiny["KVMESH_WORKER_SERVED_NAME"] = model
        mesh.start("worker", "worker-0", KVMESH_WORKER_NODE="here", **tiny)
    else:
        tiers = {"KVMESH_MOCK_HOST_BLOCKS": "4096", "KVMESH_MOCK_SPEEDUP": "100"}
        mesh.start("worker", "worker-0", **tiers)
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    yield Stage(mesh, model)
    mesh.stop()


def locked(nats_server: NatsServer, folder: Path) -> Mesh:
    """A mesh whose frontends require keys."""
    rows = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **fields}
        for name, fields in KEYS.items()
    ]
    keys = folder / "keys.toml"
    keys.write_text("".join(f"[[key]]\n{_toml(row)}\n" for row in rows))
    return Mesh(nats_server.url, folder, {"KVMESH_FRONTEND_KEYS_FILE": str(keys)})


def _toml(row: dict[str, Any]) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in row.items())


async def held_below(stage: Stage, text: str) -> None:
    """Wait until the victim's prompt has left its engine and is in a lower tier."""

    def found() -> bool:
        stage.complete("victim", text)
        stage.clear("victim", 0)
        return sum(stage.complete("victim", text)[1:]) > 0

    await eventually(found, what="the prompt is in a lower tier")


async def test_no_claimed_tenant_name_finds_a_tenant_s_blocks(stage: Stage) -> None:
    text = secret()
    stage.complete("victim", text)
    for key, headers in CLAIMS:
        assert sum(stage.complete(key, text, **headers)) == 0, (key, headers)
    assert sum(stage.complete("evil", text, {"cache_salt": FORGED[::-1]})) == 0
    assert sum(stage.complete("victim", text, **{"x-tenant-id": "part"})) == 0
    assert sum(stage.complete("twin", text)) > 0


async def test_no_claimed_tenant_name_finds_blocks_in_lower_tiers(stage: Stage) -> None:
    text = secret()
    await held_below(stage, text)
    stage.clear("victim", 0)
    for key, headers in CLAIMS:
        assert sum(stage.complete(key, text, **headers)) == 0, (key, headers)

    def found() -> bool:
        stage.clear("victim", 0)  # a busy engine may compute the blocks sooner than it loads them
        return sum(stage.complete("twin", text)[1:]) > 0

    await eventually(found, what="another key of the tenant has the blocks of the lower tier")


async def test_only_a_tenant_clears_its_blocks(stage: Stage) -> None:
    text = secret()
    await held_below(stage, text)
    for key, headers in CLAIMS:
        stage.clear(key, **headers)
        stage.clear(key, **headers)
    assert sum(stage.complete("twin", text)) > 0
    assert stage.call("evil", "/v1/cache/clear", {"all_tenants": True})[0] == 403

    def gone() -> bool:
        stage.clear("victim")  # an engine keeps blocks while it copies them to the block manager
        return sum(stage.complete("twin", text)) == 0

    await eventually(gone, what="the tenant has cleared its blocks")


async def test_a_session_belongs_to_its_tenant(stage: Stage) -> None:
    text, name = secret(), f"s{next(_numbers)}"
    stage.complete("victim", text, **{"x-kvmesh-session-id": name})
    held = sum(stage.complete("twin", text))
    for key, headers in CLAIMS:
        for session in (name, f"{VICTIM}\x1f{name}", f"\x1f{name}"):
            prefetch = stage.call(key, "/v1/prefetch", {"session": session}, headers=headers)
            assert (prefetch[0], prefetch[1]["error"]["code"]) == (404, "session_not_found")
            body = {"sessions": [session]}
            status, answer = stage.call(key, "/v1/sessions/release", body, headers=headers)
            assert (status, answer["blocks"]) == (200, 0)
    assert sum(stage.complete("twin", text)) == held > 0
    assert stage.call("twin", "/v1/prefetch", {"session": name})[0] == 200


async def test_a_pin_belongs_to_its_tenant(stage: Stage) -> None:
    text, pins = secret(), "/v1/cache/pins"
    stage.complete("victim", text)
    prompt = {"messages": [{"role": "user", "content": text}], "id": "mine", "ttl": "10m"}
    status, pin = stage.call("victim", pins, prompt)
    assert status == 200, pin
    assert pin["affected"] > 0
    for key, headers in CLAIMS:
        assert stage.call(key, f"{pins}/mine", method="DELETE", headers=headers)[0] == 404
        status, own = stage.call(key, pins, {**prompt, "ttl": 1.0}, headers=headers)
        assert (status, own["affected"]) == (200, 0)
        assert stage.call(key, f"{pins}/mine", method="DELETE", headers=headers)[0] == 200
    _, seen = stage.call("twin", pins, method="GET")
    assert [(entry["id"], entry["expires_at"]) for entry in seen["data"]] == [
        ("mine", pin["expires_at"])
    ]
    _, gone = stage.call("twin", f"{pins}/mine", method="DELETE")
    # lower tiers may have taken copies meanwhile
    assert gone["deleted"]
    assert gone["affected"] >= pin["affected"]


async def test_a_stored_response_belongs_to_its_tenant(stage: Stage) -> None:
    body = {"input": secret(), "store": True, "max_output_tokens": 16}
    status, made = stage.call("victim", RESPONSES, body)
    assert status == 200, made
    path = f"{RESPONSES}/{made['id']}"
    for key, headers in CLAIMS:
        tried = [
            stage.call(key, path, method="GET", headers=headers),
            stage.call(key, f"{path}/input_items", method="GET", headers=headers),
            stage.call(key, path, method="DELETE", headers=headers),
            stage.call(
                key, RESPONSES, {**body, "previous_response_id": made["id"]}, headers=headers
            ),
        ]
        assert [status for status, _ in tried] == [404, 404, 404, 400]
    assert stage.call("twin", path, method="GET")[0] == 200


async def test_a_prefetch_belongs_to_its_tenant(stage: Stage) -> None:
    text, later = secret(), time.time() + 600
    prompt = {"messages": [{"role": "user", "content": text}], "at": later}
    status, made = stage.call("victim", "/v1/prefetch", prompt)
    assert status == 200, made
    path = f"/v1/prefetch/{made['id']}"
    for key, headers in CLAIMS:
        status, answer = stage.call(key, path, method="DELETE", headers=headers)
        assert (status, answer["cancelled"]) == (200, False)
        sum(stage.complete(key, text, **headers))
    assert stage.call("twin", path, method="DELETE")[1]["cancelled"]


async def test_the_names_that_a_caller_sends_are_bounded(stage: Stage) -> None:
    for name in ("x" * 129, "two words"):
        for path in ("/v1/cache/clear", CHAT, "/v1/messages"):
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            sent = {} if path == "/v1/cache/clear" else body
            status, answer = stage.call("evil", path, sent, headers={"x-tenant-id": name})
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert "visible ASCII" in answer["error"]["message"]
    spaced = {"x-tenant-id": "a b"}
    status, _ = stage.call("evil", f"{RESPONSES}/resp_x", method="GET", headers=spaced)
    assert status == 400


async def test_a_restarted_frontend_has_the_same_tenant_tags(stage: Stage) -> None:
    text = secret()
    stage.complete("victim", text)
    stage.mesh.kill("frontend-0")
    stage.mesh.restart("frontend-0")
    await stage.mesh.ready()
    assert sum(stage.complete("twin", text)) > 0


FLOOD = 24


@pytest_asyncio.fixture(loop_scope="module")
async def slow(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Stage]:
    """A mesh that computes one prompt at a time while the others wait in the router."""
    mesh = locked(nats_server, tmp_path)
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0", KVMESH_ROUTER_QUEUE_THRESHOLD="0.5")
    pace = {"KVMESH_MOCK_SPEEDUP": "0.15", "KVMESH_MOCK_MAX_BATCHED_TOKENS": "2048"}
    mesh.start("worker", "worker-0", **pace)
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    yield Stage(mesh, "kvmesh-demo")
    mesh.stop()


async def test_a_tenant_that_floods_the_queue_does_not_hold_up_another(slow: Stage) -> None:
    done: list[str] = []
    threads = ThreadPoolExecutor(FLOOD + 3)
    loop = asyncio.get_running_loop()

    async def run_request(key: str, number: int) -> None:
        text = f"{key} {number}. " + "A long text that nobody has sent yet. " * 200
        own = {"x-kvmesh-fair-class": f"own{number}", "x-tenant-id": f"part{number}"}
        job = partial(slow.complete, key, text, **(own if key == "evil" else {}))
        await loop.run_in_executor(threads, job)
        done.append(key)

    flood = [asyncio.create_task(run_request("evil", number)) for number in range(FLOOD)]
    active = "kvmesh_frontend_active_requests"
    await eventually(lambda: slow.mesh.metric(active) == FLOOD - len(done))
    before = len(done)
    assert before < FLOOD // 3
    await asyncio.gather(*(run_request("victim", number) for number in range(3)))
    assert len(done) - before - 3 <= 8
    await asyncio.gather(*flood)
    threads.shutdown()
    figures = slow.mesh.metrics()

    def of(tenant: str, name: str) -> float:
        labels = f'{{model="kvmesh-demo",tenant="{tenant}"}}'
        return figures[f"kvmesh_frontend_tenant_{name}_total{labels}"]

    assert (of(EVIL, "requests"), of(VICTIM, "requests")) == (FLOOD, 3)
    assert of(EVIL, "errors") == of(VICTIM, "errors") == 0
    assert of(EVIL, "prompt_tokens") > of(VICTIM, "prompt_tokens") > 0
    assert of(EVIL, "queue_seconds") > of(VICTIM, "queue_seconds") > 0
