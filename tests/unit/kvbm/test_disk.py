"""How large a disk tier may be: what is free decides, and others come first."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wait import eventually

from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, Block, Copy, Space
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.disk_file import DiskError, DiskFile, DiskFull
from kvmesh.kvbm.tiers.disk_journal import DiskJournal, opened
from kvmesh.kvbm.tiers.disk_mover import DiskMover

MB = 1 << 20
SPARE = 100 * MB
LAYOUT = KvLayout(
    weights="w", dtype="f", item_bytes=1, block_size=16, layers=[LayerLayout(1, 128, 128)]
)
STEP = 4 * MB


class Volume:
    """A file system with so many bytes free besides those of the tier."""

    def __init__(self, disk: DiskFile, free: int) -> None:
        self.disk = disk
        self.total = free + disk.reserved

    def free(self) -> int:
        return self.total - self.disk.reserved

    def lose(self, size: int) -> None:
        self.total -= size


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    disk = DiskFile(tmp_path, 64 * MB, 0)
    disk._spare = SPARE
    yield disk
    disk.close()


@pytest.fixture
def volume(disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> Volume:
    volume = Volume(disk, SPARE + 200 * MB)
    monkeypatch.setattr(disk, "_free", volume.free)
    return volume


def test_with_enough_free_it_is_as_large_as_was_told(disk: DiskFile, volume: Volume) -> None:
    assert disk.room(64 * MB) == 64 * MB
    disk.grow(64 * MB)
    assert disk.room(64 * MB) == 64 * MB
    volume.lose(140 * MB)
    assert disk.room(64 * MB) == 64 * MB


def test_what_others_need_is_given_back_in_whole_steps(disk: DiskFile, volume: Volume) -> None:
    disk.grow(64 * MB)
    volume.lose(volume.free() - SPARE + 5 * MB)
    assert disk.room(64 * MB) == 56 * MB
    assert disk.room(40 * MB) == 40 * MB
    disk.cut(56 * MB)
    assert (disk.reserved, (disk.path / "blocks").stat().st_size) == (56 * MB, 56 * MB)
    assert disk.room(56 * MB) == 56 * MB
    volume.lose(500 * MB)
    assert disk.room(56 * MB) == 0


def test_it_grows_again_when_that_is_worth_it(disk: DiskFile, volume: Volume) -> None:
    disk.grow(20 * MB)
    volume.lose(volume.free() - SPARE - STEP)
    assert disk.room(20 * MB) == 20 * MB
    volume.lose(-STEP)
    assert disk.room(20 * MB) == 28 * MB
    volume.lose(-100 * MB)
    assert disk.room(20 * MB) == 64 * MB


def test_one_that_the_file_system_refused_to_grow_stays_for_some_time(
    disk: DiskFile, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, offset: int, size: int) -> None:
        raise OSError(27, "File too large")

    now = 1000.0
    monkeypatch.setattr("kvmesh.kvbm.tiers.disk_file.time.monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr("kvmesh.kvbm.tiers.disk_file.os.posix_fallocate", refuse)
        with pytest.raises(DiskFull) as caught:
            disk.grow(64 * MB)
    size = caught.value.usable
    assert size == disk.reserved
    assert disk.room(size) == size
    now += 400.0
    assert disk.room(size) == 64 * MB


def test_cutting_beyond_the_end_does_nothing(disk: DiskFile) -> None:
    disk.cut(60 * MB)
    assert disk.reserved == STEP


def test_a_closed_disk_is_not_cut(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, 64 * MB, 0)
    disk.close()
    with pytest.raises(OSError, match="Bad file"):
        disk.cut(0)


def test_others_cannot_write_to_its_folder_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    DiskFile(tmp_path, 8 * MB, 0).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert "others could write" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(DiskError, match="another user"):
        DiskFile(tmp_path / "theirs", 8 * MB, 0)
    (tmp_path / "own").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(DiskError, match="another user"):
        DiskFile(link, 8 * MB, 0)


def test_files_that_are_links_are_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("lock", "blocks"):
        (theirs / name).unlink(missing_ok=True)
        (theirs / name).symlink_to(victim)
        with pytest.raises(DiskError):
            DiskFile(theirs, 8 * MB, 0)
        (theirs / name).unlink()
    (theirs / "journal.new").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        DiskJournal(theirs, opened(1, bytes(32))).rewrite([])
    assert victim.read_bytes() == b"precious"


async def test_moves_end_whatever_goes_wrong_in_their_thread(
    disk: DiskFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise BufferError("a defect")

    ends: list[tuple[Move, MoveEnd]] = []
    given_up: list[object] = []
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
    arena.close()
