"""No body, however wrong, makes a frontend fail: it is served, or refused in its API's form."""

import gzip
import json
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from support.attack import check_error, check_refused_or_served, send, short_body, wait_until_idle
from support.frontend import MODEL
from support.mesh import Mesh
from support.mutate import (
    BODIES,
    STRANGE,
    broken_bytes,
    doubled,
    nested,
    paths,
    replaced,
    wrong_values,
)
from zstandard import ZstdCompressor

IDS = [f"{path}-{index}" for index, (path, _) in enumerate(BODIES)]
each_body = pytest.mark.parametrize(("path", "body"), BODIES, ids=IDS)
bounded = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
long = settings(bounded, max_examples=5000, derandomize=False)


def attack(mesh: Mesh, path: str, body: bytes) -> None:
    check_refused_or_served(path, send(mesh, path, body))


@each_body
def test_the_examples_are_served(mesh: Mesh, path: str, body: dict[str, Any]) -> None:
    reply = send(mesh, path, json.dumps(body).encode())
    assert reply.status == 200, reply


@each_body
@bounded
@given(data=st.data())
def test_wrong_values(mesh: Mesh, path: str, body: dict[str, Any], data: DataObject) -> None:
    attack(mesh, path, data.draw(wrong_values(body)))


@each_body
@bounded
@given(data=st.data())
def test_broken_bytes(mesh: Mesh, path: str, body: dict[str, Any], data: DataObject) -> None:
    attack(mesh, path, data.draw(broken_bytes(body)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@each_body
@long
@given(data=st.data())
def test_very_many_wrong_bodies(
    mesh: Mesh, path: str, body: dict[str, Any], data: DataObject
) -> None:
    attack(mesh, path, data.draw(wrong_values(body) | broken_bytes(body)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@each_body
def test_every_strange_value_at_every_path(mesh: Mesh, path: str, body: dict[str, Any]) -> None:
    limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
    for at in paths(body):
        if at and at[-1] not in limits:
            for value in STRANGE:
                attack(mesh, path, json.dumps(replaced(body, at, value)).encode())


@each_body
def test_odd_bodies(mesh: Mesh, path: str, body: dict[str, Any]) -> None:
    key = next(key for key in body if key != "model")
    for odd in (b"", b"null", b"[]", b'"x"', b"{}", b"\x00" * 100, b"[" * 100_000):
        reply = send(mesh, path, odd)
        assert reply.status == 400, (odd[:10], reply)
        check_error(path, reply)
    for depth in (10, 500, 5000, 200_000):
        attack(mesh, path, nested(body, key, depth))
        attack(mesh, path, nested(body, "nobody_knows_this", depth))
    for second in (None, 5, body[key]):
        attack(mesh, path, doubled(body, key, second))
    attack(mesh, path, json.dumps({**body, "model": "x" * 1_000_000}).encode())


async def test_bodies_beyond_the_size_limit_are_refused(mesh: Mesh) -> None:
    schema = {"type": "object", "description": "x" * 9_000_000}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    path = "/v1/chat/completions"
    for stream in (False, True):
        whole = {**body, "response_format": form, "stream": stream}
        reply = send(mesh, path, json.dumps(whole).encode())
        assert reply.status == 413
        check_error(path, reply)
    await wait_until_idle(mesh)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_headers_that_are_not_text(mesh: Mesh, path: str) -> None:
    for name in ("x-tenant-id", "x-kvmesh-session-id", "x-kvmesh-policy", "authorization"):
        reply = send(mesh, path, short_body(path, 2), {name: b"\xff\xfe"})
        assert reply.status == 400, (name, reply)
        check_error(path, reply)
    assert send(mesh, path, short_body(path, 2), {"x-tenant-id": "Å".encode()}).status == 400


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("gzip", partial(gzip.compress, compresslevel=1)),
        ("deflate", partial(zlib.compress, level=1)),
        ("zstd", ZstdCompressor().compress),
    ],
)
def test_compressed_bodies(mesh: Mesh, coding: str, encode: Callable[[bytes], bytes]) -> None:
    path = "/v1/chat/completions"
    body = short_body(path, 2)
    coded: dict[str, str | bytes] = {"Content-Encoding": coding}
    assert send(mesh, path, encode(body), coded).status == 200
    for broken in (body, encode(body)[:-12], encode(body)[:5]):
        reply = send(mesh, path, broken, coded)
        assert reply.status == 400, reply
        check_error(path, reply)
    bomb = encode(b'{"model": "' + b"x" * (200 << 20) + b'"}')
    assert send(mesh, path, bomb, coded).status == 413
    reply = send(mesh, path, body, {"Content-Encoding": "br"})
    assert (reply.status, "zstd" in reply.headers["accept-encoding"]) == (415, True)


@pytest.mark.parametrize("name", ["%ff%fe", "%00", "a/../b", "x" * 5000, "resp_" + "a" * 5000])
def test_strange_names_in_paths(mesh: Mesh, name: str) -> None:
    for path in (f"/v1/models/{name}", f"/v1/responses/{name}", f"/{name}"):
        reply = send(mesh, path, None)
        assert reply.status == 404, reply
        check_error(path, reply)


async def test_nothing_is_left_over(mesh: Mesh) -> None:
    await wait_until_idle(mesh)
    assert send(mesh, "/health", None).status == 200
