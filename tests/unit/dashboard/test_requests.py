"""The log of requests, from events as they come: late, repeated, missing, out of order."""

import itertools
from typing import Any

import pytest

from kvmesh.bus.messages import (
    Candidate,
    Decision,
    Hints,
    Outcome,
    PrefetchTerms,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqProgress,
    SeqWait,
)
from kvmesh.dashboard.state.requests import log as requests
from kvmesh.dashboard.state.requests.log import SILENT_S, RequestLog

NOW = 1_700_000_000.0


def log(window_s: float = 900.0, most_bytes: int = 1 << 20) -> RequestLog:
    return RequestLog(window_s, most_bytes)


def decision(request: str = "a", time: float = NOW, **fields: Any) -> Decision:
    chosen = Candidate(
        instance=fields.pop("instance", "w-1"), worker="w", rank=0, overlap=[3, 1], prefill=0.0,
        decode=0.0, requests=0, cost=1.0,
    )  # fmt: skip
    defaults: dict[str, Any] = {"tokens": 100, "sequence_hashes": b"\0" * 48, "block_size": 16}
    return Decision(
        request=request, model="m", time=time, router="r", policy="kv", chosen=chosen,
        candidates=[chosen], max_tokens=9, **defaults | fields,
    )  # fmt: skip


def outcome(request: str = "a", time: float = NOW + 2, **fields: Any) -> Outcome:
    defaults: dict[str, Any] = {"total_s": 2.0, "output_tokens": 70, "prompt_tokens": 100}
    return Outcome(
        request=request, instance="w-1", time=time, cached_tokens=64, ttft_s=0.5, finish="stop",
        **defaults | fields,
    )  # fmt: skip


def add(
    request: str = "a", instance: str = "w-1", time: float = NOW, waits_for: str = ""
) -> SeqAdd:
    return SeqAdd(request, instance, 0, b"", 100, 4, 0, time, waits_for)


def wait(request: str = "a", deadline: float = NOW + 30) -> SeqWait:
    return SeqWait(request, "r", "", 0, "", 0.0, 100, NOW, deadline)


def running(seen: RequestLog, now: float = NOW) -> list[tuple[str, str, int]]:
    return [(r.request, r.state, r.generated) for r in seen.running(now)]


def test_a_request_that_waits_for_a_prefix_has_no_worker_yet() -> None:
    seen = log()
    seen.add_sequence(add(waits_for="b"), NOW)
    assert running(seen) == [("a", "waiting", 0)]
    seen.add_sequence(add(), NOW)
    assert running(seen) == [("a", "prefill", 0)]


def test_a_request_waits_prefills_decodes_and_ends() -> None:
    seen = log()
    seen.add_sequence(wait(), NOW)
    assert running(seen) == [("a", "waiting", 0)]
    seen.add_sequence(add(), NOW)
    assert running(seen) == [("a", "prefill", 0)]
    seen.add_route(decision(), NOW)
    seen.add_sequence(SeqProgress("a", 0), NOW)  # a sign of life during a long prefill
    assert running(seen) == [("a", "prefill", 0)]
    seen.add_sequence(SeqPrefilled("a"), NOW)
    assert running(seen) == [("a", "decode", 0)]
    seen.add_sequence(SeqProgress("a", 64), NOW)
    assert running(seen) == [("a", "decode", 64)]
    seen.add_sequence(SeqFree("a"), NOW)
    seen.add_route(outcome(), NOW)
    assert running(seen) == []
    assert [(r.request, r.state, r.generated) for r in seen.ended()] == [("a", "ended", 70)]
    assert (found := seen.get("a")) is not None
    assert found.expected == 64


EVENTS: list[SeqEvent] = [wait(), add(), SeqPrefilled("a"), SeqProgress("a", 64), SeqFree("a")]


@pytest.mark.parametrize("order", [*itertools.permutations(range(5))])
def test_events_in_any_order_and_twice_end_the_request(order: tuple[int, ...]) -> None:
    seen = log()
    seen.add_route(decision(), NOW)
    for index in order:
        seen.add_sequence(EVENTS[index], NOW)
        seen.add_sequence(EVENTS[index], NOW)
    seen.add_route(outcome(), NOW)
    seen.add_route(outcome(), NOW)
    for event in EVENTS:
        seen.add_sequence(event, NOW)
    seen.add_route(decision(), NOW)
    assert running(seen) == []
    assert len(list(seen.ended())) == len(seen) == 1
    assert (found := seen.get("a")) is not None
    assert (found.state, len(found.decisions), found.generated) == ("ended", 1, 70)


def test_a_migrated_request_continues_under_its_next_attempt() -> None:
    seen = log()
    seen.add_sequence(add(), NOW)
    seen.add_route(decision(), NOW)
    seen.add_sequence(SeqProgress("a", 64), NOW)
    seen.add_sequence(SeqFree("a"), NOW)
    assert running(seen) == []
    seen.add_sequence(add("a.1", "w-2"), NOW)
    for late in (SeqProgress("a", 99), SeqFree("a"), add("a"), wait("a")):
        seen.add_sequence(late, NOW)
    assert running(seen) == [("a", "prefill", 64)]
    seen.add_route(decision("a.1", instance="w-2"), NOW)
    assert (found := seen.get("a.1")) is not None
    assert [d.request for d in found.decisions] == ["a", "a.1"]
    assert (found.request, found.instance) == ("a", "w-2")
    seen.add_route(outcome("a.1"), NOW)
    assert seen.get("a") is found
    assert running(seen) == []


def test_attempts_out_of_order_are_listed_in_order() -> None:
    seen = log()
    for name in ("a.2", "a", "a.10", "a.1", "a"):
        seen.add_route(decision(name), NOW)
    assert (found := seen.get("a")) is not None
    assert [d.request for d in found.decisions] == ["a", "a.1", "a.2", "a.10"]


def test_the_part_on_a_prefill_worker_and_prefetches_are_no_requests() -> None:
    seen = log()
    seen.add_sequence(add("a#prefill", "p-1"), NOW)
    seen.add_sequence(add("pf_1"), NOW)
    seen.add_route(decision("pf_1", prefetch=PrefetchTerms()), NOW)
    assert len(seen) == 0
    seen.add_sequence(add("a"), NOW)
    seen.add_sequence(SeqFree("a#prefill"), NOW)
    assert running(seen) == [("a", "prefill", 0)]


def test_a_request_that_a_router_refused_leaves_without_an_outcome() -> None:
    seen = log()
    seen.add_sequence(wait(), NOW)
    seen.add_sequence(SeqFree("a"), NOW)
    assert running(seen) == []
    assert (found := seen.get("a")) is not None
    assert found.state == "left"


def test_a_request_whose_start_was_missed_is_followed_from_its_progress_on() -> None:
    seen = log()
    seen.add_sequence(SeqProgress("unknown", 64), NOW)
    seen.add_route(decision(), NOW)
    seen.add_sequence(SeqProgress("a", 128), NOW)
    assert running(seen) == [("a", "decode", 128)]


def test_a_request_of_a_dead_frontend_leaves_after_a_silence() -> None:
    seen = log()
    seen.add_sequence(add(), NOW)
    seen.add_sequence(wait("b", NOW + 1000), NOW)
    seen.add_sequence(SeqProgress("a", 64), NOW + 60)
    assert len(seen.running(NOW + SILENT_S + 59)) == 2
    assert running(seen, NOW + SILENT_S + 61) == [("b", "waiting", 0)]
    assert running(seen, NOW + 1001) == []


def test_a_request_stays_beyond_the_window_while_it_runs() -> None:
    seen = log(window_s=100.0)
    seen.add_sequence(add(), NOW)
    seen.add_route(decision(hints=Hints(session="s")), NOW)
    for second in range(0, 600, 60):
        seen.add_sequence(SeqProgress("a", second), NOW + second)
        seen.add_route(outcome(f"o{second}", NOW + second), NOW + second)
    assert running(seen, NOW + 600) == [("a", "decode", 540)]
    assert len(seen) < 5
    seen.add_route(outcome(total_s=600.0, time=NOW + 600, session="s"), NOW + 600)
    assert (found := seen.get("a")) is not None
    assert found.arrived == NOW
    assert [turn.request for turn in seen.lanes.of("", "s")] == ["a"]


@pytest.mark.parametrize("shift", [-3600.0, 3600.0, float("nan"), float("inf"), -1e300])
def test_clocks_of_other_machines_block_nothing(shift: float) -> None:
    seen = log(window_s=100.0)
    seen.add_sequence(add("a", time=NOW + shift), NOW)
    seen.add_route(decision("b", time=NOW + shift), NOW)
    assert {r.request for r in seen.latest()} == {"a", "b"}
    assert all(r.arrived <= NOW for r in seen.latest())
    seen.add_sequence(SeqFree("a"), NOW)
    seen.add_route(outcome("c"), NOW + 101)
    assert [r.request for r in seen.latest()] == ["c"]


def test_a_clock_that_goes_back_loses_nothing() -> None:
    seen = log()
    seen.add_route(decision("a"), NOW)
    seen.add_route(decision("b", time=NOW - 3600), NOW - 3600)
    seen.add_sequence(add("b"), NOW - 3600)
    assert {r.request for r in seen.latest()} == {"a", "b"}
    assert running(seen, NOW - 3600) == [("b", "prefill", 0)]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = log(most_bytes=100_000)
    for number in range(100):
        hints = Hints(session=f"s{number}")
        seen.add_sequence(add(f"r{number}"), NOW)
        seen.add_route(decision(f"r{number}", sequence_hashes=b"\0" * 8000, hints=hints), NOW)
    assert (
        len(seen)
        == len(seen.lanes)
        == len(seen.running(NOW))
        == 100_000 // (requests.REQUEST_BYTES + 8000)
    )
    monkeypatch.setattr(requests, "MOST_REQUESTS", 3)
    monkeypatch.setattr(requests, "MOST_ENDED", 2)
    for number in range(5):
        seen.add_route(outcome(f"o{number}"), NOW)
    assert [r.request for r in seen.latest()] == ["o4", "o3", "o2"]
    assert [r.request for r in seen.ended()] == ["o4", "o3"]


def test_the_memory_of_all_attempts_counts() -> None:
    seen = log(most_bytes=32_000)
    for number in range(20):
        seen.add_route(decision(f"a.{number}", sequence_hashes=b"\0" * 3000), NOW)
    assert len(seen) == 1  # eight attempts at most
    seen.add_route(decision("b", sequence_hashes=b"\0" * 3000), NOW)
    assert [r.request for r in seen.latest()] == ["b"]


def test_requests_are_found_by_the_clients_own_id() -> None:
    seen = log()
    seen.add_route(outcome("a", client="mine.7"), NOW)
    seen.add_route(outcome("r.7.x"), NOW)
    assert seen.get("mine.7") is seen.get("a")
    assert (found := seen.get("r.7.x")) is not None
    assert found.request == "r.7.x"
    assert seen.get("other") is None


def test_lanes_hold_the_turns_of_each_tenants_session() -> None:
    seen = log()
    for number in range(3):
        hints = Hints(session="t\x1fs", tenant="class")
        seen.add_route(decision(f"a{number}", NOW + number, hints=hints), NOW + number)
    lane = next(iter(seen.lanes.latest(NOW)))
    assert (lane.session, lane.tenant, lane.last_use) == ("s", "class", float("inf"))
    for number in range(3):
        ended = outcome(f"a{number}", NOW + 3 + number, session="t\x1fs", tenant="gold")
        seen.add_route(ended, NOW + 3 + number)
    seen.add_route(outcome("a2-1", NOW + 5, session="t\x1fs", tenant="gold", choice=1), NOW + 5)
    seen.add_route(outcome("b", NOW + 6, session="u\x1fs", tenant="iron"), NOW + 6)
    assert [t.turn for t in seen.lanes.of("gold", "s")] == [1, 2, 3]
    assert [t.request for t in seen.lanes.of("iron", "s")] == ["b"]
    assert [lane.tenant for lane in seen.lanes.latest(NOW)] == ["iron", "gold"]
    assert [lane.tenant for lane in seen.lanes.latest(NOW, "Gol")] == ["gold"]
    assert list(seen.lanes.latest(NOW + 7)) == []


def test_a_turn_keeps_its_number_when_earlier_ones_leave_the_window() -> None:
    seen = log(window_s=10.0)
    for number in range(20):
        seen.add_route(outcome(f"a{number}", NOW + number, session="s"), NOW + number)
    assert [turn.turn for turn in seen.lanes.of("", "s")] == list(range(10, 21))
    seen.add_route(outcome("b", NOW + 99), NOW + 99)
    assert len(seen.lanes) == 0


def test_an_outcome_names_the_session_that_the_placement_did_not() -> None:
    seen = log()
    seen.add_route(decision(hints=Hints(session="t\x1fold")), NOW)
    seen.add_route(outcome(session="t\x1fnew"), NOW)
    assert [turn.request for turn in seen.lanes.of("", "new")] == ["a"]
    assert seen.lanes.of("", "old") == []


@pytest.mark.parametrize("told", [float("inf"), float("-inf"), float("nan"), -1e308, 1e18, 0.0])
def test_times_of_a_broken_clock_become_those_of_now(told: float) -> None:
    """No page could draw the others: one event would stop it for all viewers."""
    seen = log()
    seen.add_sequence(wait("w", deadline=told), NOW)
    assert seen.running(NOW + SILENT_S + 1) == []
    seen.add_route(outcome("a", time=told), NOW)
    seen.add_route(outcome("b", total_s=told), NOW)
    for ended in seen.ended():
        assert ended.outcome is not None
        assert NOW - 2 <= ended.arrived <= NOW
        assert NOW <= ended.outcome.time <= NOW + 2


def test_a_clock_some_hours_off_is_believed() -> None:
    seen = log()
    seen.add_route(outcome("a", time=NOW - 3600), NOW)
    (ended,) = seen.ended()
    assert ended.outcome is not None
    assert (ended.arrived, ended.outcome.time) == (NOW - 3602, NOW - 3600)


def test_events_that_are_larger_than_others_count_by_their_size() -> None:
    seen = log(most_bytes=1 << 20)
    for number in range(20):
        seen.add_route(decision(f"d{number}"), NOW, 100_000)
        seen.add_route(outcome(f"o{number}"), NOW, 100_000)
    assert len(seen) == 2
    for number in range(20):
        seen.add_route(decision(f"small{number}"), NOW, 1500)
    assert len(seen) == 20 + 2
