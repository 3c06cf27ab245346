"""Reads from a peer that sends wrong data or fails: every move ends, and no copy stays in use."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.kvbm import layout
from support.wait import eventually

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.messages import Lend, Lent, MessageDecoder
from kvmesh.bus.streams.configuration import StreamLimits
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


class ReadingNode:
    """A node that reads one block from the node `liar`."""

    def __init__(self, bus: Bus, limits: StreamLimits, arena: Arena) -> None:
        self.ends: Ends = []
        self.exchange = ClaimsExchange(
            bus, limits, "me", "", Claims(1.0), PeerClaims(), lambda _: None, lambda _: None
        )
        options = TransferSettings(via="tcp")
        self.reader = PeerReader(bus, self.exchange, arena, options, self.ends.extend, print)

    def read(self) -> None:
        block = Block(NAME, None, Space(0, "m", layout()), "", 0, 0, 0, 0, 0)
        self.reader.add_holder([NAME], "liar")
        self.reader.start([Move(Copy(block, REMOTE, 0), Copy(block, ARENA, 0))])


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path, 1 << 16)
    yield arena
    arena.close()


@pytest_asyncio.fixture
async def node(bus: Bus, limits: StreamLimits, arena: Arena) -> AsyncIterator[ReadingNode]:
    node = ReadingNode(bus, limits, arena)
    yield node
    await node.reader.close()


@pytest.mark.parametrize("lent", [ODD, NOWHERE, Lent(b"", b"", b"")], ids=["odd", "lost", "none"])
async def test_a_move_ends_whatever_the_peer_replies(
    bus: Bus, node: ReadingNode, lent: Lent
) -> None:
    async def lend(_: Lend, reply: Reply) -> None:
        reply(lent)

    decoder = MessageDecoder(Lend)
    serving = await bus.serve(bus.subjects.kvbm("liar"), decoder, lend)
    node.reader.open_transport()
    await eventually(lambda: node.reader.region is not None)
    node.read()
    await eventually(lambda: node.ends, what="the move has ended")
    assert [end for _, end in node.ends] == [MoveEnd.UNREADABLE]
    await serving.unsubscribe()


async def test_a_failed_peer_does_not_count_as_holder(
    node: ReadingNode, caplog: pytest.LogCaptureFixture
) -> None:
    node.reader.add_holder([NAME], "liar")
    assert node.reader.has_holder(NAME)
    for _ in range(2):
        node.exchange.report_failure("liar", TimeoutError("no answer"))
    assert not node.reader.has_holder(NAME)
    assert ["no answer" in record.message for record in caplog.records] == [True]


async def test_memory_that_cannot_be_registered_is_logged(
    node: ReadingNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise TransferError("unavailable", "", "too much memory to be locked")

    monkeypatch.setattr(Transport, "register", fail)
    node.reader.open_transport()
    await eventually(lambda: not node.reader.opening)
    assert node.reader.region is None
    (record,) = caplog.records
    assert "cannot read blocks from other nodes" in record.message
    assert "too much memory to be locked" in record.message
