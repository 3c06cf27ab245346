"""Blocks of which an engine's ranks and groups of layers write a part each."""

from array import array
from itertools import count

import pytest
from msgspec.structs import replace

from kvmesh.bus.messages import (
    Attach,
    Clear,
    Commit,
    Fetch,
    Fetched,
    Finish,
    KvLayout,
    LayerLayout,
    Offer,
    Pin,
    Removed,
    Stored,
    Wanted,
)
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager

LEAD = KvLayout(
    weights="w",
    dtype="uint8",
    item_bytes=1,
    block_size=4,
    layers=[LayerLayout(1, 512, 512)],
    parts=2,
)
WINDOW = replace(LEAD, part=1, window=8, layers=[LayerLayout(1, 1024, 1024)])
BLOCKS = 3
NAMES = array("Q", range(1, BLOCKS + 1)).tobytes()


def digests(part: int, prompt: int = 0) -> list[bytes]:
    return [bytes([part, prompt, n]) + bytes(13) for n in range(BLOCKS)]


class Node:
    """A manager with one attachment for each part."""

    def __init__(self) -> None:
        self.manager = Manager(KvbmConfig({ARENA: 1 << 20}))
        for number, layout in enumerate([LEAD, WINDOW]):
            attached = self.manager.attach(Attach(f"w-{number}", "m", layout, f"{number}"), number)
            assert isinstance(attached, AttachedWorker)

    def write(self, part: int, first: int = 0, prompt: int = 0, session: str = "s") -> list[int]:
        """Offer a prompt's blocks; returns the indices of those that were wanted and written."""
        names = b"".join(digests(part, prompt))
        offer = Offer(part, first, names, NAMES, NAMES, 0, session=session)
        wanted = self.manager.answer(offer, 1.0)
        assert isinstance(wanted, Wanted)
        blocks = array("I", wanted.blocks)
        checksums = array("Q", [7] * len(blocks)).tobytes()
        self.manager.answer(Commit(part, wanted.ticket, checksums), 1.0)
        return list(blocks)


@pytest.fixture
def node() -> Node:
    node = Node()
    for part in (1, 0):
        assert node.write(part) == [0, 1, 2]
    return node


def test_only_the_lead_has_events_and_counts(node: Node) -> None:
    events = node.manager.store.drain_events()[0]
    names = array("Q", (int.from_bytes(d[:8], "little") for d in digests(0))).tobytes()
    assert [event.engine for event in events if isinstance(event, Stored)] == [names]
    stored = [event for event in node.manager.dump(0) if isinstance(event, Stored)]
    assert [event.engine for event in stored] == [names]
    assert node.manager.clear(Clear(), 2.0) == BLOCKS
    assert not node.manager.store.blocks
    (removed,) = node.manager.store.drain_events()[0]
    assert isinstance(removed, Removed)


def test_a_pin_holds_all_parts(node: Node) -> None:
    pin = Pin(id="p", sequence_hashes=NAMES, ttl_s=60.0)
    assert node.manager.pin(pin, 2.0) == BLOCKS
    copies = [block.copies[ARENA] for block in node.manager.store.blocks.values()]
    assert len(copies) == 2 * BLOCKS
    assert all(copy.retention is not None and copy.retention.pins for copy in copies)
    assert node.manager.unpin("p", 3.0) == BLOCKS
    assert not any(copy.retention is not None and copy.retention.pins for copy in copies)


def test_a_session_has_the_blocks_of_all_parts(node: Node) -> None:
    assert node.manager.release(["s"], 2.0) == BLOCKS
    assert not node.manager.store.blocks


def test_a_part_with_a_window_needs_no_earlier_blocks() -> None:
    node = Node()
    assert node.write(0, first=1) == []
    assert node.write(1, first=1) == [1, 2]


def test_what_a_window_has_left_behind_is_evicted_first(node: Node) -> None:
    names = b"".join(digests(1))
    fetch = Fetch(1, "r", 2, names, NAMES, NAMES, 0, 0.0, 0.0, 0.0, computes=False)
    fetched = node.manager.answer(fetch, 2.0)
    assert isinstance(fetched, Fetched)
    assert len(fetched.offsets) == 8
    node.manager.answer(Finish(1, fetched.ticket), 2.0)
    blocks = node.manager.store.blocks
    prompts = count(1)
    while digests(1)[0] in blocks:
        node.write(1, prompt=next(prompts), session="other")
    assert digests(1)[1] not in blocks
    assert digests(1)[2] in blocks


def test_the_card_has_one_layout_and_counts_whole_blocks(node: Node) -> None:
    attachments = node.manager.attachments
    assert attachments.layouts_in_use == {"m": [LEAD.summary]}
    whole = LEAD.block_bytes + WINDOW.block_bytes
    assert attachments.max_blocks[0] <= (1 << 20) // whole
