"""Journal of the disk tier: damaged, of another key, or of another extent size."""

from pathlib import Path

import pytest

from kvmesh.kvbm.core.blocks.journal_record import BlockRemoved, BlockWritten, replay
from kvmesh.kvbm.tiers.disk_journal import DiskJournal, opened


def written(offset: int, name: bytes = b"d") -> BlockWritten:
    return BlockWritten(offset, 1, 0, name, None, "", 0, 0, 0, 0, 0)


def test_the_journal_returns_the_written_records(tmp_path: Path) -> None:
    first = opened(4096, b"k")
    journal = DiskJournal(tmp_path, first)
    assert journal.read() == []
    journal.rewrite([written(0)])
    journal.append([written(1), BlockRemoved(0)])
    assert journal.length == 4
    journal.close()
    records = DiskJournal(tmp_path, first).read()
    assert records == [first, written(0), written(1), BlockRemoved(0)]
    assert replay(records) == ({}, [written(1)])


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_record_ends_the_journal(tmp_path: Path, cut: int) -> None:
    first = opened(4096, b"k")
    journal = DiskJournal(tmp_path, first)
    journal.rewrite([written(0), written(1)])
    journal.close()
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-cut])
    assert DiskJournal(tmp_path, first).read() == [first, written(0)]


def test_a_journal_of_another_key_is_not_used(tmp_path: Path) -> None:
    journal = DiskJournal(tmp_path, opened(4096, b"k"))
    journal.rewrite([written(0)])
    journal.close()
    assert DiskJournal(tmp_path, opened(4096, b"q")).read() == []


def test_the_journal_records_the_extent_size(tmp_path: Path) -> None:
    journal = DiskJournal(tmp_path, opened(4096, b"k"))
    journal.rewrite([written(0)])
    journal.close()
    assert DiskJournal(tmp_path, opened(8192, b"k")).read() == [journal.first, written(0)]


def test_a_reused_slot_belongs_to_the_last_block() -> None:
    _, left = replay([written(0, b"a"), written(0, b"b")])
    assert [record.digest for record in left] == [b"b"]
