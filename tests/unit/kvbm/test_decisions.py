"""Single decisions of the block manager: what is worth loading, who is waited for, what lasts."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvbm.core.blocks import load_cost as economy
from kvmesh.kvbm.core.blocks.block import Frequency
from kvmesh.kvbm.core.blocks.journal_record import Gone, Kept, surviving
from kvmesh.kvbm.core.blocks.load_cost import CostStep, EngineSpeed, Traffic, worth
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress
from kvmesh.kvbm.tiers.disk_journal import DiskJournal, opened

MB = 1 << 20
MEMORY = CostStep(MB, 0.0, 0)


def test_unknown_speeds_do_not_forbid_loading() -> None:
    assert worth([MEMORY] * 9, EngineSpeed(0, 0), 16) == 9
    assert worth([MEMORY] * 9, EngineSpeed(1000, 0), 16) == 9


def test_loading_must_beat_computing() -> None:
    slow, fast = CostStep(MB, 1e6, 0), CostStep(MB, 1e9, 0)
    engine = EngineSpeed(compute_tps=1600, load_bps=1e10)  # a block in 10 ms
    assert worth([fast] * 5, engine, 16) == 5
    assert worth([slow] * 5, engine, 16) == 0
    assert worth([MEMORY, fast, slow, slow], engine, 16) == 2


def test_a_slow_block_is_loaded_if_those_behind_it_make_up_for_it() -> None:
    slow = CostStep(MB, 5e7, 0)  # 21 ms
    engine = EngineSpeed(compute_tps=1600, load_bps=1e10)
    assert worth([slow, MEMORY], engine, 16) == 0
    assert worth([slow, *[MEMORY] * 5], engine, 16) == 6


def test_what_is_queued_counts_once() -> None:
    engine = EngineSpeed(compute_tps=1600, load_bps=1e10)
    assert worth([CostStep(MB, 1e9, 100 * MB)] * 5, engine, 16) == 0
    assert worth([CostStep(MB, 1e9, 100 * MB)] * 20, engine, 16) == 20


@given(
    st.lists(
        st.builds(
            CostStep,
            st.just(MB),
            st.sampled_from([0.0, 2.0**25, 2.0**30, 2.0**40]),
            st.sampled_from([0, 4 * MB, 64 * MB]),
            st.integers(1, 40),
        ),
        max_size=5,
    )
)
def test_a_run_of_blocks_is_as_worthy_as_its_blocks(runs: list[CostStep]) -> None:
    """All durations are sums of powers of two, so that none is rounded."""
    engine = EngineSpeed(compute_tps=1024, load_bps=0)
    single = [replace(run, blocks=1) for run in runs for _ in range(run.blocks)]
    with patch.object(economy, "START_S", 2.0**-9):
        assert worth(runs, engine, 16) == worth(single, engine, 16)


def moved(traffic: Traffic, blocks: int, start: float, seconds: float) -> None:
    for _ in range(blocks):
        traffic.begin(start)
    for _ in range(blocks):
        traffic.end(MB, start + seconds)


def test_speed_is_that_of_all_that_moves_at_once() -> None:
    traffic = Traffic()
    moved(traffic, 1, 0.0, 3.0)
    assert traffic.speed(3.0) == 0.0
    moved(traffic, 4, 3.0, 0.01)
    assert traffic.speed(3.01) == pytest.approx(4 * MB / 0.01)
    traffic.begin(100.0)
    traffic.end(0, 100.1)
    assert (traffic.failed, traffic.moving) == (1, 0)
    assert traffic.bps == pytest.approx(4 * MB / 0.01)


def test_a_slow_path_is_tried_again_after_a_while() -> None:
    traffic = Traffic()
    for start in (0.0, 10.0):
        moved(traffic, 1, start, 1.0)
    assert traffic.speed(11.0) == MB
    assert traffic.speed(51.0) == 4 * MB
    traffic.begin(51.0)
    assert traffic.speed(90.0) == MB
    traffic.end(MB, 52.0)
    assert traffic.speed(52.0) == MB
    assert traffic.speed(1e6) == MB * 2**20


def test_frequency_doubles_and_decays() -> None:
    uses = Frequency(since=10.0)
    uses.hit(11.0, 100.0)
    uses.hit(12.0, 100.0)
    assert uses.now(12.0, 100.0) == 4
    assert uses.now(215.0, 100.0) == 2
    assert uses.now(5000.0, 100.0) == 0
    uses.hit(5000.0, 100.0)
    assert uses.now(5000.0, 100.0) == 2


def test_the_first_to_announce_computes() -> None:
    announced = BlocksInProgress(5.0)
    announced.add((1, "a"), [b"x", b"y"], 0.0)
    announced.add((2, "b"), [b"y", b"z"], 0.0)
    assert [announced.by(d) for d in (b"x", b"y", b"z")] == [(1, "a"), (1, "a"), (2, "b")]
    assert announced.settled([b"x", b"q"], 1.0) == [b"x"]
    assert announced.end((1, "a")) == {b"y"}
    assert announced.end_attachment(2) == {b"z"}
    assert len(announced) == 0


def test_who_is_silent_is_not_believed() -> None:
    announced = BlocksInProgress(5.0)
    announced.add((1, "a"), [b"x", b"y"], 0.0)
    announced.settled([b"x"], 4.0)
    assert announced.expire(8.0) == set()
    assert announced.expire(9.5) == {b"y"}


# the journal


def kept(offset: int, name: bytes = b"d") -> Kept:
    return Kept(offset, 1, 0, name, None, "", 0, 0, 0, 0, 0)


def test_the_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    first = opened(4096, b"k")
    journal = DiskJournal(tmp_path, first)
    assert journal.read() == []
    journal.rewrite([kept(0)])
    journal.append([kept(1), Gone(0)])
    assert journal.length == 4
    journal.close()
    records = DiskJournal(tmp_path, first).read()
    assert records == [first, kept(0), kept(1), Gone(0)]
    assert surviving(records) == ({}, [kept(1)])


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_record_ends_the_journal(tmp_path: Path, cut: int) -> None:
    first = opened(4096, b"k")
    journal = DiskJournal(tmp_path, first)
    journal.rewrite([kept(0), kept(1)])
    journal.close()
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-cut])
    assert DiskJournal(tmp_path, first).read() == [first, kept(0)]


def test_a_journal_of_another_key_is_not_used(tmp_path: Path) -> None:
    journal = DiskJournal(tmp_path, opened(4096, b"k"))
    journal.rewrite([kept(0)])
    journal.close()
    assert DiskJournal(tmp_path, opened(4096, b"q")).read() == []


def test_a_journal_says_how_the_tier_was_divided(tmp_path: Path) -> None:
    journal = DiskJournal(tmp_path, opened(4096, b"k"))
    journal.rewrite([kept(0)])
    journal.close()
    assert DiskJournal(tmp_path, opened(8192, b"k")).read() == [journal.first, kept(0)]


def test_a_slot_that_was_used_again_is_the_last_blocks() -> None:
    _, left = surviving([kept(0, b"a"), kept(0, b"b")])
    assert [k.digest for k in left] == [b"b"]
