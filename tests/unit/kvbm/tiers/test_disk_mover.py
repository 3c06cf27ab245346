"""Moves between arena and disk when threads fail."""

from pathlib import Path

import pytest
from support.wait import eventually

from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, Block, Copy, Space
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.disk_file import DiskFile
from kvmesh.kvbm.tiers.disk_mover import DiskMover

MB = 1 << 20
LAYOUT = KvLayout(
    weights="w", dtype="f", item_bytes=1, block_size=16, layers=[LayerLayout(1, 128, 128)]
)


async def test_moves_end_after_any_error_in_their_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise BufferError("a defect")

    ends: list[tuple[Move, MoveEnd]] = []
    given_up: list[object] = []
    disk = DiskFile(tmp_path / "disk", 64 * MB, 0)
    arena = Arena(tmp_path, 1 * MB)
    block = Block(bytes(16), None, Space(0, "m", LAYOUT), "", 0, 0, 0, 0, 0)
    monkeypatch.setattr(disk, "read", fail)
    monkeypatch.setattr(disk, "write", fail)
    mover = DiskMover(arena, disk, 1, ends.extend, given_up.append, lambda: given_up.append(True))
    held, stored = Copy(block, ARENA, 0), Copy(block, DISK, 0)
    mover.start([Move(held, stored)])
    mover.start([Move(stored, held)])
    await eventually(lambda: len(ends) == 2)
    assert {end for _, end in ends} == {MoveEnd.UNWRITABLE, MoveEnd.UNREADABLE}
    assert "BufferError: a defect" in caplog.text
    await mover.close()
    disk.close()
    arena.close()
