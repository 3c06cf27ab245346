"""Journal of the disk tier when its writes fail for a while."""

import asyncio
from pathlib import Path

import pytest

from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, Block, Space
from kvmesh.kvbm.core.blocks.journal_record import BlockWritten
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.tiers.disk_file import DiskFile
from kvmesh.kvbm.tiers.disk_journal import DiskJournal, records_in
from kvmesh.kvbm.tiers.disk_tier import DiskTier

MB = 1 << 20
LAYOUT = KvLayout(
    weights="w", dtype="uint8", item_bytes=1, block_size=4, layers=[LayerLayout(1, 512, 512)]
)


def store_block(manager: Manager, number: int) -> None:
    """Register a block on disk."""
    space = Space(0, "m", LAYOUT)
    block = Block(bytes([number]) * 16, None, space, "", 0, 0, 0, number, 0)
    copy = manager.store.reserve(block, DISK)
    assert copy is not None
    manager.store.register(copy, 7)
    manager.store.release(copy)


async def test_failed_records_are_written_on_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(KvbmConfig({ARENA: 4 * MB, DISK: 4 * MB}))
    disk = DiskFile(tmp_path, 4 * MB, 0)
    tier = DiskTier(disk, manager, b"k" * 32, asyncio.get_running_loop().time)
    await tier.open()
    store_block(manager, 1)
    with monkeypatch.context() as patch:
        patch.setattr(DiskJournal, "append", fail)
        await tier.save()
    await tier.save()
    await tier.close()
    records = records_in((tmp_path / "journal").read_bytes())
    assert sum(isinstance(record, BlockWritten) for record in records) == 1
    disk.close()


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")
