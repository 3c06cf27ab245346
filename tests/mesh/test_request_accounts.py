"""One id of each request in every place, the access log, and the use by tenant and key."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.frontend import MODEL, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEAMS = {"ann": "red", "bob": "blue", "cid": "red"}
ASK = [{"role": "user", "content": "Tell the story of the hidden secret. " * 20}]
CHAT = {"model": MODEL, "messages": ASK, "max_tokens": 6}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "Tell it", "max_tokens": 6},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Tell it", "max_output_tokens": 6},
}


class Caller:
    """A client of the mesh with the key `ann`, if no other is given."""

    def __init__(self, mesh: Mesh, session: aiohttp.ClientSession) -> None:
        self.mesh = mesh
        self._session = session

    async def send(
        self, path: str, body: object, key: str = "ann", method: str = "POST", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers (names in lower case) and text of the answer."""
        named = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = body if isinstance(body, str | None) else json.dumps(body)
        async with self._session.request(
            method, self.mesh.url + path, data=data, headers={**named, **headers}
        ) as answer:
            found = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, found, await answer.text()

    async def logged(self, request: str) -> dict[str, Any]:
        """The line of a request in the access log."""
        found: dict[str, Any] | None = await eventually(
            partial(self._find, request), what=f"a line of {request}"
        )
        assert found is not None
        return found

    async def _find(self, request: str) -> dict[str, Any] | None:
        for line in (self.mesh.folder / "frontend-0.log").read_text().splitlines():
            if line.startswith('{"log":"access"') and request in line:
                found: dict[str, Any] = json.loads(line)
                return found
        return None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Caller]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    keys = folder / "keys.toml"
    keys.write_text("\n".join(map(_key, TEAMS)))
    env = {
        "KVMESH_FRONTEND_KEYS_FILE": str(keys),
        "KVMESH_FRONTEND_ACCESS_LOG": "json",
        "KVMESH_FRONTEND_MAX_BODY_BYTES": "100000",
        "KVMESH_MOCK_SPEEDUP": "20",
    }
    mesh = Mesh(nats_server.url, folder, env)
    mesh.start_all(workers=1)
    await mesh.ready()
    async with client_session() as session:
        yield Caller(mesh, session)
    mesh.stop()


def _key(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()
    limit = "requests_per_minute = 1" if name == "cid" else ""
    return f'[[key]]\nname = "key-{name}"\nsha256 = "{digest}"\ntenant = "{TEAMS[name]}"\n{limit}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_carries_its_id(caller: Caller, path: str, stream: bool) -> None:
    status, headers, text = await caller.send(path, {**BODIES[path], "stream": stream})
    assert status == 200
    own = headers["request-id"]
    assert headers["x-request-id"] == own
    assert f'"id":"{own}"' in text
    line = await caller.logged(own)
    assert (line["status"], line["tenant"], line["key"]) == (200, "red", "key-ann")
    assert (line["output"], line["model"], line["attempts"]) == (6, MODEL, 1)
    assert line["worker"].startswith("worker-0-")
    assert 0 < line["ttft"] <= line["total"]
    explained = await caller.mesh.command("explain", own)
    assert f"{own}: length on worker-0-" in explained.stdout


FAILURES: list[tuple[int, str, object, dict[str, str]]] = [
    (400, "/v1/messages", {**CHAT, "max_tokens": 0}, {}),
    (400, "/v1/chat/completions", "{", {}),
    (401, "/v1/messages", CHAT, {"key": "nobody"}),
    (401, "/v1/chat/completions", CHAT, {"key": "nobody"}),
    (404, "/v1/messages", {**CHAT, "model": "other"}, {}),
    (404, "/v1/nothing", CHAT, {}),
    (413, "/v1/messages", {**CHAT, "system": "x" * 200_000}, {}),
    (503, "/v1/messages", {**CHAT, "nvext": {"routing_constraints": {"labels": {"a": "b"}}}}, {}),
]


@pytest.mark.parametrize(("status", "path", "body", "other"), FAILURES)
async def test_an_error_carries_its_id(
    caller: Caller, status: int, path: str, body: object, other: dict[str, str]
) -> None:
    found, headers, text = await caller.send(path, body, **other)
    assert found == status, text
    own = headers["request-id"]
    assert headers["x-request-id"] == own
    assert re.fullmatch("(msg_|chatcmpl-|req_)[0-9a-f]{24}", own)
    if path == "/v1/messages":
        assert json.loads(text)["request_id"] == own
    line = await caller.logged(own)
    assert line["status"] == status
    assert line.get("key", "") == ("" if other else "key-ann")


async def test_a_limit_s_error_carries_its_id(caller: Caller) -> None:
    answers = [await caller.send("/v1/messages", CHAT, "cid") for _ in range(3)]
    status, headers, text = answers[-1]
    assert status == 429
    assert json.loads(text)["request_id"] == headers["request-id"]
    assert (await caller.logged(headers["request-id"]))["key"] == "key-cid"


async def test_a_malformed_request_gets_an_id(caller: Caller) -> None:
    host, port = caller.mesh.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    assert re.search(r"\r\nrequest-id: req_[0-9a-f]{24}\r\n", answer)


async def test_a_client_s_own_id_is_kept_beside(caller: Caller) -> None:
    mine = "trace/4bf92f35"
    status, headers, text = await caller.send(
        "/v1/messages", CHAT, **{"X-Request-Id": mine, "x-kvmesh-session-id": "s 1"}
    )
    own = json.loads(text)["id"]
    assert (status, headers["x-request-id"], headers["request-id"]) == (200, mine, own)
    line = await caller.logged(own)
    assert (line["client"], line["session"]) == (mine, "s 1")
    explained = await caller.mesh.command("explain", mine)
    assert f"{own}: length on worker-0-" in explained.stdout


async def test_no_text_and_no_secret_is_logged(caller: Caller) -> None:
    _, headers, _ = await caller.send("/v1/messages?key=hidden-query", CHAT, "bob")
    await caller.logged(headers["request-id"])
    log = (caller.mesh.folder / "frontend-0.log").read_text()
    for hidden in ("hidden", "Bearer", hashlib.sha256(b"bob").hexdigest()):
        assert hidden not in log


async def _use(caller: Caller, by: str) -> tuple[dict[str, Any], dict[str, Any]]:
    done = await caller.mesh.command("usage", "--by", by, "--json", "--since", "1h")
    report = json.loads(done.stdout)
    return {"/".join(row["group"].values()): row["use"] for row in report["rows"]}, report["total"]


async def test_use_adds_up_by_tenant_key_and_session(caller: Caller) -> None:
    several = {**CHAT, "n": 3, "max_tokens": 40}
    before, _ = await _use(caller, "tenant,key")
    _, headers, text = await caller.send(
        "/v1/chat/completions", several, "bob", **{"x-kvmesh-session-id": "counted"}
    )
    told = json.loads(text)["usage"]

    async def counted() -> dict[str, Any] | None:
        return (await _use(caller, "session"))[0].get("counted")

    use = await eventually(counted, what="the outcome is in the stream")
    assert use is not None
    assert (use["requests"], use["failed"]) == (1, 0)
    assert use["prompt_tokens"] == told["prompt_tokens"]
    assert use["cached_tokens"] == told["prompt_tokens_details"]["cached_tokens"]
    assert use["output_tokens"] == told["completion_tokens"] == 120
    line = await caller.logged(headers["request-id"])
    assert 0 < use["device_s"] <= line["total"]
    after, total = await _use(caller, "tenant,key")
    blue = after["blue/key-bob"]
    assert blue["requests"] == before.get("blue/key-bob", {"requests": 0})["requests"] + 1
    for name, value in total.items():
        assert sum(each[name] for each in after.values()) == pytest.approx(value)


async def test_the_slowest_requests_are_found(caller: Caller) -> None:
    _, headers, _ = await caller.send("/v1/chat/completions", {**CHAT, "max_tokens": 300})
    own = headers["request-id"]

    async def listed() -> list[dict[str, Any]] | None:
        done = await caller.mesh.command("explain", "--slow", "--json", "--limit", "100")
        rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        return rows if any(row["request"] == own for row in rows) else None

    rows = await eventually(listed, what="a request of 300 tokens is listed")
    assert rows is not None
    totals = [row["total_s"] for row in rows]
    assert totals == sorted(totals, reverse=True)
    found = next(row for row in rows if row["request"] == own)
    assert found["decode_s"] > found["prefill_s"] > 0
    assert found["engine_wait_s"] is not None
