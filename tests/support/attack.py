"""Attacks on a frontend: any request over a raw connection, and the invariants afterwards."""

import http.client
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socket import SHUT_WR, create_connection, socket

import msgspec

from support.frontend import MODEL
from support.mesh import Mesh
from support.wait import PATIENCE_S, eventually

JSON_HEADERS = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
# the shortest request of each generating API, without its limit of tokens
SHORTEST: dict[str, dict[str, object]] = {
    CHAT: {"model": MODEL, "messages": HI},
    COMPLETIONS: {"model": MODEL, "prompt": "Hi"},
    MESSAGES: {"model": MODEL, "messages": HI},
    RESPONSES: {"model": MODEL, "input": "Hi", "store": False},
}


@dataclass(frozen=True)
class Reply:
    """A complete HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, object]:
        return msgspec.json.decode(self.body, type=dict[str, object])


def short_body(path: str, tokens: int, stream: bool = False) -> bytes:
    """A valid body for a generating endpoint that requests `tokens` tokens."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return json.dumps({**SHORTEST[path], limit: tokens, "stream": stream}).encode()


def send(
    mesh: Mesh, path: str, body: bytes | None, headers: dict[str, str | bytes] | None = None
) -> Reply:
    """POST `body`, or GET without one; raises TimeoutError on a hang."""
    connection = http.client.HTTPConnection("127.0.0.1", mesh.port, timeout=PATIENCE_S)
    try:
        connection.putrequest("GET" if body is None else "POST", path)
        for name, value in {**JSON_HEADERS, **(headers or {})}.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, found, answer.read())
    finally:
        connection.close()


def check_error(path: str, reply: Reply) -> None:
    """Assert that an error has the form that clients of its API parse."""
    answer = reply.json()
    if path == "/v2/rerank":
        assert {key: type(value) for key, value in answer.items()} == {"id": str, "message": str}
        return
    error = answer["error"]
    assert isinstance(error, dict), answer
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    if path.startswith(MESSAGES):
        assert answer["type"] == "error"
        assert isinstance(answer["request_id"], str)
    else:
        assert set(error) == {"message", "type", "param", "code"}


def check_refused_or_served(path: str, reply: Reply) -> None:
    """Assert that the reply is a response, or an error that names the caller's mistake."""
    assert reply.status < 500, (path, reply)
    if reply.status >= 400:
        check_error(path, reply)
    elif not reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.json()


async def wait_until_idle(mesh: Mesh, timeout: float = PATIENCE_S) -> None:
    """Wait until no process of the mesh holds state of any request."""
    for name in (
        "kvmesh_frontend_active_requests",
        "kvmesh_worker_running_requests",
        "kvmesh_worker_waiting_requests",
    ):
        await eventually(lambda n=name: mesh.metric(n) == 0, timeout, name)


@contextmanager
def raw_connection(
    mesh: Mesh, timeout: float = PATIENCE_S, receive_buffer: int = 0
) -> Iterator[socket]:
    """A TCP connection with at most `receive_buffer` bytes of kernel buffer on this side."""
    with create_connection(("127.0.0.1", mesh.port), timeout=timeout) as connection:
        yield connection


def head(path: str, length: int | None = None, *lines: str) -> bytes:
    """The request line and headers of a POST."""
    sized = [] if length is None else [f"Content-Length: {length}"]
    text = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *sized,
        *lines,
    ]
    return ("\r\n".join(text) + "\r\n\r\n").encode()


def post_request(path: str, body: bytes, *lines: str) -> bytes:
    return head(path, len(body), *lines) + body


def drain(connection: socket) -> bytes:
    """Read until the server closes; raises TimeoutError if it never does."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def half_close(connection: socket) -> None:
    connection.shutdown(SHUT_WR)


@dataclass(frozen=True)
class Footprint:
    """Resources of a process: open file descriptors and resident memory in bytes."""

    files: int
    memory: int


def footprint(mesh: Mesh, name: str = "frontend-0") -> Footprint:
    pid = mesh.processes[name].pid
    with open(f"/proc/{pid}/statm") as file:
        pages = int(file.read().split()[1])
    return Footprint(len(os.listdir(f"/proc/{pid}/fd")), pages * resource.getpagesize())
