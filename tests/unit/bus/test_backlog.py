"""The backlog of KV events of a publisher."""

from array import array

from kvmesh.bus.messages import (
    Cleared,
    KvEvent,
    Removed,
    Stored,
)
from kvmesh.bus.streams.publisher import MAX_EVENT_BLOCKS, Backlog


def removed(count: int) -> Removed:
    return Removed(0, bytes(8 * count))


def test_a_backlog_is_taken_in_order_and_in_bounded_batches() -> None:
    backlog = Backlog()
    events: list[KvEvent] = [removed(n) for n in (1, 100, 1, 1, 500, 1)]
    backlog.extend(events)
    batches = []
    while batch := backlog.pop(1000):
        batches.append(batch)
    assert [event for batch in batches for event in batch] == events
    assert [len(batch) for batch in batches] == [4, 1, 1]
    assert backlog.bytes == 0


def test_a_huge_event_is_told_in_parts_that_follow_each_other() -> None:
    hashes = array("Q", range(1, 2 * MAX_EVENT_BLOCKS + 6)).tobytes()
    backlog = Backlog()
    backlog.extend([Stored(1, None, hashes, hashes, 7), Removed(1, hashes)])
    events = backlog.pop(1 << 30)
    stored = [event for event in events if isinstance(event, Stored)]
    assert [len(event.engine) // 8 for event in stored] == [MAX_EVENT_BLOCKS] * 2 + [5]
    assert [event.parent for event in stored] == [None, MAX_EVENT_BLOCKS, 2 * MAX_EVENT_BLOCKS]
    assert [(event.tier, event.salt) for event in stored] == [(1, 7), (1, 0), (1, 0)]
    assert b"".join(event.engine for event in stored) == hashes
    assert b"".join(event.local for event in stored) == hashes
    removed = [event for event in events if isinstance(event, Removed)]
    assert b"".join(event.engine for event in removed) == hashes


def test_an_overflowed_backlog_is_empty_until_it_starts_anew() -> None:
    backlog = Backlog()
    backlog.extend([removed(10)])
    backlog.overflow()
    assert (backlog.pop(1000), backlog.bytes) == ([], 0)
    backlog.extend([Cleared()])
    assert backlog.pop(1000) == [Cleared()]
