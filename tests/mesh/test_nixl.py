"""NIXL itself, as it is installed: the behaviour that transfers rely on, or work around."""

import asyncio
import ctypes
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.wait import PATIENCE_S

from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import TransferError, Transport
from kvmesh.transfer.channel import TransferReply
from kvmesh.transfer.memory_ranges import Piece

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="needs the extra: pip install '.[nixl]'"
)
SIZE = 4096


class Agents:
    """An owner and a reader with memory of two regions each, over one backend."""

    def __init__(self, backend: str = "UCX") -> None:
        self.api = importlib.import_module("nixl._api")
        self.backend = backend
        self.owner, self.reader = self._agent("owner"), self._agent("reader")
        self._kept = [ctypes.create_string_buffer(bytes([mark]) * SIZE, SIZE) for mark in (1, 2, 3)]
        self.one, self.other, self.into = map(ctypes.addressof, self._kept)
        self.reader.register_memory([(self.into, SIZE, 0, "")], "DRAM")

    def _agent(self, name: str) -> Any:
        threads = self.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = self.api.nixl_agent_config(
            backends=[self.backend], enable_prog_thread=False, sync_mode=threads
        )
        return self.api.nixl_agent(name, config)

    def prepared(self, address: int, message: bytes = b"") -> Any:
        here = self.reader.get_xfer_descs([(self.into, SIZE, 0)], "DRAM")
        there = self.reader.get_xfer_descs([(address, SIZE, 0)], "DRAM")
        return self.reader.initialize_xfer("READ", here, there, "owner", message)

    def post(self, handle: Any, message: bytes = b"") -> str:
        """The last state of a transfer."""
        self.reader.transfer(handle, message)
        ends = time.monotonic() + PATIENCE_S
        while (state := self.reader.check_xfer_state(handle)) == "PROC" and time.monotonic() < ends:
            self.owner.get_new_notifs()
        return str(state)

    def message(self) -> bytes:
        """The next message that has reached the owner."""
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            if found := self.owner.get_new_notifs():
                [message] = found["reader"]
                return bytes(message)
        raise AssertionError("no message")

    def load(self) -> None:
        self.reader.add_remote_agent(self.owner.get_agent_metadata())


@pytest.fixture
def agents() -> Agents:
    return Agents()


def test_later_metadata_takes_no_region_away(agents: Agents) -> None:
    lent = agents.owner.register_memory([(agents.one, SIZE, 0, "")], "DRAM")
    agents.load()
    assert agents.post(agents.prepared(agents.one)) == "DONE"
    agents.owner.deregister_memory(lent)
    agents.owner.register_memory([(agents.other, SIZE, 0, "")], "DRAM")
    agents.load()
    stale = agents.prepared(agents.one)  # no error: the reader knows it still
    agents.reader.release_xfer_handle(stale)
    agents.reader.remove_remote_agent("owner")
    agents.load()
    with pytest.raises(Exception, match="NOT_FOUND"):
        agents.prepared(agents.one)
    assert agents.post(agents.prepared(agents.other)) == "DONE"


def test_a_transfer_that_is_posted_again_keeps_the_last_message(agents: Agents) -> None:
    agents.owner.register_memory([(agents.one, SIZE, 0, "")], "DRAM")
    agents.load()
    handle = agents.prepared(agents.one, b"first")
    for message, arrived in ((b"", b"first"), (b"second", b"second"), (b"", b"second")):
        assert agents.post(handle, message) == "DONE"
        assert agents.message() == arrived


@pytest.mark.parametrize("message", [b"", b"done"])
def test_a_file_transfer_cannot_carry_a_message(tmp_path: Path, message: bytes) -> None:
    agents = Agents("POSIX")
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(file, SIZE)
    agents.reader.register_memory([(0, SIZE, file, "")], "FILE")
    here = agents.reader.get_xfer_descs([(agents.into, SIZE, 0)], "DRAM")
    there = agents.reader.get_xfer_descs([(0, SIZE, file)], "FILE")
    try:
        handle = agents.reader.initialize_xfer("WRITE", here, there, "reader", message)
        state = agents.reader.transfer(handle)
        while state == "PROC":
            state = agents.reader.check_xfer_state(handle)
    except Exception as error:
        state = str(error)
    assert (state == "DONE") is (not message), state
    os.close(file)


@pytest_asyncio.fixture
async def transports() -> Any:
    made = [await Transport.open(TransferSettings(via="nixl")) for _ in range(2)]
    yield made
    for transport in made:
        await transport.close()


async def test_a_reader_forgets_regions_that_their_owner_has_deregistered(
    transports: list[Transport],
) -> None:
    owner, reader = transports
    old, new = (owner.register(bytearray([mark]) * SIZE) for mark in (1, 2))
    into = reader.register(bytearray(SIZE))
    for region in (old, new):
        grant = region.grant([(0, SIZE)], PATIENCE_S)
        await reader.read(grant.descriptor, into, [(0, 0, SIZE)], PATIENCE_S)
        assert into.view == region.view
    address = old.address
    old.close()
    grant = new.grant([(0, SIZE)], PATIENCE_S)
    await reader.read(grant.descriptor, into, [(0, 0, SIZE)], PATIENCE_S)
    assert owner._agent is not None
    assert reader._agent is not None
    reply = TransferReply(None, "", owner._agent.name, address, owner._agent.metadata)
    with pytest.raises(TransferError, match="NOT_FOUND"):
        await reader._agent.read("owner", reply, into, [Piece(0, 0, SIZE)])


async def test_reads_of_one_owner_end_before_its_regions_are_loaded_again(
    transports: list[Transport],
) -> None:
    owner, reader = transports
    assert owner._agent is not None
    assert reader._agent is not None
    size, pieces = 32 << 20, [Piece(0, 0, 32 << 20)]
    source, into = owner.register(bytearray(b"a") * size), reader.register(bytearray(size))
    peer = "127.0.0.1:1"
    before = TransferReply(None, "", owner._agent.name, source.address, owner._agent.metadata)
    first = asyncio.create_task(reader._agent.read(peer, before, into, pieces))
    await asyncio.sleep(0)
    assert reader._agent._peers[owner._agent.name].reads == 1
    small, target = owner.register(bytearray(b"b") * SIZE), reader.register(bytearray(SIZE))
    after = TransferReply(None, "", owner._agent.name, small.address, owner._agent.metadata)
    second = asyncio.create_task(reader._agent.read(peer, after, target, [Piece(0, 0, SIZE)]))
    ended: list[asyncio.Task[None]] = []
    for task in (first, second):
        task.add_done_callback(ended.append)
    while len(ended) < 2:
        owner._agent.progress()
        await asyncio.sleep(0.001)
    await asyncio.gather(first, second)
    assert ended == [first, second]
    assert (into.view[-1], target.view[-1]) == (ord("a"), ord("b"))
