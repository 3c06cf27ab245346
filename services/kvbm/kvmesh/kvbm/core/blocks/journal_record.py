"""What is written down of the disk tier, so that a restart finds its blocks again."""

from collections.abc import Iterable
from typing import TypeAlias

from msgspec import Struct

from kvmesh.bus.messages import KvLayout
from kvmesh.kvbm.core.blocks.block import Block, Copy, Space


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """The first record: what the offsets and digests depend on."""

    version: int
    extent: int
    key: str


class Layout(Struct, frozen=True, array_like=True, tag="layout"):
    """Records that follow name this model and layout by `number`."""

    number: int
    model: str
    layout: KvLayout


class Kept(Struct, frozen=True, array_like=True, tag="kept"):
    """A block is at `offset` now. `layout` is the number of one; the rest is as in `Block`."""

    offset: int
    checksum: int
    layout: int
    digest: bytes
    parent: bytes | None
    tenant: str
    index: int
    previous: int
    local: int
    sequence: int
    salt: int


class Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """What was at `offset` is there no more."""

    offset: int


Record: TypeAlias = Opened | Layout | Kept | Gone


class Bookkeeper:
    """Turns changes of the disk tier into records; each layout is recorded before its blocks."""

    def __init__(self) -> None:
        self._layouts: dict[Space, int] = {}

    def changes(self, changes: Iterable[tuple[bool, Copy]]) -> list[Record]:
        """Records of copies that came (True) or went (False), in order."""
        records: list[Record] = []
        for came, copy in changes:
            if came:
                records += self._kept(copy)
            else:
                records.append(Gone(copy.offset))
        return records

    def whole(self, copies: Iterable[Copy]) -> list[Record]:
        """Records of all that there is, for a new journal."""
        self._layouts.clear()
        return self.changes((True, copy) for copy in copies if copy.ready)

    def _kept(self, copy: Copy) -> list[Record]:
        block = copy.block
        number = self._layouts.get(block.space)
        first: list[Record] = []
        if number is None:
            number = self._layouts[block.space] = len(self._layouts)
            first.append(Layout(number, block.space.model, block.space.layout))
        kept = Kept(
            copy.offset,
            copy.checksum,
            number,
            block.digest,
            block.parent,
            block.tenant,
            block.index,
            block.previous,
            block.local,
            block.sequence,
            block.salt,
        )
        return [*first, kept]


def surviving(records: Iterable[Record]) -> tuple[dict[int, Layout], list[Kept]]:
    """The layouts, and the blocks that are there in the end, those nearest to the root first."""
    layouts: dict[int, Layout] = {}
    there: dict[int, Kept] = {}
    for record in records:
        if isinstance(record, Layout):
            layouts[record.number] = record
        elif isinstance(record, Kept):
            there[record.offset] = record
        elif isinstance(record, Gone):
            there.pop(record.offset, None)
    return layouts, sorted(there.values(), key=lambda kept: kept.index)


def block_of(kept: Kept, space: Space) -> Block:
    """The block that a record speaks of."""
    return Block(
        kept.digest,
        kept.parent,
        space,
        kept.tenant,
        kept.index,
        kept.previous,
        kept.local,
        kept.sequence,
        kept.salt,
    )
