"""Decoding of messages that others have chosen: one kind of error, whatever the bytes are."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import Load, MessageDecoder, RouteEvent, SeqFree, encode

DEEP = b"\x91" * 100_000


@pytest.mark.parametrize("type", [object, RouteEvent, Load, list[object]])
@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x81\xa8instance\xa2\xff\xfe", b"\xa2\xff\xfe", DEEP, b"\x81" + DEEP]
)
def test_bad_bytes_raise_one_kind_of_error(type: object, data: bytes) -> None:  # noqa: A002
    with pytest.raises(msgspec.MsgspecError):
        MessageDecoder(type).decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_that_error(data: bytes) -> None:
    decoder = MessageDecoder(SeqFree)
    with suppress(msgspec.MsgspecError):
        assert isinstance(decoder.decode(data), SeqFree)


def test_a_message_decodes() -> None:
    assert MessageDecoder(SeqFree).decode(encode(SeqFree("r"))) == SeqFree("r")
