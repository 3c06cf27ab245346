"""Reading from another node that lies or fails: every move ends, and nothing stays in use."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from support.kvbm import layout
from support.wait import eventually

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.kvbm import Lend, Lent
from kvmesh.bus.streams import StreamLimits
from kvmesh.kvbm.core.blocks.block import ARENA, REMOTE, Block, Copy, Space
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.transfers.mesh_claims import Claims, PeerClaims
from kvmesh.kvbm.peers.claims_exchange import ClaimsExchange
from kvmesh.kvbm.peers.reader import Ends, PeerReader
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import TransferError, Transport

NAME = b"d" * 16
ODD = Lent(b"", b"odd", b"odd")
NOWHERE = Lent(b"", bytes(8), bytes(8))


class Reader:
    """A node that reads one block from the node `liar`."""

    def __init__(self, bus: Bus, limits: StreamLimits, arena: Arena) -> None:
        self.ends: Ends = []
        self.neighbours = ClaimsExchange(
            bus, limits, "me", "", Claims(1.0), PeerClaims(), lambda _: None, lambda _: None
        )
        options = TransferSettings(via="tcp")
        self.peers = PeerReader(bus, self.neighbours, arena, options, self.ends.extend, print)

    def read(self) -> None:
        block = Block(NAME, None, Space(0, "m", layout()), "", 0, 0, 0, 0, 0)
        self.peers.note([NAME], "liar")
        self.peers.start([Move(Copy(block, REMOTE, 0), Copy(block, ARENA, 0))])


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path, 1 << 16)
    yield arena
    arena.close()


@pytest_asyncio.fixture
async def reader(bus: Bus, limits: StreamLimits, arena: Arena) -> AsyncIterator[Reader]:
    reader = Reader(bus, limits, arena)
    yield reader
    await reader.peers.close()


@pytest.mark.parametrize("lent", [ODD, NOWHERE, Lent(b"", b"", b"")], ids=["odd", "lost", "none"])
async def test_what_a_peer_says_ends_in_a_block_or_in_none(
    bus: Bus, reader: Reader, lent: Lent
) -> None:
    async def lend(_: Lend, reply: Reply) -> None:
        reply(lent)

    decoder = msgspec.msgpack.Decoder(Lend)
    serving = await bus.serve(bus.subjects.kvbm("liar"), decoder, lend)
    reader.peers.begin()
    await eventually(lambda: reader.peers.region is not None)
    reader.read()
    await eventually(lambda: reader.ends, what="the move has ended")
    assert [end for _, end in reader.ends] == [MoveEnd.UNREADABLE]
    await serving.unsubscribe()


async def test_a_peer_that_has_failed_is_not_asked_for_what_it_was_known_to_have(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    reader.peers.note([NAME], "liar")
    assert reader.peers.knows(NAME)
    for _ in range(2):
        reader.neighbours.rest("liar", TimeoutError("no answer"))
    assert not reader.peers.knows(NAME)
    assert ["no answer" in record.message for record in caplog.records] == [True]


async def test_memory_that_cannot_be_lent_is_told(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise TransferError("unavailable", "", "too much memory to be locked")

    monkeypatch.setattr(Transport, "register", fail)
    reader.peers.begin()
    await eventually(lambda: not reader.peers.opening)
    assert reader.peers.region is None
    (record,) = caplog.records
    assert "no blocks are read from other nodes" in record.message
    assert "too much memory to be locked" in record.message
