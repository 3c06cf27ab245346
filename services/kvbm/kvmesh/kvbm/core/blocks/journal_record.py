"""Records of the disk tier's journal, from which a restart restores its blocks."""

from collections.abc import Iterable
from typing import TypeAlias

from msgspec import Struct

from kvmesh.bus.messages import KvLayout
from kvmesh.kvbm.core.blocks.block import Block, Copy, Space


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """First record: format version, extent size and fingerprint of the key."""

    version: int
    extent: int
    key: str


class Layout(Struct, frozen=True, array_like=True, tag="layout"):
    """Model and layout that later records refer to by `number`."""

    number: int
    model: str
    layout: KvLayout


class BlockWritten(Struct, frozen=True, array_like=True, tag="kept"):
    """A block is at `offset`. `layout` is the number of a `Layout`; the rest is as in `Block`."""

    offset: int
    checksum: int
    layout: int
    digest: bytes
    parent_digest: bytes | None
    tenant: str
    index: int
    parent_hash: int
    local_hash: int
    sequence_hash: int
    salt: int


class BlockRemoved(Struct, frozen=True, array_like=True, tag="gone"):
    """The block at `offset` was removed."""

    offset: int


Record: TypeAlias = Opened | Layout | BlockWritten | BlockRemoved


class RecordEncoder:
    """Converts changes of the disk tier to records; each layout precedes its blocks."""

    def __init__(self) -> None:
        self._layouts: dict[Space, int] = {}

    def changes(self, changes: Iterable[tuple[bool, Copy]]) -> list[Record]:
        """Records of copies that were added (True) or removed (False), in order."""
        records: list[Record] = []
        for added, copy in changes:
            if added:
                records += self._written(copy)
            else:
                records.append(BlockRemoved(copy.offset))
        return records

    def snapshot(self, copies: Iterable[Copy]) -> list[Record]:
        """Records of all registered copies, for a new journal."""
        self._layouts.clear()
        return self.changes((True, copy) for copy in copies if copy.registered)

    def _written(self, copy: Copy) -> list[Record]:
        block = copy.block
        number = self._layouts.get(block.space)
        first: list[Record] = []
        if number is None:
            number = self._layouts[block.space] = len(self._layouts)
            first.append(Layout(number, block.space.model, block.space.layout))
        written = BlockWritten(
            copy.offset,
            copy.checksum,
            number,
            block.digest,
            block.parent_digest,
            block.tenant,
            block.index,
            block.parent_hash,
            block.local_hash,
            block.sequence_hash,
            block.salt,
        )
        return [*first, written]


def replay(records: Iterable[Record]) -> tuple[dict[int, Layout], list[BlockWritten]]:
    """The layouts and the remaining blocks, those nearest to the root first."""
    layouts: dict[int, Layout] = {}
    remaining: dict[int, BlockWritten] = {}
    for record in records:
        if isinstance(record, Layout):
            layouts[record.number] = record
        elif isinstance(record, BlockWritten):
            remaining[record.offset] = record
        elif isinstance(record, BlockRemoved):
            remaining.pop(record.offset, None)
    return layouts, sorted(remaining.values(), key=lambda written: written.index)


def block_of(record: BlockWritten, space: Space) -> Block:
    """The block that a record describes."""
    return Block(
        record.digest,
        record.parent_digest,
        space,
        record.tenant,
        record.index,
        record.parent_hash,
        record.local_hash,
        record.sequence_hash,
        record.salt,
    )
