"""Disk file: its usable size from the free space, and the safety of its folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.kvbm.tiers.disk_file import DiskError, DiskFile, DiskFull
from kvmesh.kvbm.tiers.disk_journal import DiskJournal, opened

MB = 1 << 20
SPARE = 100 * MB
STEP = 4 * MB


class Volume:
    """A file system with `free` bytes besides those of the tier."""

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


def test_with_enough_free_space_it_has_its_full_capacity(disk: DiskFile, volume: Volume) -> None:
    assert disk.usable(64 * MB) == 64 * MB
    disk.grow(64 * MB)
    assert disk.usable(64 * MB) == 64 * MB
    volume.lose(140 * MB)
    assert disk.usable(64 * MB) == 64 * MB


def test_space_that_others_need_is_freed_in_whole_steps(disk: DiskFile, volume: Volume) -> None:
    disk.grow(64 * MB)
    volume.lose(volume.free() - SPARE + 5 * MB)
    assert disk.usable(64 * MB) == 56 * MB
    assert disk.usable(40 * MB) == 40 * MB
    disk.truncate(56 * MB)
    assert (disk.reserved, (disk.path / "blocks").stat().st_size) == (56 * MB, 56 * MB)
    assert disk.usable(56 * MB) == 56 * MB
    volume.lose(500 * MB)
    assert disk.usable(56 * MB) == 0


def test_it_grows_again_by_at_least_two_steps(disk: DiskFile, volume: Volume) -> None:
    disk.grow(20 * MB)
    volume.lose(volume.free() - SPARE - STEP)
    assert disk.usable(20 * MB) == 20 * MB
    volume.lose(-STEP)
    assert disk.usable(20 * MB) == 28 * MB
    volume.lose(-100 * MB)
    assert disk.usable(20 * MB) == 64 * MB


def test_a_refused_growth_is_retried_after_some_time(
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
    assert disk.usable(size) == size
    now += 400.0
    assert disk.usable(size) == 64 * MB


def test_truncating_beyond_the_end_does_nothing(disk: DiskFile) -> None:
    disk.truncate(60 * MB)
    assert disk.reserved == STEP


def test_a_closed_disk_cannot_be_truncated(tmp_path: Path) -> None:
    disk = DiskFile(tmp_path, 64 * MB, 0)
    disk.close()
    with pytest.raises(OSError, match="Bad file"):
        disk.truncate(0)


def test_write_permission_of_others_is_removed(
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


def test_links_are_not_followed(tmp_path: Path) -> None:
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
