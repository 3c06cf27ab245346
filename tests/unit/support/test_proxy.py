"""The proxy between a process and its server: delay, throttling, partition and cuts."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio
from support.proxy import Proxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)
    writer.close()


@pytest_asyncio.fixture
async def proxy() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    proxy.start()
    yield proxy
    await asyncio.to_thread(proxy.stop)
    server.close()


@pytest_asyncio.fixture
async def connect(proxy: Proxy) -> AsyncIterator[Connect]:
    """Opens connections through the proxy."""
    opened: list[Streams] = []

    async def connect() -> Streams:
        opened.append(await asyncio.open_connection("127.0.0.1", proxy.port))
        return opened[-1]

    yield connect
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _echoed(streams: Streams, data: bytes) -> bytes:
    reader, writer = streams
    writer.write(data)
    return await reader.readexactly(len(data))


async def test_what_is_sent_comes_back_whole(connect: Connect) -> None:
    streams = await connect()
    data = bytes(range(256)) * 4096
    assert await _echoed(streams, data) == data


async def test_every_packet_is_delayed_on_both_ways(proxy: Proxy, connect: Connect) -> None:
    streams = await connect()
    proxy.delay_s = 0.1
    started = time.monotonic()
    assert await _echoed(streams, b"slow") == b"slow"
    assert time.monotonic() - started >= 0.2


async def test_packets_are_not_delayed_behind_each_other(proxy: Proxy, connect: Connect) -> None:
    reader, writer = await connect()
    proxy.delay_s = 1.0
    started = time.monotonic()
    for _ in range(50):
        writer.write(b"x")
        await asyncio.sleep(0.001)
    await reader.readexactly(50)
    assert 2.0 <= time.monotonic() - started < 50.0


async def test_a_throttle_slows_a_connection(proxy: Proxy, connect: Connect) -> None:
    streams = await connect()
    proxy.bytes_per_s = 10_000
    started = time.monotonic()
    await _echoed(streams, b"x" * 1000)
    await _echoed(streams, b"x")
    assert time.monotonic() - started >= 0.1


async def test_what_is_held_passes_when_it_is_released(proxy: Proxy, connect: Connect) -> None:
    streams = await connect()
    proxy.hold()
    echo = asyncio.create_task(_echoed(streams, b"held"))
    later = await connect()
    assert not (await asyncio.wait([echo], timeout=0.05))[0]
    proxy.release()
    assert await echo == b"held"
    assert await _echoed(later, b"new") == b"new"


async def test_a_cut_connection_ends_and_another_is_taken(proxy: Proxy, connect: Connect) -> None:
    reader, _ = streams = await connect()
    await _echoed(streams, b"x")
    await asyncio.to_thread(proxy.cut)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    assert await _echoed(await connect(), b"again") == b"again"
