"""Bodies that are refused: nothing of them is decoded, and what still comes is not received."""

import asyncio
import contextlib
import gzip
import itertools
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zstandard
from aiohttp import compression_utils
from support.attack import Reply, check_error
from support.http_app import HttpApp, http_app

from kvmesh.frontend.http.intake import codings
from kvmesh.runtime.http import connection

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "secret"
LIMIT = 1 << 20
DECODED = 64 << 20
ZEROS = b" " * DECODED
PLAIN = b'{"model": "none", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}'


def raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 1),
    "x-gzip": lambda data: gzip.compress(data, 1),
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "zstd": zstandard.ZstdCompressor().compress,
}
UNSUPPORTED = ("br", "compress", "gzip, gzip", "gzip, zstd", "aes128gcm", "*")
BOMBS = {coding: encode(ZEROS) for coding, encode in CODERS.items()}
BOMBS |= dict.fromkeys(UNSUPPORTED, BOMBS["gzip"])
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses/x", "/health", "/", "/nowhere")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpApp]:
    async with http_app(tmp_path_factory.mktemp("open"), max_body_bytes=LIMIT) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpApp]:
    async with http_app(tmp_path_factory.mktemp("locked"), KEY, max_body_bytes=LIMIT) as served:
        yield served


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all that is decoded from now on."""
    sizes: list[int] = []
    make = codings._decoder

    class Counting:
        def __init__(self, decoder: codings.Decoder) -> None:
            self._decoder = decoder

        def __getattr__(self, name: str) -> Any:
            return getattr(self._decoder, name)

        def decompress(self, data: bytes) -> bytes:
            part = self._decoder.decompress(data)
            sizes.append(len(part))
            return part

    def counting(coding: str, body: bytes) -> tuple[Any, int]:
        decoder, size = make(coding, body)
        return Counting(decoder), size

    def never(*_: Any, **__: Any) -> bytes:
        raise AssertionError("decoded by the HTTP library, on the event loop")

    monkeypatch.setattr(codings, "_decoder", counting)
    for name in ("ZLibDecompressor", "BrotliDecompressor", "ZSTDDecompressor"):
        monkeypatch.setattr(getattr(compression_utils, name), "decompress_sync", never)
    return sizes


async def exchange(
    app: HttpApp, path: str, body: bytes, *lines: str, chunked: bool = False, method: str = "POST"
) -> tuple[Reply, bool]:
    """The reply to a request of which all is sent first, and whether the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", framing, *lines, "", ""]
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    try:
        writer.write("\r\n".join(head).encode() + body)
        await writer.drain()
        reply = await read_reply(reader)
        return reply, reply.headers.get("connection") == "close" and await reader.read() == b""
    finally:
        writer.close()


async def send_until_reset(writer: asyncio.StreamWriter, part: bytes) -> int:
    """Send the same bytes until the server resets the connection; returns how many."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 1 << 30:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
            sent += len(part)
    return sent


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Reply(int(head[0].split()[1]), headers, body)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("coding", BOMBS)
async def test_nothing_of_a_body_without_a_key_is_decoded(
    locked: HttpApp, decoded: list[int], coding: str, chunked: bool
) -> None:
    for path, bad in itertools.product(PATHS, ([], ["Authorization: Bearer bad"])):
        line = f"Content-Encoding: {coding}"
        reply, _ = await exchange(locked, path, BOMBS[coding], line, *bad, chunked=chunked)
        assert reply.status == (405 if path in ("/", "/health") else 401)
        check_error(path, reply)
    assert decoded == []


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("coding", BOMBS)
async def test_a_body_is_decoded_up_to_the_limit_where_it_is_read(
    app: HttpApp, locked: HttpApp, decoded: list[int], coding: str, chunked: bool
) -> None:
    for served, path in itertools.product((app, locked), PATHS):
        lines = f"Content-Encoding: {coding}", f"Authorization: Bearer {KEY}"
        reply, _ = await exchange(served, path, BOMBS[coding], *lines, chunked=chunked)
        check_error(path, reply)
        if path in PATHS[:2]:
            assert reply.status == (415 if coding in UNSUPPORTED else 413)
            assert (sum(decoded) > LIMIT) == (coding not in UNSUPPORTED)
            assert sum(decoded) < LIMIT + (4 << 20)
            assert len(decoded) < 2 + (sum(decoded) + len(BOMBS[coding])) // 64
        else:
            assert reply.status in (404, 405)
            assert decoded == []
        decoded.clear()


@pytest.mark.parametrize("coding", UNSUPPORTED)
async def test_an_unknown_coding_is_answered_by_those_that_are_known(
    app: HttpApp, coding: str
) -> None:
    for path in PATHS[:2]:
        reply, _ = await exchange(app, path, PLAIN, f"Content-Encoding: {coding}")
        assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")
        check_error(path, reply)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("coding", [*CODERS, "identity", "GZIP", "gzip, identity"])
async def test_a_coded_body_is_read(app: HttpApp, coding: str, chunked: bool) -> None:
    name = coding.partition(",")[0].lower() if coding not in CODERS else coding
    for data in (PLAIN, b"\xef\xbb\xbf" + PLAIN, PLAIN.replace(b"Hi", b"Hi " * 100_000)):
        body = CODERS.get(name, bytes)(data)
        line = f"Content-Encoding: {coding}"
        reply, closed = await exchange(app, PATHS[0], body, line, chunked=chunked)
        error: Any = reply.json()["error"]
        assert (reply.status, error["code"], closed) == (404, "model_not_found", False)


def skipped(data: bytes) -> bytes:
    """A frame of zstd that has no content."""
    return struct.pack("<II", 0x184D2A50, len(data)) + data


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_body_of_several_members_is_read(app: HttpApp, coding: str, empty: bool) -> None:
    """As tools write it that compress in parallel, or append."""
    encode, between = CODERS[coding], b""
    if empty:
        between = gzip.compress(b"") if coding == "gzip" else skipped(b"note" * 500)
    for size in (1, 40, 7_000, 100_000):
        data = PLAIN.replace(b"Hi", b"Hi " * size)
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        body = between.join([b"", *map(encode, pieces), b""])
        reply, _ = await exchange(app, PATHS[0], body, f"Content-Encoding: {coding}")
        error: Any = reply.json()["error"]
        assert (reply.status, error["code"]) == (404, "model_not_found")


async def test_members_are_bounded(app: HttpApp, decoded: list[int]) -> None:
    """Their decoders cost more than what they decode."""
    for coding in ("gzip", "zstd"):
        body = CODERS[coding](b" ") * 30_000
        reply, _ = await exchange(app, PATHS[0], body, f"Content-Encoding: {coding}")
        assert reply.status == 400
        assert b"goes on" in reply.body
        assert len(decoded) <= codings.MAX_MEMBERS
        decoded.clear()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("coding", CODERS)
async def test_a_malformed_coded_body_is_refused_in_a_sentence(
    app: HttpApp, coding: str, chunked: bool
) -> None:
    whole = CODERS[coding](PLAIN)
    flipped = whole[:-9] + bytes([whole[-9] ^ 255]) + whole[-8:]
    for bad in (PLAIN, b"", whole[:-1], whole[:5], whole + b"x", whole + whole, flipped):
        line = f"Content-Encoding: {coding}"
        reply, _ = await exchange(app, PATHS[0], bad, line, chunked=chunked)
        check_error(PATHS[0], reply)
        assert reply.status == 400, bad
        for hint in (b"install", b"zlib", b"Error", b"backports", b"decompress"):
            assert hint not in reply.body


# --- the connection ---


async def test_a_client_that_sends_all_before_it_reads_sees_its_refusal(locked: HttpApp) -> None:
    """A reset would lose the answer."""
    body = b"x" * (16 << 20)
    for path, chunked in itertools.product(PATHS, (False, True)):
        reply, closed = await exchange(locked, path, body, chunked=chunked)
        assert reply.status in (401, 405)
        assert closed


@pytest.mark.parametrize("authorized", [False, True])
async def test_a_body_that_is_too_large_is_not_received(locked: HttpApp, authorized: bool) -> None:
    """It is refused before a byte of it arrives, and the rest is bounded."""
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    lines = [f"Content-Length: {1 << 40}", *([f"Authorization: Bearer {KEY}"] * authorized)]
    head = [f"POST {PATHS[0]} HTTP/1.1", "Host: localhost", *lines, "", ""]
    writer.write("\r\n".join(head).encode())
    reply = await read_reply(reader)
    assert reply.status == (413 if authorized else 401)
    assert reply.headers["connection"] == "close"
    sent = await send_until_reset(writer, b"x" * (1 << 20))
    assert sent < connection.MAX_DISCARDED + (16 << 20)
    writer.close()


async def test_a_client_that_never_ends_its_body_is_disconnected(
    locked: HttpApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DISCARD_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    chunked = "Transfer-Encoding: chunked"
    writer.write(f"POST {PATHS[0]} HTTP/1.1\r\nHost: localhost\r\n{chunked}\r\n\r\n".encode())
    assert (await read_reply(reader)).status == 401
    assert await reader.read() == b""
    await send_until_reset(writer, b"1\r\nx\r\n")
    writer.close()


async def test_a_small_body_that_nobody_reads_leaves_the_connection_open(locked: HttpApp) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    for path in (*PATHS, *PATHS):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40000\r\n\r\n"
        writer.write(head.encode())
        reply = await read_reply(reader)
        assert reply.status in (401, 405)
        assert "connection" not in reply.headers
        writer.write(b"x" * 40_000)
    writer.close()


async def test_a_frontend_that_stops_says_that_it_closes_the_connection(tmp_path: Path) -> None:
    async with http_app(tmp_path) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        for stops in (False, True):
            if stops:
                app.stopping.set()
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            reply = await read_reply(reader)
            assert reply.headers.get("connection") == ("close" if stops else None)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("key", "length", "status"), [("bad", 100, 401), (KEY, 2 * LIMIT, 413), (KEY, 100, 404)]
)
async def test_a_client_that_asks_before_it_sends_is_asked_for_bodies_that_are_read(
    locked: HttpApp, key: str, length: int, status: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    lines = [f"Authorization: Bearer {key}", f"Content-Length: {length}", "Expect: 100-continue"]
    head = [f"POST {PATHS[0]} HTTP/1.1", "Host: localhost", *lines, "", ""]
    writer.write("\r\n".join(head).encode())
    if status == 404:
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(PLAIN + b" " * (length - len(PLAIN)))
    reply = await read_reply(reader)
    assert reply.status == status
    assert (reply.headers.get("connection") == "close") == (status != 404)
    writer.close()
