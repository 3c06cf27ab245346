"""Clients that misuse the connection cost bounded time and memory, and leave no state."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.attack import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    SHORTEST,
    drain,
    footprint,
    half_close,
    head,
    post_request,
    raw_connection,
    send,
    short_body,
    wait_until_idle,
)
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS = {
    "KVMESH_MOCK_SPEEDUP": "20",
    "KVMESH_MOCK_OUTPUT_TOKENS": "200000",
    "KVMESH_FRONTEND_BODY_TIMEOUT_S": "1",
    "KVMESH_FRONTEND_IDLE_TIMEOUT_S": "2",
    "KVMESH_FRONTEND_SLOW_READER_S": "1",
    "KVMESH_FRONTEND_KEEPALIVE_S": "0.5",
}
LONG = 20_000
paths = pytest.mark.parametrize("path", list(SHORTEST))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    """A mesh with short timeouts."""
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("strict"), SETTINGS)
    try:
        mesh.start_all(workers=2)
        await mesh.ready()
        yield mesh
    finally:
        mesh.stop()


async def check_healthy(mesh: Mesh) -> None:
    """Assert that the mesh serves and holds no state of any request."""
    await wait_until_idle(mesh)
    reply = await asyncio.to_thread(send, mesh, CHAT, short_body(CHAT, 2))
    assert reply.status == 200


async def closed_by_server(connection: socket.socket) -> bytes:
    return await asyncio.to_thread(drain, connection)


@pytest.mark.parametrize(
    "sent_before",
    [b"", b"POST /v1/chat", b"POST / HTTP/1.1\r\nHost: x\r\nx-a", b"\r\n" * 10, b"\x16\x03\x01"],
)
async def test_endless_headers_are_cut(strict: Mesh, sent_before: bytes) -> None:
    with raw_connection(strict) as connection:
        connection.sendall(sent_before)
        await closed_by_server(connection)
    await check_healthy(strict)


@paths
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_sees_the_end(strict: Mesh, path: str, stream: bool) -> None:
    """An answer without a length ends with its connection, even one to be kept alive."""
    request = post_request(path, short_body(path, 2, stream), "Connection: keep-alive")
    following = b"GET /live HTTP/1.0\r\nHost: localhost\r\n\r\n"
    with raw_connection(strict) as connection:
        connection.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0") + following)
        answer = await closed_by_server(connection)
    assert answer.startswith(b"HTTP/1.0 200")
    assert (b"Content-Length" in answer.partition(b"\r\n\r\n")[0]) is not stream
    assert (b'"live"' in answer) is not stream


async def test_trickling_headers_are_cut(strict: Mesh) -> None:
    """Arriving bytes do not extend the time limit of the headers."""
    with raw_connection(strict) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nx-slow: ")
        connection.setblocking(False)
        await asyncio.wait_for(_trickle(connection, b"a"), PATIENCE_S)
    await check_healthy(strict)


async def _trickle(connection: socket.socket, byte: bytes) -> None:
    loop = asyncio.get_running_loop()
    closed = asyncio.ensure_future(loop.sock_recv(connection, 1 << 16))
    try:
        while not closed.done():
            await loop.sock_sendall(connection, byte)
            await asyncio.wait([closed], timeout=0.1)
    except ConnectionError:
        pass
    finally:
        closed.cancel()


@paths
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_trickling_body_is_refused(strict: Mesh, path: str, chunked: bool) -> None:
    coding = ["Transfer-Encoding: chunked"] if chunked else ["Content-Length: 1000"]
    with raw_connection(strict) as connection:
        connection.sendall(head(path, None, *coding))
        for _ in range(3):
            connection.sendall(b"1\r\n{\r\n" if chunked else b"{")
        answer = await asyncio.to_thread(connection.recv, 1 << 16)
        assert answer.startswith(b"HTTP/1.1 400"), answer
    await check_healthy(strict)


async def test_an_endless_chunked_body_is_cut_at_the_limit(strict: Mesh) -> None:
    before = footprint(strict).memory
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"

    def send_endless_body() -> bytes:
        with raw_connection(strict) as connection:
            connection.sendall(head(CHAT, None, "Transfer-Encoding: chunked"))
            try:
                for _ in range(200):
                    connection.sendall(chunk)
            except OSError:
                pass
            return drain(connection)

    answer = await asyncio.to_thread(send_endless_body)
    assert not answer or answer[9:12] in (b"413", b"400"), answer
    assert footprint(strict).memory - before < 256 << 20
    await check_healthy(strict)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nx-a: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"x-a: b\r\n" * 50_000 + b"\r\n",
        b"GET /live HTTP/9.9\r\nHost: x\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=range(8),
)
async def test_malformed_requests_are_refused(strict: Mesh, request_bytes: bytes) -> None:
    with raw_connection(strict) as connection:
        try:
            connection.sendall(request_bytes)
            half_close(connection)
        except OSError:  # the server has closed the connection already
            return
        answer = await closed_by_server(connection)
    assert not answer or answer[9:10] == b"4", answer[:200]
    if answer:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert "Traceback" not in strict.logs()
    await check_healthy(strict)


@paths
async def test_pipelined_requests_are_answered_in_turn(strict: Mesh, path: str) -> None:
    count = 100
    one = post_request(path, short_body(path, 2))
    last = post_request(path, short_body(path, 2), "Connection: close")
    with raw_connection(strict) as connection:
        await asyncio.to_thread(connection.sendall, one * (count - 1) + last)
        answer = await closed_by_server(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == count
    await check_healthy(strict)


@paths
async def test_a_half_closed_client_is_answered(strict: Mesh, path: str) -> None:
    with raw_connection(strict) as connection:
        connection.sendall(
            post_request(path, short_body(path, 4, stream=True), "Connection: close")
        )
        half_close(connection)
        answer = await closed_by_server(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    await check_healthy(strict)


@paths
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_at_any_moment_frees_everything(
    strict: Mesh, path: str, stream: bool
) -> None:
    rng = random.Random(1)
    request = post_request(path, short_body(path, LONG, stream=stream))

    async def abandon() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", strict.port)
        sent = rng.choice([len(request), len(request), rng.randrange(len(request))])
        writer.write(request[:sent])
        try:
            async with asyncio.timeout(rng.random() / 2):
                await reader.readexactly(rng.randrange(1, 20_000))
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
        writer.transport.abort() if rng.random() < 0.5 else writer.close()

    await asyncio.gather(*(abandon() for _ in range(40)))
    await check_healthy(strict)


@pytest.mark.parametrize(
    ("path", "details"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 20}),
        (COMPLETIONS, {"logprobs": 20}),
        (RESPONSES, {"top_logprobs": 20}),
    ],
)
async def test_a_slow_reader_is_paused_and_then_cut(
    strict: Mesh, path: str, details: dict[str, object]
) -> None:
    """Probabilities make a stream large enough to fill what the kernels hold."""
    body = json.loads(short_body(path, LONG, stream=True))
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", strict.port))
    with connection:
        connection.sendall(post_request(path, json.dumps({**body, **details}).encode()))
        name = "kvmesh_frontend_active_requests"
        await eventually(lambda: strict.metric(name) == 1, what="it is served")
        await wait_until_idle(strict)
    assert "disconnecting a client that has not read" in strict.logs()
    await check_healthy(strict)


async def test_a_request_with_expect_waits_for_100_continue(strict: Mesh) -> None:
    body = short_body(MESSAGES, 2)
    with raw_connection(strict) as connection:
        connection.sendall(head(MESSAGES, len(body), "Expect: 100-continue"))
        assert (await asyncio.to_thread(connection.recv, 100)).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert (await asyncio.to_thread(connection.recv, 100)).startswith(b"HTTP/1.1 200")
    await check_healthy(strict)


async def test_no_connection_is_left_open(strict: Mesh) -> None:
    """The server's timeouts close connections that clients abandoned."""
    before = footprint(strict).files
    sockets = [socket.create_connection(("127.0.0.1", strict.port)) for _ in range(200)]
    for connection in sockets:
        connection.sendall(post_request(RESPONSES, short_body(RESPONSES, 1)))
    await asyncio.gather(*(closed_by_server(connection) for connection in sockets))
    await eventually(lambda: footprint(strict).files <= before + 8)
    for connection in sockets:
        connection.close()
    await check_healthy(strict)
