"""Reads from threads over one connection, of files and of bytes that are computed."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import Grant, Line, SendingPace, TransferError, Transport
from kvmesh.transfer.channel import Descriptor, TransferReply, encode_message
from kvmesh.transfer.transport import decode_descriptor

SIZE = 3 << 20
CONTENT = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest_asyncio.fixture
async def owner() -> AsyncIterator[Transport]:
    transport = await Transport.open(TransferSettings(via="tcp"), SendingPace(), 4)
    yield transport
    await transport.close()


def sent(offset: int, length: int) -> None:
    """A range was sent."""


def described(grant: Grant) -> Descriptor:
    return msgspec.msgpack.decode(grant.descriptor, type=Descriptor)


async def test_a_line_reads_many_ranges(owner: Transport, file: Path) -> None:
    ranges: list[tuple[int, int]] = []
    lent = owner.lend_file(file, lambda *one: ranges.append(one))
    grant = described(lent.grant([(0, SIZE)], 30))
    line = Line(grant)
    for offset, length in ((0, SIZE), (7, 100), (SIZE - 1, 1)):
        target = bytearray(length)
        await asyncio.to_thread(line.read, grant.token, offset, memoryview(target))
        assert target == CONTENT[offset : offset + length]
    assert ranges == [(0, SIZE), (7, 100), (SIZE - 1, 1)]
    with pytest.raises(TransferError) as caught:
        await asyncio.to_thread(line.read, grant.token, SIZE, memoryview(bytearray(1)))
    assert caught.value.code == "refused"
    lent.close()
    with pytest.raises(TransferError) as caught:
        await asyncio.to_thread(line.read, grant.token, 0, memoryview(bytearray(1)))
    assert caught.value.code == "revoked"
    line.close()


async def test_a_file_that_has_shrunk_ends_the_read(owner: Transport, file: Path) -> None:
    lent = owner.lend_file(file, sent)
    grant = described(lent.grant([(0, SIZE)], 30))
    os.truncate(file, 5)
    line = Line(grant)
    with pytest.raises(TransferError) as caught:
        await asyncio.to_thread(line.read, grant.token, 0, memoryview(bytearray(SIZE)))
    assert caught.value.code == "lost"
    lent.close()


async def test_computed_bytes_are_those_of_the_moment(owner: Transport) -> None:
    content = bytearray(b"before")
    view = owner.lend_view(6, lambda: bytes(content))
    grant = described(view.grant([(0, 6)], 30))
    line, target = Line(grant), bytearray(6)
    await asyncio.to_thread(line.read, grant.token, 0, memoryview(target))
    assert target == b"before"
    content[:] = b"after!"
    await asyncio.to_thread(line.read, grant.token, 0, memoryview(target))
    assert target == b"after!"
    line.close()


async def test_an_idle_line_connects_again(
    owner: Transport, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.transfer.server.MESSAGE_S", 0.2)
    grant = described(owner.lend_file(file, sent).grant([(0, SIZE)], 30))
    line = Line(grant)
    for _ in range(2):
        target = bytearray(100)
        await asyncio.to_thread(line.read, grant.token, 0, memoryview(target))
        assert target == bytes(range(100))
        await asyncio.to_thread(_until_closed, line)
    line.close()


def _until_closed(line: Line) -> None:
    """Wait until the owner has closed the connection."""
    assert line._socket is not None
    assert line._socket.recv(1) == b""


async def test_a_cut_ends_a_read_at_once(file: Path) -> None:
    slow = await Transport.open(TransferSettings(via="tcp"), SendingPace(1000))
    grant = described(slow.lend_file(file, sent).grant([(0, SIZE)], 30))
    line = Line(grant)
    reading = asyncio.create_task(
        asyncio.to_thread(line.read, grant.token, 0, memoryview(bytearray(SIZE)))
    )
    while not slow._server._pace.sent:
        await asyncio.sleep(0.01)
    line.cut()
    with pytest.raises(TransferError):
        await reading
    with pytest.raises(TransferError, match="ended"):
        await asyncio.to_thread(line.read, grant.token, 0, memoryview(bytearray(1)))
    await slow.close()


async def test_a_silent_owner_is_noticed() -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    line = Line(Descriptor("127.0.0.1", port, b"t" * 16, False), quiet_s=0.2)
    with pytest.raises(TransferError) as caught:
        await asyncio.to_thread(line.read, b"t" * 16, 0, memoryview(bytearray(1)))
    assert caught.value.code == "timeout"
    server.close()
    await server.wait_closed()
    gone = Line(Descriptor("127.0.0.1", port, b"t" * 16, False), quiet_s=0.2)
    with pytest.raises(TransferError) as caught:
        await asyncio.to_thread(gone.read, b"t" * 16, 0, memoryview(bytearray(1)))
    assert caught.value.code == "unreachable"


async def test_a_direct_read_that_was_not_asked_for_is_refused() -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.write(encode_message(TransferReply(agent="x")))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    line = Line(Descriptor("127.0.0.1", port, b"t" * 16, True))
    with pytest.raises(TransferError, match="not asked for") as caught:
        await asyncio.to_thread(line.read, b"t" * 16, 0, memoryview(bytearray(1)))
    assert caught.value.code == "failed"
    server.close()
    await server.wait_closed()


def test_a_malformed_descriptor_is_refused() -> None:
    for data in (b"", b"nonsense", b"\x94\xa2\xff\xff\x01\xc4\x01t\xc2"):  # the last: no UTF-8
        with pytest.raises(TransferError, match="malformed"):
            decode_descriptor(data)


class StubbornAgent:
    """Fails as soon as its read is cancelled."""

    def __init__(self, settled: bool) -> None:
        self._settled = settled

    async def read(self, *arguments: object) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise TransferError("failed", "peer", "NIXL", settled=self._settled)


@pytest.mark.parametrize("settled", [True, False])
async def test_a_cancelled_direct_read_fails_only_if_its_memory_is_lost(
    owner: Transport, settled: bool
) -> None:
    region = owner.register(bytearray(8))
    owner._agent = StubbornAgent(settled)  # type: ignore[assignment]
    descriptor = Descriptor("127.0.0.1", 1, b"t" * 16, True)
    read = owner.read_directly(descriptor, TransferReply(agent="x"), region, 0, 8)
    reading = asyncio.create_task(read)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError if settled else TransferError):
        await reading
    region.close()  # it was registered before there was an agent


async def test_readers_beyond_the_rate_come_back_later(file: Path) -> None:
    slow = await Transport.open(TransferSettings(via="tcp"), SendingPace(100_000))
    grant = described(slow.lend_file(file, sent).grant([(0, SIZE)], 30))
    slow._server._pace.delay(100_000, asyncio.get_running_loop().time())
    with pytest.raises(TransferError) as caught:
        await asyncio.to_thread(Line(grant).read, grant.token, 0, memoryview(bytearray(1)))
    assert caught.value.code == "busy"
    await slow.close()


async def test_a_renewed_grant_outlives_its_first_deadline(owner: Transport, file: Path) -> None:
    grant = owner.lend_file(file, sent).grant([(0, SIZE)], 0.1)
    grant.expire_in(0.4)
    ended_at = asyncio.get_running_loop().time() + 0.2
    while asyncio.get_running_loop().time() < ended_at:
        assert grant.ended is None
        await asyncio.sleep(0.02)
    grant.revoke()
    grant.expire_in(1)
    assert grant.ended == "revoked"
