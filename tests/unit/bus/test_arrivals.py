"""Messages are taken whole and in order wherever the bytes are cut; the rest is left untouched."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.protocol_parser import MessageParser

MINE = 1
Message = tuple[int, bytes, bytes, bytes]

payloads = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"\r\n", b"MSG a 1 3\r\nabc\r\n", b""])
)
subjects = st.sampled_from([b"a", b"mesh.out.frontend-1"])
messages = st.tuples(st.just(MINE), subjects, st.sampled_from([b"", b"_INBOX.x.1"]), payloads)
foreign = st.sampled_from(
    [b"PING\r\n", b"+OK\r\n", b"MSG a 2 3\r\nabc\r\n", b"HMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n"]
)


def frame(message: Message) -> bytes:
    sid, subject, reply, payload = message
    middle = b" %b" % reply if reply else b""
    return b"MSG %b %d%b %d\r\n%b\r\n" % (subject, sid, middle, len(payload), payload)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


class Taker:
    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.parser = MessageParser(self._known)

    def _known(self, sid: int, subject: bytes, reply: bytes, payload: bytes) -> bool:
        if sid == MINE:
            self.taken.append((sid, subject, reply, payload))
        return sid == MINE


@given(st.lists(messages, max_size=8), foreign, st.lists(messages, max_size=3), st.data())
def test_wherever_the_stream_is_cut(
    first: list[Message], other: bytes, rest: list[Message], data: st.DataObject
) -> None:
    stream = b"".join(map(frame, first)) + other + b"".join(map(frame, rest))
    taker, left = Taker(), b""
    for chunk in cut(stream, data.draw(st.lists(st.integers(0, 1000), max_size=6))):
        left += chunk if left else taker.parser.feed(chunk)
    handed = b"".join(map(frame, taker.taken))
    assert handed + left == stream
    assert taker.taken == first[: len(taker.taken)]


@given(messages, messages, st.integers(0, 100))
def test_a_message_that_has_begun_is_waited_for(
    first: Message, second: Message, place: int
) -> None:
    taker, stream = Taker(), frame(first)
    at = stream.index(b"\r\n") + 2 + place % (len(first[3]) + 2)
    assert taker.parser.feed(stream[:at]) == b""
    assert taker.parser.has_partial
    assert taker.parser.feed(stream[at:] + frame(second)) == b""
    assert taker.taken == [first, second]
