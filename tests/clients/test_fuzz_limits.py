"""Overload, limits of keys and the loss of all workers, each reported in the API's own form."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from support.attack import (
    MESSAGES,
    RESPONSES,
    SHORTEST,
    Reply,
    check_error,
    drain,
    post_request,
    raw_connection,
    send,
    short_body,
    wait_until_idle,
)
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECRET = "k-concurrency"
FEW = "k-requests"
LONG = 50_000
paths = pytest.mark.parametrize("path", list(SHORTEST))


def keys() -> str:
    tables = [("one", SECRET, "concurrency = 1"), ("few", FEW, "requests_per_minute = 4")]
    return (
        "".join(
            f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'
            f"{limit}\n"
            for name, secret, limit in tables
        )
        + f'[[key]]\nname = "free"\nsha256 = "{hashlib.sha256(b"free").hexdigest()}"\n'
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """A mesh of one worker for two requests at a time, without migration."""
    folder: Path = tmp_path_factory.mktemp("narrow")
    (folder / "keys.toml").write_text(keys())
    env = {
        "KVMESH_MOCK_SPEEDUP": "1",
        "KVMESH_MOCK_OUTPUT_TOKENS": "200000",
        "KVMESH_FRONTEND_MAX_IN_FLIGHT": "2",
        "KVMESH_FRONTEND_MIGRATION_LIMIT": "0",
        "KVMESH_FRONTEND_KEYS_FILE": str(folder / "keys.toml"),
    }
    mesh = Mesh(nats_server.url, folder, env)
    try:
        mesh.start_all(workers=1)
        await mesh.ready()
        yield mesh
    finally:
        mesh.stop()


@contextmanager
def running(mesh: Mesh, path: str, key: str, count: int = 1) -> Iterator[None]:
    """`count` long streams whose first bytes have arrived."""
    if count == 0:
        yield
        return
    with raw_connection(mesh) as connection:
        body = short_body(path, LONG, stream=True)
        connection.sendall(post_request(path, body, f"Authorization: Bearer {key}"))
        assert connection.recv(12) == b"HTTP/1.1 200"
        with running(mesh, path, key, count - 1):
            yield


def post_short(mesh: Mesh, path: str, key: str) -> Reply:
    return send(mesh, path, short_body(path, 2), {"Authorization": f"Bearer {key}"})


def check_wait(path: str, reply: Reply, status: int) -> None:
    assert reply.status == status, reply
    assert int(reply.headers["retry-after"]) >= 1
    check_error(path, reply)


@paths
async def test_requests_beyond_the_server_s_limit(narrow: Mesh, path: str) -> None:
    with running(narrow, path, "free", count=2):
        reply = await asyncio.to_thread(post_short, narrow, path, "free")
    check_wait(path, reply, 529 if path == MESSAGES else 429)
    await wait_until_idle(narrow)
    assert (await asyncio.to_thread(post_short, narrow, path, "free")).status == 200


@paths
async def test_requests_beyond_a_key_s_concurrency(narrow: Mesh, path: str) -> None:
    with running(narrow, path, SECRET):
        reply = await asyncio.to_thread(post_short, narrow, path, SECRET)
        assert (await asyncio.to_thread(post_short, narrow, path, "free")).status == 200
    check_wait(path, reply, 429)
    await wait_until_idle(narrow)
    assert (await asyncio.to_thread(post_short, narrow, path, SECRET)).status == 200


async def test_requests_beyond_a_key_s_rate(narrow: Mesh) -> None:
    replies = [(p, await asyncio.to_thread(post_short, narrow, p, FEW)) for p in 2 * list(SHORTEST)]
    assert [reply.status for _, reply in replies[:4]] == [200] * 4
    for path, reply in replies[5:]:
        check_wait(path, reply, 429)


@paths
async def test_without_a_key(narrow: Mesh, path: str) -> None:
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer "}):
        reply = await asyncio.to_thread(send, narrow, path, short_body(path, 2), dict(headers))
        assert reply.status == 401
        check_error(path, reply)


@paths
async def test_the_loss_of_the_only_worker_ends_a_stream_in_its_grammar(
    narrow: Mesh, path: str
) -> None:
    with raw_connection(narrow) as connection:
        body = short_body(path, LONG, stream=True)
        request = post_request(path, body, "Authorization: Bearer free", "Connection: close")
        connection.sendall(request)
        begun = b""
        while begun.count(b"data: ") < 5:
            begun += await asyncio.to_thread(connection.recv, 1 << 16)
        narrow.kill("worker-0")
        text = (begun + await asyncio.to_thread(drain, connection)).decode()
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    check_last(path, events)
    narrow.restart("worker-0")
    await eventually(lambda: asyncio.to_thread(_served, narrow, path), what="it serves again")
    await wait_until_idle(narrow)


def check_last(path: str, events: list[str]) -> None:
    """Assert that the error is the last event, before `[DONE]` if the API has one."""
    if path == MESSAGES:
        last = json.loads(events[-1])
        assert last["type"] == "error"
        assert last["error"]["type"] in ("api_error", "overloaded_error")
    elif path == RESPONSES:
        last = json.loads(events[-1])
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"]
    else:
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["message"]


def _served(mesh: Mesh, path: str) -> bool:
    return post_short(mesh, path, "free").status == 200
