"""State of a kvbm: one instance with a rank for each of its models."""

import struct

import pytest

from kvmesh.bus.messages import Cleared, Instance, KvEvent, NodeStore, RankKey, Role, Stored
from kvmesh.hashing import sequence_hashes
from kvmesh.index import create_index
from kvmesh.indexer.decoding import Events, EventSource
from kvmesh.indexer.rank_state import RankStates
from kvmesh.indexer.snapshots.snapshot import Header, Packer, capture, restore

SALTS = {"m": 7, "other": 8}


def card(instance: str, started: float = 0.0, models: int = 2) -> Instance:
    store = NodeStore(
        directory="",
        tier_bytes=[1, 1, 1],
        tier_blocks=[90, 200, 10],
        models=["m", "other"][:models],
    )
    return Instance(
        instance=instance, role=Role.KVBM, name="k", version="0", started=started, node="n",
        store=store,
    )  # fmt: skip


def pack(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def stored(tier: int, *blocks: int, model: str = "m") -> Stored:
    return Stored(tier, None, pack(*blocks), pack(*blocks), SALTS[model])


def publish(
    states: RankStates, instance: str, first: int, *events: KvEvent, model: str = "m"
) -> None:
    rank = list(SALTS).index(model)
    states.apply(Events(EventSource(model, "k"), instance, rank, first, 0.0, events))


def held(states: RankStates, *blocks: int, model: str = "m") -> dict[str, tuple[int, ...]]:
    rows = states.index.find(sequence_hashes(pack(*blocks), SALTS[model]))
    return {
        f"{states.keys[slot].instance}/{states.keys[slot].rank}": tuple(tiers)
        for slot, *tiers in struct.iter_unpack("<5I", rows)
    }


def states_of(*cards: Instance) -> RankStates:
    states = RankStates(create_index())
    for lease in cards:
        states.joined(lease)
    return states


def test_each_model_is_a_rank_with_tiers_of_its_own() -> None:
    states = states_of(card("k-1"))
    publish(states, "k-1", 0, stored(1, 1, 2), stored(2, 1, 2, 3))
    publish(states, "k-1", 0, stored(3, 1, model="other"), model="other")
    assert held(states, 1, 2, 3) == {"k-1/0": (0, 2, 1, 0)}
    assert held(states, 1, 2, 3, model="other") == {"k-1/1": (0, 0, 0, 1)}


@pytest.mark.parametrize("events_first", [False, True])
def test_the_death_or_restart_of_a_kvbm_drops_all_its_models(events_first: bool) -> None:
    states = states_of()
    if not events_first:
        states.joined(card("k-1"))
    publish(states, "k-1", 0, stored(1, 1))
    publish(states, "k-1", 0, stored(1, 1, model="other"), model="other")
    if events_first:
        states.joined(card("k-1"))
    states.joined(card("k-2", started=1.0))
    assert held(states, 1) == held(states, 1, model="other") == {}
    publish(states, "k-1", 1, stored(1, 5))
    assert held(states, 5) == {}, "its late events do not count"
    publish(states, "k-2", 0, stored(1, 1))
    assert held(states, 1) == {"k-2/0": (0, 1, 0, 0)}
    states.left(card("k-2", started=1.0))
    assert held(states, 1) == {}


def test_a_gap_makes_one_model_unknown_until_its_dump() -> None:
    states = states_of(card("k-1"))
    publish(states, "k-1", 0, stored(1, 1))
    publish(states, "k-1", 0, stored(1, 1, model="other"), model="other")
    publish(states, "k-1", 5, stored(1, 2))
    assert held(states, 1) == {}
    assert held(states, 1, model="other") == {"k-1/1": (0, 1, 0, 0)}
    assert states.due_dumps(0.0, 0.0) == [RankKey("k-1", 0)]
    publish(states, "k-1", 6, Cleared(), stored(1, 1, 2))
    assert held(states, 1, 2) == {"k-1/0": (0, 2, 0, 0)}


def test_after_a_stream_gap_dumps_of_all_models_are_requested() -> None:
    states = states_of(card("k-1"))
    publish(states, "k-1", 0, stored(1, 1))
    states.mark_all_unknown()
    assert set(states.due_dumps(0.0, 0.0)) == {RankKey("k-1", 0), RankKey("k-1", 1)}


def test_no_dump_is_requested_of_a_kvbm_without_models() -> None:
    states = states_of(card("k-1", models=0))
    states.mark_all_unknown()
    assert states.due_dumps(0.0, 0.0) == []


def test_a_kvbm_that_reports_more_blocks_than_its_tiers_is_unknown() -> None:
    states = states_of(card("k-1"))
    most = 2 * 300 + 4096
    publish(states, "k-1", 0, stored(1, 1, model="other"), model="other")
    publish(states, "k-1", 0, stored(2, *range(most)))
    assert states.mark_excessive_unknown() == []
    publish(states, "k-1", 1, stored(3, most))
    assert states.mark_excessive_unknown() == [RankKey("k-1", 0)]
    assert held(states, 1) == {}
    assert held(states, 1, model="other") == {"k-1/1": (0, 1, 0, 0)}
    assert states.due_dumps(0.0, 0.0) == [RankKey("k-1", 0)]


def test_a_snapshot_restores_tiers_and_holders() -> None:
    before = states_of(card("k-1"))
    publish(before, "k-1", 0, stored(1, 1, 2), stored(3, 1, 2, 3))
    publish(before, "k-1", 0, stored(2, 4, model="other"), model="other")
    packer = Packer()
    for image in capture(before):
        packer.add(image)
    data = packer.finish(Header("whole", "s", 3, 0.0, []))
    after = states_of()
    assert restore(after, data, "whole", "s") == 3
    after.joined(card("k-1"))
    after.reconcile()
    assert held(after, 1, 2, 3) == {"k-1/0": (0, 2, 0, 1)}
    assert held(after, 4, model="other") == {"k-1/1": (0, 0, 1, 0)}
    after.joined(card("k-2", started=1.0))
    assert held(after, 1) == {}
