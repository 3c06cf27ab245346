"""Decisions of a stream, one at a time."""

import pytest

from kvmesh.weights.stream import FetchOptions, StreamPlan

MIB = 1 << 20


def plan_of(chunks: int, name: str = "self", **options: float) -> StreamPlan:
    return StreamPlan([MIB] * chunks, FetchOptions(**options), name)  # type: ignore[arg-type]


def marks(chunks: int, has: set[int], fetching: frozenset[int] = frozenset()) -> bytes:
    return bytes(1 if i in has else 2 if i in fetching else 0 for i in range(chunks))


def answer_all(plan: StreamPlan, now: float, step: float = 0.001) -> list[tuple[str, int]]:
    """Answers each request `step` seconds after the one before, until all is there."""
    asked = []
    while not plan.done:
        requests = plan.requests(now)
        assert requests
        for request in requests:
            now += step
            asked.append((request.source, request.chunk))
            plan.arrived(request.source, request.chunk, now)
    return asked


def test_a_sole_source_brings_each_chunk_once() -> None:
    plan = plan_of(100)
    assert plan.join("a", 0.0, complete=True)
    asked = answer_all(plan, 0.0)
    assert sorted(chunk for _, chunk in asked) == list(range(100))
    assert plan.done
    assert plan._board.missing == 0
    assert plan.requests(9.0) == []


def test_chunks_which_were_there_are_not_requested() -> None:
    plan = plan_of(10)
    plan.present(range(1, 10))
    plan.join("a", 0.0, complete=True)
    assert [request.chunk for request in plan.requests(0.0)] == [0]


def test_no_chunk_is_far_ahead_of_the_first_missing_one() -> None:
    plan = plan_of(1000, window=32)
    plan.join("a", 0.0, complete=True)
    asked = [chunk for _, chunk in answer_all(plan, 0.0)]
    missing = set(range(1000))
    for chunk in asked:
        assert chunk < min(missing) + 32
        missing.remove(chunk)


def test_at_most_so_many_sources_are_asked_at_once() -> None:
    plan = plan_of(100, sources=3)
    for name in "abcdefgh":
        plan.join(name, 0.0, complete=True)
    assert len({request.source for request in plan.requests(0.0)}) == 3
    assert len(plan.sources) == 8


def test_a_disk_is_asked_beside_the_sources() -> None:
    plan = plan_of(100, sources=1)
    plan.join("a", 0.0, complete=True)
    plan.join("disk", 0.0, complete=True, local=True)
    assert {request.source for request in plan.requests(0.0)} == {"a", "disk"}


def test_targets_that_know_each_other_take_different_chunks_from_a_seed() -> None:
    names = [f"target{i}" for i in range(8)]
    asked = []
    for name in names:
        plan = plan_of(190, name)
        plan.join("seed", 0.0, complete=True)
        for other in names:
            if other != name:
                plan.join(other, 0.0, complete=False)
        for i in range(4):
            for request in plan.requests(0.1 * i):
                asked.append(request.chunk)
                plan.arrived("seed", request.chunk, 0.1 * i + 0.1)
    assert len(set(asked)) == len(asked)


def test_a_seed_is_not_asked_for_what_it_has_sent_while_peers_bring_chunks() -> None:
    plan = plan_of(8)
    plan.join("seed", 0.0, complete=True)
    plan.learn("seed", bytes([3, 3, 3, 3, 3, 1, 3, 3]), 0.0)
    plan.join("peer", 0.0, complete=False)
    assert [request.chunk for request in plan.requests(0.0)] == [5]
    plan.arrived("seed", 5, 0.01)
    assert plan.requests(0.01) == []
    assert {request.source for request in plan.requests(10.0)} == {"seed"}


def test_a_seed_is_asked_for_what_it_has_sent_once_no_peer_is_left() -> None:
    plan = plan_of(2)
    plan.join("seed", 0.0, complete=True)
    (first,) = plan.requests(0.0)
    plan.join("peer", 0.0, complete=False)
    plan.learn("seed", bytes([3, 3]), 0.0)
    plan.arrived("seed", first.chunk, 0.01)
    assert not plan.requests(0.01)
    plan.leave("peer")
    assert [request.chunk for request in plan.requests(0.01)] == [1 - first.chunk]


def test_a_seed_is_spared_what_peers_have_or_fetch() -> None:
    plan = plan_of(8)
    plan.join("seed", 0.0, complete=True)
    plan.join("peer", 0.0, complete=False)
    plan.learn("peer", marks(8, {0, 1, 2}, frozenset({3, 4, 5})), 0.0)
    for _ in range(4):
        for request in plan.requests(0.0):
            assert request.chunk in ({6, 7} if request.source == "seed" else {0, 1, 2})


def test_a_peer_is_asked_only_for_what_it_has() -> None:
    plan = plan_of(10)
    plan.join("peer", 0.0, complete=False)
    assert plan.requests(0.0) == []
    plan.learn("peer", marks(10, {7}, frozenset({3})), 0.0)
    assert [request.chunk for request in plan.requests(0.0)] == [7]


def test_a_slow_source_gets_few_chunks() -> None:
    plan = plan_of(400)
    answers: list[tuple[float, str, int]] = []
    free = {"fast": 0.0, "slow": 0.0}
    seconds = {"fast": 0.001, "slow": 0.1}
    for name in free:
        plan.join(name, 0.0, complete=True)
    now = 0.0
    while not plan.done:
        for request in plan.requests(now):
            name = request.source
            free[name] = max(free[name], now) + seconds[name]
            answers.append((free[name], name, request.chunk))
        answers.sort()
        now, name, chunk = answers.pop(0)
        plan.arrived(name, chunk, now)
    assert now <= 0.45
    assert plan.sources["slow"].taken <= 8 * MIB


def test_a_frozen_source_is_left_and_asked_again_after_a_rest() -> None:
    plan = plan_of(50, failures=2, duplicates=0)
    plan.join("frozen", 0.0, complete=True)
    (request,) = plan.requests(0.0)
    assert plan.failed("frozen", request.chunk, "timeout", request.deadline) == []
    assert plan.requests(request.deadline) == []
    wake = plan.wake_at(request.deadline)
    assert wake is not None
    (again,) = plan.requests(wake)
    plan.failed("frozen", again.chunk, "timeout", again.deadline)
    assert "frozen" not in plan.sources
    assert not plan.join("frozen", again.deadline + 1, complete=True)
    assert plan.join("frozen", again.deadline + 100, complete=True)


def test_wrong_bytes_ban_a_source_for_good() -> None:
    plan = plan_of(50)
    plan.join("liar", 0.0, complete=True)
    (request,) = plan.requests(0.0)
    plan.failed("liar", request.chunk, "corrupt", 0.1)
    assert not plan.join("liar", 1e9, complete=True)
    plan.join("honest", 0.2, complete=True)
    assert {source for source, _ in answer_all(plan, 0.2)} == {"honest"}


def test_a_source_without_the_chunk_is_not_asked_for_it_again() -> None:
    plan = plan_of(3)
    plan.join("a", 0.0, complete=True)
    (request,) = plan.requests(0.0)
    plan.failed("a", request.chunk, "absent", 0.0)
    asked = set()
    while requests := plan.requests(0.1):
        for each in requests:
            asked.add(each.chunk)
            plan.arrived("a", each.chunk, 0.2)
    assert asked == {0, 1, 2} - {request.chunk}
    assert plan.polls(1.0) == ["a"]
    plan.learn("a", bytes([1, 1, 1]), 1.0)
    assert [each.chunk for each in plan.requests(1.0)] == [request.chunk]


def test_a_busy_source_is_asked_again_soon() -> None:
    plan = plan_of(3)
    plan.join("a", 0.0, complete=True)
    (request,) = plan.requests(0.0)
    plan.failed("a", request.chunk, "busy", 0.0)
    assert plan.requests(0.0) == []
    assert (wake := plan.wake_at(0.0)) is not None
    assert wake <= 0.1
    assert plan.requests(wake)
    assert plan.sources["a"].failures == 0


def test_a_chunk_that_a_source_holds_up_is_requested_again_of_a_faster_one() -> None:
    plan = plan_of(20)
    plan.join("a", 0.0, complete=True)
    plan.join("b", 0.0, complete=True)
    now, held = 0.0, None
    again: list[str] = []
    while plan._board.missing > 1 or not again:
        for request in plan.requests(now):
            now += 0.001
            if request.source == "b" and held is None:
                held = request.chunk
            elif request.chunk == held:
                again.append(request.source)
            else:
                plan.arrived(request.source, request.chunk, now)
        now += 0.01
        assert now < 10
    assert again == ["a"]
    assert held is not None
    assert plan.arrived("a", held, now + 6)
    assert not plan.arrived("b", held, now + 7)


def test_a_source_that_leaves_returns_its_chunks() -> None:
    plan = plan_of(20)
    plan.join("a", 0.0, complete=True)
    chunks = [request.chunk for request in plan.requests(0.0)]
    assert plan.leave("a") == chunks
    assert plan.leave("a") == []
    assert plan.arrived("a", chunks[0], 0.1)
    plan.join("b", 0.2, complete=True)
    assert chunks[0] not in {chunk for _, chunk in answer_all(plan, 0.2)}


def test_bitmaps_are_read_less_often_while_they_stay_the_same() -> None:
    plan = plan_of(20)
    plan.join("peer", 0.0, complete=False)
    assert plan.polls(0.0) == ["peer"]
    assert plan.polls(0.0) == []
    now, waits = 0.0, []
    for _ in range(20):
        plan.learn("peer", bytes(20), now)
        wake = plan.wake_at(now)
        assert wake is not None
        waits.append(wake - now)
        now = wake
        assert plan.polls(now) == ["peer"]
    assert waits[0] < 0.05
    assert waits[-1] == pytest.approx(0.2)  # no chunk has come yet, so its time is unknown
    plan.learn("peer", bytes([1] * 20), now)
    assert plan.polls(now + 100) == []


def test_bad_input_is_refused_or_ignored() -> None:
    plan = plan_of(4)
    plan.join("peer", 0.0, complete=False)
    with pytest.raises(ValueError, match="bitmap of 3 bytes"):
        plan.learn("peer", bytes(3), 0.0)
    plan.learn("nobody", bytes(4), 0.0)
    plan.learn("peer", bytes([9, 255, 0, 4]), 0.0)
    assert plan.requests(0.0) == []
    with pytest.raises(ValueError, match="chunk 4 of 4"):
        plan.arrived("peer", 4, 0.0)
    with pytest.raises(ValueError, match="chunk -1 of 4"):
        plan.failed("peer", -1, "lost", 0.0)
    with pytest.raises(ValueError, match="chunk 7 of 4"):
        plan.present([7])
    assert plan.failed("nobody", 1, "lost", 0.0) == []
    with pytest.raises(ValueError, match="without bytes"):
        StreamPlan([1, 0], FetchOptions(), "self")
    with pytest.raises(ValueError, match="at least 1"):
        FetchOptions(sources=0)


def test_candidates_are_bounded() -> None:
    plan = plan_of(4, candidates=2)
    assert [plan.join(name, 0.0, complete=True) for name in "abc"] == [True, True, False]
    assert plan.join("disk", 0.0, complete=True, local=True)


def test_nothing_to_fetch_is_done() -> None:
    plan = plan_of(0)
    assert plan.done
    assert plan.requests(0.0) == []
    assert plan.wake_at(0.0) is None
