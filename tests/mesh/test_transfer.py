"""Moving block bytes between processes: one behaviour, over NIXL and over TCP."""

import asyncio
import importlib.util
import mmap
import os
import socket
import sys
import tracemalloc
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio
from support import lender
from support.nats import free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import Grant, Region, TransferError, Transport
from kvmesh.transfer.channel import Channel, Closed, Descriptor, Got, TransferReply, Want
from kvmesh.transfer.memory_ranges import Piece, pack
from kvmesh.transfer.nixl import NixlAgent

SIZE = 1 << 20
WHOLE = [(0, 0, SIZE)]
HAS_NIXL = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="needs the extra: pip install '.[nixl]'")


class Pair(NamedTuple):
    """An owner with something to read, and a reader with nothing yet."""

    owner: Transport
    reader: Transport
    source: Region
    target: Region

    def grant(self, *ranges: tuple[int, int], seconds: float = 30.0) -> Grant:
        return self.source.grant(ranges or [(0, SIZE)], seconds)

    async def read(self, grant: Grant, pieces: list[tuple[int, int, int]] = WHOLE) -> str:
        return await self.reader.read(grant.descriptor, self.target, pieces, timeout=PATIENCE_S)

    async def failure(self, grant: Grant, pieces: list[tuple[int, int, int]] = WHOLE) -> str:
        with pytest.raises(TransferError) as caught:
            await self.read(grant, pieces)
        return caught.value.code


@pytest.fixture(params=[pytest.param("nixl", marks=needs_nixl), "tcp"])
def via(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def pair(via: str) -> AsyncIterator[Pair]:
    options = msgspec.convert({"via": via}, TransferSettings)
    owner, reader = await Transport.open(options), await Transport.open(options)
    source, target = owner.register(bytearray(os.urandom(SIZE))), reader.register(bytearray(SIZE))
    yield Pair(owner, reader, source, target)
    await reader.close()
    await owner.close()


async def test_pieces_arrive_at_their_places_and_nowhere_else(pair: Pair, via: str) -> None:
    pieces = [(4096, 0, 100), (5000, 1000, 7), (4196, 100, 50), (SIZE - 9, SIZE - 9, 9)]
    assert await pair.read(pair.grant(), pieces) == via
    expected = bytearray(SIZE)
    for remote, local, length in pieces:
        expected[local : local + length] = pair.source.view[remote : remote + length]
    assert pair.target.view == expected


async def test_only_what_was_granted_can_be_read(pair: Pair) -> None:
    grant = pair.source.grant([(0, 4096), (8192, 4096), (4096, 1)], 30)
    assert await pair.failure(grant, [(0, 0, 4098)]) == "refused"
    assert await pair.failure(grant, [(8191, 0, 2)]) == "refused"
    assert await pair.failure(grant, [(12287, 0, 2)]) == "refused"
    assert not any(pair.target.view)
    await pair.read(grant, [(0, 0, 4097), (8192, 8192, 4096)])
    assert pair.target.view[8192:12288] == pair.source.view[8192:12288]


async def test_a_reader_gives_a_grant_back(pair: Pair) -> None:
    ends: list[str] = []
    grant = pair.source.grant([(0, SIZE)], 30, ends.append)
    await pair.reader.read(grant.descriptor, pair.target, WHOLE, 20, final=False)
    assert not ends
    await pair.read(grant)
    assert ends == ["read"]
    assert await pair.failure(grant) == "revoked"
    grant.revoke()
    assert ends == ["read"]


async def test_a_revoked_grant_can_not_be_read(pair: Pair) -> None:
    ends: list[str] = []
    grant = pair.source.grant([(0, SIZE)], 30, ends.append)
    grant.revoke()
    assert ends == ["revoked"]
    assert await pair.failure(grant) == "revoked"
    assert not any(pair.target.view)


async def test_a_grant_ends_by_itself(pair: Pair) -> None:
    ends: list[str] = []
    grant = pair.source.grant([(0, SIZE)], 0.05, ends.append)
    await eventually(lambda: ends == ["expired"])
    assert await pair.failure(grant) == "revoked"


async def test_what_is_revoked_while_it_is_read_is_not_taken_for_good(pair: Pair) -> None:
    grant = pair.grant()
    found = msgspec.msgpack.decode(grant.descriptor, type=Descriptor)
    channel = await Channel.connect(found.host, found.port)
    await channel.send(Want(found.token, pack([Piece(0, 0, SIZE)]), direct=True))
    assert (await channel.receive(TransferReply)).code is None
    grant.revoke()
    await channel.send(Got(final=True))
    assert (await channel.receive(TransferReply)).code == "revoked"
    channel.close()


async def test_not_one_byte_leaves_after_a_grant_was_revoked() -> None:
    size = 64 << 20
    owner = await Transport.open(TransferSettings(via="tcp"))
    source = owner.register(bytearray(b"a") * size)
    grant = source.grant([(0, size)], 30)
    found = msgspec.msgpack.decode(grant.descriptor, type=Descriptor)
    channel = await Channel.connect(found.host, found.port)
    await channel.send(Want(found.token, pack([Piece(0, 0, size)])))
    assert (await channel.receive(TransferReply)).code is None
    await eventually(lambda: grant.readers)
    grant.revoke()
    source.wipe(0, size)
    came = bytearray(size)
    with pytest.raises(Closed):
        await channel.receive_into(memoryview(came))
    assert set(came.rstrip(b"\0")) == {ord("a")}
    assert not came[-1]
    channel.close()
    await owner.close()


async def test_many_read_at_once(pair: Pair) -> None:
    part = SIZE // 32
    grants = [pair.grant((i * part, part)) for i in range(32)]
    reads = [pair.read(grants[i], [(i * part, i * part, part)]) for i in range(32)]
    await asyncio.gather(*reads)
    assert pair.target.view == pair.source.view


async def test_memory_can_be_used_for_something_else_once_its_region_is_closed(pair: Pair) -> None:
    memory = mmap.mmap(-1, SIZE)
    region = pair.owner.register(memory)
    grant = region.grant([(0, SIZE)], 30)
    await pair.read(grant)
    grant = region.grant([(0, SIZE)], 30)
    region.close()
    memory.close()
    assert await pair.failure(grant) == "revoked"


async def test_an_owner_that_has_gone_is_an_error(pair: Pair) -> None:
    grant = pair.grant()
    await pair.owner.close()
    assert await pair.failure(grant) == "unreachable"


@pytest.mark.parametrize(("timeout", "code"), [(0.1, "timeout"), (PATIENCE_S, "lost")])
async def test_an_owner_that_does_not_answer_is_an_error(
    pair: Pair, timeout: float, code: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host, port = deaf.getsockname()
        descriptor = msgspec.msgpack.encode(Descriptor(host, port, b"", pair.owner.direct))
        with pytest.raises(TransferError) as caught:
            await pair.reader.read(descriptor, pair.target, WHOLE, timeout)
    assert caught.value.code == code
    assert caught.value.peer == f"{host}:{port}"


async def test_an_owner_that_is_killed_in_the_middle_is_an_error(via: str) -> None:
    size = 128 << 20
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, lender.__file__, via, str(size)), stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    descriptor = bytes.fromhex((await process.stdout.readline()).decode())
    reader = await Transport.open(msgspec.convert({"via": via}, TransferSettings))
    target = reader.register(bytearray(size))
    reading = asyncio.create_task(
        reader.read(descriptor, target, [(0, 0, size)], timeout=PATIENCE_S)
    )
    await eventually(lambda: target.view[0] or reading.done())
    process.kill()
    await process.wait()
    await asyncio.wait([reading])
    error = reading.exception()
    if error is None:  # it was faster
        assert target.view[size - 1] == lender.FILLING
    else:
        assert isinstance(error, TransferError)
        assert error.code in ("lost", "failed", "unreachable")
    with pytest.raises(TransferError):
        await reader.read(descriptor, target, [(0, 0, size)], timeout=PATIENCE_S)
    await reader.close()


async def test_more_readers_than_allowed_are_told_so() -> None:
    owner = await Transport.open(TransferSettings(via="tcp", readers=1))
    grant = owner.register(bytearray(SIZE)).grant([(0, SIZE)], 30)
    found = msgspec.msgpack.decode(grant.descriptor, type=Descriptor)
    idle = await Channel.connect(found.host, found.port)
    reader = await Transport.open(TransferSettings(via="tcp"))
    target = reader.register(bytearray(SIZE))
    with pytest.raises(TransferError) as caught:
        await reader.read(grant.descriptor, target, WHOLE, timeout=5)
    assert caught.value.code == "busy"
    idle.close()
    await eventually(lambda: _reads(reader, grant, target))
    await reader.close()
    await owner.close()


async def test_a_server_survives_what_it_does_not_understand() -> None:
    owner = await Transport.open(TransferSettings(via="tcp"))
    grant = owner.register(bytearray(SIZE)).grant([(0, SIZE)], 30)
    found = msgspec.msgpack.decode(grant.descriptor, type=Descriptor)
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\3abc"):
        channel = await Channel.connect(found.host, found.port)
        await channel.send_bytes(memoryview(noise))
        channel.cut()
        channel.close()
    odd = await Channel.connect(found.host, found.port)
    await odd.send(Want(found.token, b"123"))
    assert (await odd.receive(TransferReply)).code == "refused"
    odd.close()
    reader = await Transport.open(TransferSettings(via="tcp"))
    await reader.read(grant.descriptor, reader.register(bytearray(SIZE)), WHOLE, timeout=PATIENCE_S)
    await reader.close()
    await owner.close()


async def test_strangers_take_no_memory() -> None:
    owner = await Transport.open(TransferSettings(via="tcp", readers=2))
    grant = owner.register(bytearray(SIZE)).grant([(0, SIZE)], 30)
    found = msgspec.msgpack.decode(grant.descriptor, type=Descriptor)
    length = (4 << 20).to_bytes(4, "big")
    strangers = [await Channel.connect(found.host, found.port) for _ in range(150)]
    tracemalloc.start()
    try:
        for stranger in strangers:
            with suppress(Closed):
                await stranger.send_bytes(memoryview(length))
        cut = await asyncio.gather(*map(_is_cut, strangers))
        assert sum(cut) >= len(strangers) - 2, "there are two readers at most"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    for stranger in strangers:
        stranger.close()
    large = await Channel.connect(found.host, found.port)
    with suppress(Closed):
        await large.send(Want(b"0" * 16, bytes(1 << 20)))
    assert await _is_cut(large)
    large.close()
    known = await Channel.connect(found.host, found.port)
    await known.send(Want(found.token, pack([Piece(0, 0, 16)] * 10_000)))
    assert (await known.receive(TransferReply)).code is None
    known.close()
    await owner.close()


async def _is_cut(channel: Channel) -> bool:
    try:
        async with asyncio.timeout(3):
            await channel.receive(TransferReply)
    except Closed:
        return True
    except TimeoutError:
        return False
    return False


@needs_nixl
async def test_both_sides_must_have_nixl() -> None:
    plain, rich = (
        await Transport.open(TransferSettings(via="tcp")),
        await Transport.open(TransferSettings()),
    )
    strict = await Transport.open(TransferSettings(via="nixl"))
    grant = plain.register(bytearray(b"x" * SIZE)).grant([(0, SIZE)], 30)
    target = rich.register(bytearray(SIZE))
    way = await rich.read(grant.descriptor, target, WHOLE, timeout=PATIENCE_S, final=False)
    assert way == "tcp"
    assert target.view[0] == ord("x")
    with pytest.raises(TransferError) as caught:
        await strict.read(
            grant.descriptor, strict.register(bytearray(SIZE)), WHOLE, timeout=PATIENCE_S
        )
    assert caught.value.code == "unavailable"
    for transport in (plain, rich, strict):
        await transport.close()


@needs_nixl
async def test_nixl_keeps_nothing_of_a_process_that_is_gone() -> None:
    port = free_port()
    reader = await Transport.open(TransferSettings(via="nixl"))
    target = reader.register(bytearray(SIZE))
    assert reader._agent is not None
    known = reader._agent._peers
    for number in range(3):
        owner = await Transport.open(TransferSettings(via="nixl", port=port))
        regions = [owner.register(bytearray(bytes([number, n]) * (SIZE // 2))) for n in (1, 2)]
        for region in regions:
            grant = region.grant([(0, SIZE)], 30)
            way = await reader.read(grant.descriptor, target, WHOLE, timeout=PATIENCE_S)
            assert (way, target.view) == ("nixl", region.view)
        assert len(known) == 1
        await owner.close()
    reader.forget(grant.descriptor)
    assert not known
    reader.forget(grant.descriptor)
    with pytest.raises(TransferError):
        reader.forget(b"none")
    await reader.close()


@needs_nixl
async def test_what_nixl_does_not_manage_goes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise TransferError("failed", "", "no route")

    monkeypatch.setattr(NixlAgent, "read", fail)
    owner, reader = (
        await Transport.open(TransferSettings()),
        await Transport.open(TransferSettings()),
    )
    strict = await Transport.open(TransferSettings(via="nixl"))
    grant = owner.register(bytearray(b"x" * SIZE)).grant([(0, SIZE)], 30)
    target = strict.register(bytearray(SIZE))
    with pytest.raises(TransferError, match="no route"):
        await strict.read(grant.descriptor, target, WHOLE, timeout=PATIENCE_S)
    target = reader.register(bytearray(SIZE))
    assert await reader.read(grant.descriptor, target, WHOLE, timeout=PATIENCE_S) == "tcp"
    assert target.view[SIZE - 1] == ord("x")
    for transport in (owner, reader, strict):
        await transport.close()


async def test_what_cannot_be_listened_on_is_said() -> None:
    with pytest.raises(TransferError, match="advertise"):
        await Transport.open(TransferSettings(via="tcp", host="0.0.0.0"))
    port = free_port()
    first = await Transport.open(TransferSettings(via="tcp", port=port))
    with pytest.raises(TransferError, match="cannot listen"):
        await Transport.open(TransferSettings(via="tcp", port=port))
    await first.close()


def test_a_place_outside_of_the_own_region_is_the_callers_mistake() -> None:
    async def misuse() -> None:
        transport = await Transport.open(TransferSettings(via="tcp"))
        region = transport.register(bytearray(SIZE))
        grant = region.grant([(0, SIZE)], 30)
        with pytest.raises(ValueError, match="not in a region"):
            await transport.read(grant.descriptor, region, [(0, 1, SIZE)], timeout=5)
        with pytest.raises(ValueError, match="not in a region"):
            region.grant([(1, SIZE)], 30)
        with pytest.raises(ValueError, match="writable"):
            transport.register(memoryview(b"read only"))
        with pytest.raises(TransferError, match="malformed descriptor"):
            await transport.read(b"nonsense", region, WHOLE, timeout=5)
        await transport.close()

    asyncio.run(misuse())


async def _reads(reader: Transport, grant: Grant, target: Region) -> bool:
    try:
        return await reader.read(grant.descriptor, target, WHOLE, timeout=5) == "tcp"
    except TransferError:
        return False
