"""State of ranks from numbered events: gaps, duplicates, replacement, lapsed leases."""

import struct
from itertools import count

import pytest

from kvmesh.bus.messages import (
    Capacity,
    Cleared,
    Instance,
    KvEvent,
    ModelCard,
    RankKey,
    Removed,
    Role,
    Stored,
)
from kvmesh.hashing import sequence_hashes
from kvmesh.index import create_index
from kvmesh.indexer import rank_state
from kvmesh.indexer.decoding import Bad, Events, EventSource
from kvmesh.indexer.rank_state import RankStates

SALT = 7


def pack(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def stored(*blocks: int, parent: int | None = None) -> Stored:
    """Blocks whose engine hash is their local hash plus 1000."""
    engine = pack(*(block + 1000 for block in blocks))
    return Stored(0, None if parent is None else parent + 1000, engine, pack(*blocks), SALT)


def removed(*blocks: int) -> Removed:
    return Removed(0, pack(*(block + 1000 for block in blocks)))


def card(instance: str, name: str = "w", ranks: int = 1, started: float = 0.0) -> Instance:
    return Instance(
        instance=instance,
        role=Role.WORKER,
        name=name,
        version="0",
        started=started,
        model=ModelCard(name="m", context=1024, block_size=16, files=""),
        capacity=Capacity(blocks=1, max_sequences=1, max_batched_tokens=1, dp_ranks=ranks),
    )


class Mesh:
    """Rank states, with shorthand methods."""

    def __init__(self) -> None:
        self.states = RankStates(create_index())

    def batch(
        self,
        first: int,
        *events: KvEvent | Bad,
        instance: str = "w-1",
        rank: int = 0,
        worker: str = "w",
    ) -> None:
        source = EventSource("m", worker)
        self.states.apply(Events(source, instance, rank, first, 0.0, list(events)))

    def held(self, *blocks: int) -> dict[str, int]:
        """Leading blocks of this prompt that each rank holds in its engine."""
        rows = self.states.index.find(sequence_hashes(pack(*blocks), SALT))
        found = {}
        for slot, depth, *_ in struct.iter_unpack("<5I", rows):
            key = self.states.keys[slot]
            found[f"{key.instance}/{key.rank}"] = depth
        return found

    def due(self, now: float) -> list[RankKey]:
        return self.states.due_dumps(now, 0.0)


@pytest.fixture
def mesh() -> Mesh:
    mesh = Mesh()
    mesh.states.joined(card("w-1"))
    return mesh


def test_events_in_order_are_applied(mesh: Mesh) -> None:
    mesh.batch(0, stored(1, 2, 3))
    mesh.batch(1, removed(3), stored(4, parent=2))
    assert mesh.held(1, 2, 4) == {"w-1/0": 3}
    assert mesh.held(1, 2, 3) == {"w-1/0": 2}


def test_a_batch_seen_twice_changes_nothing(mesh: Mesh) -> None:
    mesh.batch(0, stored(1, 2))
    mesh.batch(1, removed(2))
    mesh.batch(0, stored(1, 2))
    assert mesh.held(1, 2) == {"w-1/0": 1}
    assert mesh.states.counts.duplicates == 1


def test_only_the_new_part_of_an_overlapping_batch_counts(mesh: Mesh) -> None:
    mesh.batch(0, stored(1), removed(1))
    mesh.batch(0, stored(1), removed(1), stored(5, 6))
    assert mesh.held(5, 6) == {"w-1/0": 2}
    assert mesh.held(1) == {}


def test_a_rank_with_a_gap_has_no_overlaps_until_a_dump(mesh: Mesh) -> None:
    mesh.batch(0, stored(1, 2))
    mesh.batch(2, stored(3, parent=2))
    assert mesh.held(1, 2, 3) == {}
    assert mesh.due(0.0) == [RankKey("w-1", 0)]
    mesh.batch(3, stored(9))
    assert mesh.held(9) == {}
    mesh.batch(4, Cleared(), stored(1, 2, 3))
    mesh.batch(6, stored(9))
    assert mesh.held(1, 2, 3) == {"w-1/0": 3}
    assert mesh.held(9) == {"w-1/0": 1}
    assert mesh.due(100.0) == []


def test_joining_in_the_middle_is_a_gap(mesh: Mesh) -> None:
    mesh.batch(5, stored(1))
    assert mesh.held(1) == {}
    assert mesh.due(0.0) == [RankKey("w-1", 0)]


def test_a_dump_within_the_batch_that_shows_the_gap_counts(mesh: Mesh) -> None:
    mesh.batch(5, stored(1), Cleared(), stored(2))
    assert mesh.held(1) == {}
    assert mesh.held(2) == {"w-1/0": 1}


def test_clearing_one_tier_does_not_make_a_rank_known(mesh: Mesh) -> None:
    mesh.batch(5, Cleared(0), stored(1))
    assert mesh.held(1) == {}


def test_a_dump_from_before_the_gap_does_not_count(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.batch(4, stored(2))
    mesh.batch(1, Cleared(), stored(3))
    assert mesh.held(3) == {}


def test_an_empty_batch_reveals_a_gap(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.batch(1)
    assert mesh.held(1) == {"w-1/0": 1}
    mesh.batch(2)
    assert mesh.held(1) == {}


def test_dump_requests_back_off_and_then_accept_any_dump(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.batch(1 << 40, stored(2))  # nonsense that moves the next id out of reach
    requested = [now for now in range(40) if mesh.due(float(now))]
    assert requested == [0, 1, 3, 7, 12, 17, 22, 27, 32, 37]
    mesh.batch(2, Cleared(), stored(3))
    assert mesh.held(3) == {"w-1/0": 1}


def test_dumps_of_one_rank_are_requested_at_most_once_a_second(mesh: Mesh) -> None:
    requested = 0
    for i, first in zip(range(100), count(1, 3), strict=False):
        mesh.batch(first, Cleared(), stored(1))
        mesh.batch(first + 3, stored(1))
        requested += len(mesh.due(i / 10))
    assert requested == 10


def test_ranks_are_independent(mesh: Mesh) -> None:
    mesh.batch(0, stored(1), rank=0)
    mesh.batch(0, stored(1, 2), rank=1)
    mesh.batch(7, stored(5), rank=0)
    assert mesh.held(1, 2) == {"w-1/1": 2}


def test_a_new_lease_drops_what_the_old_instance_held(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.states.joined(card("w-2", started=1.0))
    assert mesh.held(1) == {}
    mesh.batch(0, stored(2), instance="w-2")
    assert mesh.held(2) == {"w-2/0": 1}
    mesh.batch(1, stored(3), instance="w-1")
    assert mesh.held(3) == {}
    assert mesh.states.counts.stale == 1


def test_a_new_instance_drops_what_a_lapsed_one_held() -> None:
    mesh = Mesh()
    mesh.batch(0, stored(1))
    mesh.batch(0, stored(2), instance="w-2")
    assert mesh.held(1) == {}
    assert mesh.held(2) == {"w-2/0": 1}


def test_an_instance_without_a_lease_does_not_replace_a_live_one(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.batch(0, stored(2), instance="w-0")
    assert mesh.held(1) == {"w-1/0": 1}
    assert mesh.held(2) == {}
    mesh.states.joined(card("w-0", started=1.0))  # it was new after all: its lease came late
    assert mesh.held(1) == {}
    assert mesh.due(0.0) == [RankKey("w-0", 0)]


def test_events_of_a_former_instance_do_not_replace_the_live_one(mesh: Mesh) -> None:
    mesh.states.mark_all_unknown()
    mesh.batch(7, stored(2), instance="w-0")
    mesh.batch(0, stored(1))
    assert mesh.held(1) == {"w-1/0": 1}


def test_a_dead_namesake_whose_lease_has_not_lapsed_changes_nothing() -> None:
    mesh = Mesh()
    mesh.states.joined(card("w-0"))
    mesh.states.joined(card("w-1", started=1.0))
    mesh.states.mark_all_unknown()
    mesh.batch(5, stored(2), instance="w-0")
    mesh.batch(0, stored(1))
    mesh.states.left(card("w-0"))
    assert mesh.held(1) == {"w-1/0": 1}


def test_of_two_live_namesakes_the_later_started_counts(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.states.joined(card("w-0", started=-1.0))
    mesh.batch(0, stored(2), instance="w-0")
    assert mesh.held(1) == {"w-1/0": 1}
    assert mesh.held(2) == {}
    mesh.states.left(card("w-1"))
    assert mesh.due(0.0) == [RankKey("w-0", 0)]


def test_equal_names_under_different_models_are_different_workers(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    events = Events(EventSource("other", "w"), "o-1", 0, 0, 0.0, [stored(1)])
    mesh.states.apply(events)
    assert mesh.held(1) == {"w-1/0": 1, "o-1/0": 1}


def test_a_lapsed_lease_drops_the_worker(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.states.left(card("w-1"))
    assert mesh.held(1) == {}
    mesh.batch(1, stored(2))
    assert mesh.held(2) == {}


def test_a_dump_is_requested_of_a_worker_whose_lease_returns(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.states.left(card("w-1"))
    mesh.states.joined(card("w-1", ranks=2))
    assert mesh.due(0.0) == [RankKey("w-1", 0), RankKey("w-1", 1)]
    mesh.batch(1, Cleared(), stored(1))
    assert mesh.held(1) == {"w-1/0": 1}


def test_a_dump_of_the_older_namesake_is_requested_when_the_newer_leaves(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.states.joined(card("w-2", started=1.0))
    mesh.states.left(card("w-2", started=1.0))
    assert mesh.due(0.0) == [RankKey("w-1", 0)]


def test_dead_instances_are_dropped_once_history_is_read() -> None:
    mesh = Mesh()
    mesh.batch(0, stored(1))
    mesh.states.joined(card("v-1", name="v"))
    mesh.batch(0, stored(1), instance="v-1", worker="v")
    mesh.states.reconcile()
    assert mesh.held(1) == {"v-1/0": 1}


def test_a_dump_is_requested_of_a_rank_without_events_in_history(mesh: Mesh) -> None:
    mesh.states.joined(card("v-1", name="v", ranks=2))
    mesh.batch(0, stored(1))
    mesh.batch(0, stored(1), instance="v-1", worker="v")
    mesh.states.reconcile()
    assert mesh.due(0.0) == [RankKey("v-1", 1)]
    assert mesh.held(1) == {"w-1/0": 1, "v-1/0": 1}


def test_a_dump_is_requested_of_a_later_worker_without_known_events(mesh: Mesh) -> None:
    mesh.batch(0, stored(1))
    mesh.states.reconcile()
    mesh.states.joined(card("v-1", name="v"))
    assert mesh.due(0.0) == [RankKey("v-1", 0)]
    mesh.batch(0, stored(1), instance="u-1", worker="u")
    mesh.states.joined(card("u-1", name="u"))
    mesh.states.joined(card("t-1", name="t"))
    mesh.batch(0, stored(1), instance="t-1", worker="t")
    assert mesh.states.unknown == 1
    assert mesh.held(1) == {"w-1/0": 1, "u-1/0": 1, "t-1/0": 1}


def test_a_publisher_without_a_lease_is_dropped_after_a_grace() -> None:
    mesh = Mesh()
    mesh.batch(0, stored(1))
    mesh.states.sweep(0.0, 3.0)
    mesh.states.sweep(2.0, 3.0)
    assert mesh.held(1) == {"w-1/0": 1}
    mesh.states.sweep(4.0, 3.0)
    assert mesh.held(1) == {}


def test_a_stream_gap_makes_every_live_rank_unknown(mesh: Mesh) -> None:
    mesh.states.joined(card("v-1", name="v", ranks=2))
    mesh.batch(0, stored(1))
    mesh.states.mark_all_unknown()
    assert mesh.held(1) == {}
    assert set(mesh.due(0.0)) == {RankKey("w-1", 0), RankKey("v-1", 0), RankKey("v-1", 1)}
    mesh.batch(0, stored(4), instance="v-1", worker="v")  # its whole history comes after the hole
    assert mesh.held(4) == {"v-1/0": 1}


def test_an_unreadable_event_makes_its_rank_unknown_but_an_unknown_kind_does_not(
    mesh: Mesh,
) -> None:
    mesh.batch(0, stored(1), Bad("new kind", unknown_tag=True), stored(2, parent=1))
    assert mesh.held(1, 2) == {"w-1/0": 2}
    mesh.batch(3, Bad("odd bytes", unknown_tag=False), stored(3, parent=2))
    assert mesh.held(1, 2) == {}
    assert mesh.states.counts.bad_events == 2


def test_a_store_after_an_unknown_parent_is_counted_and_skipped(mesh: Mesh) -> None:
    mesh.batch(0, stored(2, parent=1), stored(5))
    assert mesh.held(5) == {"w-1/0": 1}
    assert mesh.states.counts.orphans == 1


def test_a_dump_may_hold_blocks_whose_parent_is_gone(mesh: Mesh) -> None:
    (first,) = struct.unpack("<Q", sequence_hashes(pack(1), SALT))
    detached = Stored(0, None, pack(1002), pack(2), previous=first)
    mesh.batch(3, Cleared(), detached, stored(3, parent=2))
    assert mesh.held(1, 2, 3) == {}
    mesh.batch(6, stored(1))
    assert mesh.held(1, 2, 3) == {"w-1/0": 3}


def test_a_rank_that_reports_more_blocks_than_its_capacity_is_unknown(mesh: Mesh) -> None:
    mesh.batch(0, stored(*range(1, 4001)))
    assert mesh.states.mark_excessive_unknown() == []
    mesh.batch(1, stored(*range(4001, 4200), parent=4000))
    assert mesh.states.mark_excessive_unknown() == [RankKey("w-1", 0)]
    assert mesh.held(1) == {}
    assert mesh.due(0.0) == [RankKey("w-1", 0)]
    assert mesh.states.mark_excessive_unknown() == []


def test_a_worker_holds_no_more_than_any_engine_has(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_state, "MAX_BLOCKS", 10)
    monkeypatch.setattr(rank_state, "COUNT_EVERY", 2)
    for number in range(20):  # of two ranks, in turns
        blocks = 100 * number + 1, 100 * number + 2
        mesh.batch(number // 2, stored(*blocks), rank=number % 2)
    assert mesh.states.index.stats().blocks <= 10
    assert mesh.held(101, 102) == {"w-1/1": 2}
    assert mesh.held(1901, 1902) == {}
    assert mesh.states.full == ["w"]
    mesh.batch(0, stored(*range(1, 5)), instance="v-1", worker="v")
    assert mesh.held(3) == mesh.held(1901) == {}
    assert mesh.held(1, 2, 3, 4)["v-1/0"] == 4
    mesh.batch(10, Cleared())
    mesh.batch(11, *(stored(block) for block in range(8000, 8004)))
    assert mesh.held(8003) == {"w-1/0": 1}
    assert mesh.states.full == []


def test_a_worker_without_a_lease_has_one_instance() -> None:
    states = RankStates(create_index())
    for number in range(5):
        source = EventSource(f"m{number}", "w")
        states.apply(Events(source, f"w-{number}", number, 0, 0.0, [stored(number + 1)]))
    assert states.rank_numbers() == [("w-4", 4)]
    assert states.index.stats().blocks == 1


def test_slots_of_dropped_ranks_are_reused(mesh: Mesh) -> None:
    for i in range(1, 50):
        mesh.batch(0, stored(i), instance=f"w-{i}")
    assert mesh.states.ranks == 1
    assert len(mesh.states.keys) == 1
