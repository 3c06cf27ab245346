"""Packs of messages: all come out as they went in, and damaged ones are no messages at all."""

from collections.abc import Sequence

import msgspec
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus import packs
from kvmesh.bus.messages import encode
from kvmesh.bus.packs import MAX_BYTES, PACKED_BYTES, packed, unpacked


def messages(*contents: object) -> list[bytes]:
    return [encode(content) for content in contents]


def out(stored: Sequence[bytes]) -> list[bytes]:
    return [message for data in stored for message in unpacked(data)]


@given(st.lists(st.dictionaries(st.text(), st.binary(), max_size=3), max_size=20))
def test_messages_come_out_as_they_went_in(contents: list[dict[str, bytes]]) -> None:
    sent = messages(*contents)
    stored = list(packed(sent))
    assert out(stored) == sent
    assert len(stored) == bool(sent)


def test_a_lone_message_stays_as_it_is() -> None:
    assert list(packed(messages({"a": 1}))) == messages({"a": 1})


def test_packs_are_bounded() -> None:
    large = messages(*({"data": bytes([n]) * (PACKED_BYTES // 3)} for n in range(7)))
    huge = encode({"data": bytes(2 * MAX_BYTES)})
    stored = list(packed([*large, huge, *large]))
    assert out(stored) == [*large, huge, *large]
    assert huge in stored
    assert len(stored) < 2 * len(large)


def test_repeated_keys_take_little_room() -> None:
    records = messages(*({"request": n, "a long name of a field": 0} for n in range(20)))
    (pack,) = packed(records)
    assert len(pack) < sum(map(len, records)) / 3


def test_damaged_or_excessive_packs_stay_one_message() -> None:
    (pack,) = packed(messages({"a": 1}, {"b": 2}))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(encode([{"a": 1}]))
    for data in (
        pack[:-3],
        packs.MAGIC,
        unsized,
        zstandard.compress(bytes(MAX_BYTES + 1)),
        zstandard.compress(encode({"not": "a list"})),
        zstandard.compress(msgspec.json.encode([1])),
    ):
        assert list(unpacked(data)) == [data]
