"""The window of ended requests: pairing, bounds in time and memory."""

from msgspec.structs import replace
from support.ended_requests import events
from support.planned_model import BLOCK, START

from kvmesh.bus.messages import Hints, PrefetchTerms
from kvmesh.oracle.window import MOST_REQUESTS, REQUEST_BYTES, RequestWindow

MIB = 1 << 20


def filled(count: int, most_bytes: int = 64 * MIB) -> RequestWindow:
    window = RequestWindow(600.0, most_bytes)
    for number in range(count):
        for event in events(f"r-{number}", START + number, range(8)):
            window.add(event, START + number + 1)
    return window


def test_requests_are_those_that_have_ended_by_arrival() -> None:
    window = RequestWindow(600.0, MIB)
    late, early = events("late", START + 5, range(4)), events("early", START, range(4))
    window.add(late[0], START + 5)
    window.add(late[1], START + 6)
    window.add(early[0], START + 6)
    assert [each.decision.request for each in window.requests("m", START)] == ["late"]
    window.add(early[1], START + 7)
    found = window.requests("m", START)
    assert [each.decision.request for each in found] == ["early", "late"]
    assert found[0].decision.tokens == 4 * BLOCK
    assert window.requests("m", START + 1) == found[1:]
    assert window.requests("other", START) == []


def test_a_migrated_request_counts_once_and_prefetches_do_not() -> None:
    window = RequestWindow(600.0, MIB)
    first, end = events("r", START, range(4))
    window.add(first, START)
    window.add(replace(first, time=START + 2, attempt=1), START + 2)
    window.add(end, START + 3)
    window.add(end, START + 3)
    assert [each.arrival for each in window.requests("m", START)] == [START + 2]
    prefetch, end = events("p", START, range(4))
    window.add(replace(prefetch, prefetch=PrefetchTerms()), START)
    window.add(end, START + 1)
    assert len(window) == 1


def test_requests_of_batch_classes_may_be_left_out() -> None:
    window = RequestWindow(600.0, MIB)
    decision, end = events("batch", START, range(4))
    window.add(replace(decision, hints=Hints(tenant="team", fair_class="batch")), START)
    window.add(end, START + 1)
    assert len(window.requests("m", START, frozenset({"other"}))) == 1
    assert not window.requests("m", START, frozenset({"batch"}))


def test_old_requests_are_forgotten() -> None:
    window = filled(10)
    placed, _ = events("running", START + 10, range(8))
    window.add(placed, START + 10)
    window.add(events("x", START + 605, range(8))[0], START + 605)
    assert [each.decision.request for each in window.requests("m", 0.0)] == [
        f"r-{number}" for number in range(4, 10)
    ]
    window.add(events("y", START + 5000, range(8))[0], START + 5000)
    assert len(window) == 0


def test_the_window_is_bounded_in_bytes_and_number() -> None:
    each = REQUEST_BYTES + 8 * 8
    assert len(filled(50, 20 * each)) == 20
    assert len(filled(50)) == 50
    assert MOST_REQUESTS < 10_000
    running = RequestWindow(600.0, 20 * each)
    for number in range(50):
        running.add(events(f"r-{number}", START, range(8))[0], START)
    for number in range(50):
        running.add(events(f"r-{number}", START, range(8))[1], START)
    assert [e.decision.request for e in running.requests("m", 0.0)] == [
        f"r-{number}" for number in range(30, 50)
    ]
