"""The age of a worker is that of its record on the server, whatever its card states."""

import pytest
from msgspec.structs import replace
from support.routing import worker

from kvmesh.bus.discovery.cards import (
    GONE_S,
    MARKER,
    MOST_LEFT,
    MisplacedCard,
    WorkerAges,
    decode_card,
)
from kvmesh.bus.messages import Role, encode
from kvmesh.bus.storage.buckets import OPERATION
from kvmesh.bus.subjects import Subjects

SUBJECTS = Subjects("t")


def test_a_record_dates_each_card_of_its_worker() -> None:
    ages = WorkerAges()
    ages.record("k", 100.0, None)
    for stated, renewed in ((0.0, 100.0), (1e12, 200.0), (float("nan"), 300.0)):
        assert ages.dated("k", worker("w", started=stated), renewed).started == 100.0
    ages.record("k", 400.0, {})  # stored again: the worker is younger
    assert ages.dated("k", worker("w"), 500.0).started == 400.0


def test_a_worker_without_a_record_is_as_old_as_what_was_read_of_it() -> None:
    ages = WorkerAges()
    assert ages.dated("k", worker("w", started=1.0), 100.0).started == 100.0
    assert ages.dated("k", worker("w", started=1.0), 103.0).started == 100.0
    ages.ended("k", 0.0)
    assert ages.dated("k", worker("w", started=1.0), 106.0).started == 106.0


@pytest.mark.parametrize("header", [OPERATION, MARKER])
def test_the_end_of_a_record_is_no_record(header: str) -> None:
    ages = WorkerAges()
    ages.record("k", 100.0, {"Nats-TTL": "5"})
    ages.dated("k", worker("w"), 150.0)
    ages.record("k", 200.0, {header: "x"})
    assert ages.dated("k", worker("w"), 300.0).started == 100.0


def test_a_record_holds_while_only_the_lease_is_lost() -> None:
    ages = WorkerAges()
    ages.record("worker.w.1", 100.0, None, 0.0)
    ages.dated("worker.w.1", worker("w"), 101.0)
    ages.ended("worker.w.1", 10.0)
    assert ages.left(10.0 + GONE_S) == []
    assert ages.dated("worker.w.1", worker("w"), 500.0).started == 100.0
    assert ages.left(1e9) == []  # its worker is back


def test_records_of_killed_workers_are_left_after_a_while_or_if_a_name_has_many() -> None:
    ages = WorkerAges()
    ages.record("worker.once.0", 0.0, None, 0.0)
    assert ages.left(GONE_S) == []
    assert ages.left(GONE_S + 1.0) == ["worker.once.0"]
    for number in range(MOST_LEFT + 3):
        ages.record(f"worker.often.{number}", number, None, GONE_S)
    assert ages.left(GONE_S) == [f"worker.often.{number}" for number in range(3)]
    for number in range(3):
        ages.record(f"worker.often.{number}", 0.0, {OPERATION: "DEL"}, GONE_S)
        assert not ages.is_left(f"worker.often.{number}")
    assert ages.left(GONE_S) == []


def test_services_state_their_own_age() -> None:
    router = replace(worker("r", started=5.0), role=Role.ROUTER)
    assert WorkerAges().dated("k", router, 100.0).started == 5.0


def test_a_card_at_the_key_of_another_process_is_refused() -> None:
    card = replace(worker("w"), instance="w-1", name="w")
    key = SUBJECTS.lease_key(Role.WORKER, "w-1")
    assert decode_card(SUBJECTS, key, encode(card)) == card
    for other in (
        replace(card, instance="v-1", name="v"),
        replace(card, role=Role.ROUTER),
        replace(card, name="v"),
    ):
        with pytest.raises(MisplacedCard):
            decode_card(SUBJECTS, key, encode(other))
