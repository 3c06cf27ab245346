"""Decoding of valid and malformed messages of the KV stream."""

from collections.abc import Callable

import msgspec
import pytest

from kvmesh.bus.messages import Cleared, KvBatch, KvEvent, Removed, Stored, encode
from kvmesh.bus.subjects import Subjects
from kvmesh.indexer.decoding import Bad, EventSource, MalformedBatch, decode, source_of

SOURCE = EventSource("m", "w")
GOOD = Stored(0, None, bytes(16), bytes(16), 3)


def batch(*events: object, **changes: object) -> bytes:
    fields: dict[str, object] = {"worker": "w", "instance": "w-1", "rank": 0, "first": 4}
    fields |= {"time": 1.5} | changes
    return msgspec.msgpack.encode([*fields.values(), events])


def test_a_valid_batch_is_decoded() -> None:
    events: list[KvEvent] = [GOOD, Removed(1, bytes(8)), Cleared(None)]
    data = encode(KvBatch("w", "w-1", 2, 4, 1.5, events))
    assert decode(SOURCE, data) == (SOURCE, "w-1", 2, 4, 1.5, events)


def test_the_source_is_read_from_the_subject() -> None:
    assert source_of(Subjects("n").kv("meta/llama 3.1", "w.1")) == ("meta/llama 3.1", "w.1")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        msgspec.msgpack.encode({"worker": "w"}),
        msgspec.msgpack.encode(["w", "w-1", 0, 4, 1.5]),
        msgspec.msgpack.encode(["w", "w-1", 0, 4, 1.5, 5]),
        batch(GOOD, worker="another"),
        batch(GOOD, worker=3),
        batch(GOOD, instance=""),
        batch(GOOD, instance="another-1"),
        batch(GOOD, instance="w-2-1"),
        batch(GOOD, instance="x" * 10_000),
        batch(GOOD, rank=-1),
        batch(GOOD, rank=1 << 40),
        batch(GOOD, first=-1),
        batch(GOOD, first=(1 << 64) - 1),
        batch(GOOD, first="4"),
        encode(KvBatch("w", "w-1", 0, 0, 0.0, [GOOD]))[:-3],
    ],
)
def test_a_message_that_is_not_a_batch_of_its_source_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedBatch):
        decode(SOURCE, data)


@pytest.mark.parametrize(
    ("event", "unknown_tag"),
    [
        (Stored(0, None, bytes(15), bytes(15)), False),
        (Stored(0, None, bytes(16), bytes(8)), False),
        (Stored(9, None, bytes(8), bytes(8)), False),
        (Stored(-1, None, bytes(8), bytes(8)), False),
        (Removed(0, bytes(7)), False),
        (Removed(4, bytes(8)), False),
        (Cleared(4), False),
        (["stored", 0, "parent", b"", b""], False),
        (["stored"], False),
        (["stored", 0, 1 << 64 - 1, 5, 5], False),
        (["moved", 0, 1], True),
        ({"type": "stored"}, False),
        (7, False),
        ([], False),
    ],
)
def test_an_unreadable_event_leaves_the_others(event: object, unknown_tag: bool) -> None:
    events = decode(SOURCE, batch(GOOD, event, GOOD)).events
    assert [events[0], events[2]] == [GOOD, GOOD]
    bad = events[1]
    assert isinstance(bad, Bad)
    assert bad.unknown_tag is unknown_tag
    assert bad.reason


@pytest.mark.parametrize("grow", [lambda e: [*e, "new"], lambda e: [*e, {"k": 1}, None]])
def test_fields_added_by_a_newer_version_are_ignored(
    grow: Callable[[list[object]], list[object]],
) -> None:
    event: list[object] = msgspec.to_builtins(GOOD, builtin_types=(bytes,))
    assert decode(SOURCE, batch(grow(event))).events == [GOOD]
