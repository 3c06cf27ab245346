"""How large a disk tier may be: what is free decides, and others come first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.kvbm.disk import Disk, DiskFull

MB = 1 << 20
SPARE = 100 * MB
STEP = 4 * MB


class Volume:
    """A file system with so many bytes free besides those of the tier."""

    def __init__(self, disk: Disk, free: int) -> None:
        self.disk = disk
        self.total = free + disk.reserved

    def free(self) -> int:
        return self.total - self.disk.reserved

    def lose(self, size: int) -> None:
        self.total -= size


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, 64 * MB, 0)
    disk._spare = SPARE
    yield disk
    disk.close()


@pytest.fixture
def volume(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Volume:
    volume = Volume(disk, SPARE + 200 * MB)
    monkeypatch.setattr(disk, "_free", volume.free)
    return volume


def test_with_enough_free_it_is_as_large_as_was_told(disk: Disk, volume: Volume) -> None:
    assert disk.room(64 * MB) == 64 * MB
    disk.grow(64 * MB)
    assert disk.room(64 * MB) == 64 * MB
    volume.lose(140 * MB)
    assert disk.room(64 * MB) == 64 * MB


def test_what_others_need_is_given_back_in_whole_steps(disk: Disk, volume: Volume) -> None:
    disk.grow(64 * MB)
    volume.lose(volume.free() - SPARE + 5 * MB)
    assert disk.room(64 * MB) == 56 * MB
    assert disk.room(40 * MB) == 40 * MB
    disk.cut(56 * MB)
    assert (disk.reserved, (disk.path / "blocks").stat().st_size) == (56 * MB, 56 * MB)
    assert disk.room(56 * MB) == 56 * MB
    volume.lose(500 * MB)
    assert disk.room(56 * MB) == 0


def test_it_grows_again_when_that_is_worth_it(disk: Disk, volume: Volume) -> None:
    disk.grow(20 * MB)
    volume.lose(volume.free() - SPARE - STEP)
    assert disk.room(20 * MB) == 20 * MB
    volume.lose(-STEP)
    assert disk.room(20 * MB) == 28 * MB
    volume.lose(-100 * MB)
    assert disk.room(20 * MB) == 64 * MB


def test_one_that_the_file_system_refused_to_grow_stays_for_some_time(
    disk: Disk, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, offset: int, size: int) -> None:
        raise OSError(27, "File too large")

    now = 1000.0
    monkeypatch.setattr("kvmesh.kvbm.disk.time.monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr("kvmesh.kvbm.disk.os.posix_fallocate", refuse)
        with pytest.raises(DiskFull) as caught:
            disk.grow(64 * MB)
    size = caught.value.usable
    assert size == disk.reserved
    assert disk.room(size) == size
    now += 400.0
    assert disk.room(size) == 64 * MB


def test_cutting_beyond_the_end_does_nothing(disk: Disk) -> None:
    disk.cut(60 * MB)
    assert disk.reserved == STEP


def test_a_closed_disk_is_not_cut(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 64 * MB, 0)
    disk.close()
    with pytest.raises(OSError, match="Bad file"):
        disk.cut(0)
