"""The parser delivers whole messages in order, however the bytes are split."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.connection.protocol_parser import MessageParser

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


def cut(data: bytes, offsets: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(offset % (len(data) + 1) for offset in offsets)})
    return [data[a:b] for a, b in pairwise(edges)]


class Receiver:
    def __init__(self) -> None:
        self.received: list[Message] = []
        self.parser = MessageParser(self._known)

    def _known(self, sid: int, subject: bytes, reply: bytes, payload: bytes) -> bool:
        if sid == MINE:
            self.received.append((sid, subject, reply, payload))
        return sid == MINE


@given(st.lists(messages, max_size=8), foreign, st.lists(messages, max_size=3), st.data())
def test_messages_are_whole_however_the_stream_is_split(
    first: list[Message], other: bytes, rest: list[Message], data: st.DataObject
) -> None:
    stream = b"".join(map(frame, first)) + other + b"".join(map(frame, rest))
    receiver, left = Receiver(), b""
    for chunk in cut(stream, data.draw(st.lists(st.integers(0, 1000), max_size=6))):
        left += chunk if left else receiver.parser.feed(chunk)
    handed = b"".join(map(frame, receiver.received))
    assert handed + left == stream
    assert receiver.received == first[: len(receiver.received)]


@given(messages, messages, st.integers(0, 100))
def test_an_incomplete_message_is_buffered(first: Message, second: Message, offset: int) -> None:
    receiver, stream = Receiver(), frame(first)
    at = stream.index(b"\r\n") + 2 + offset % (len(first[3]) + 2)
    assert receiver.parser.feed(stream[:at]) == b""
    assert receiver.parser.has_partial
    assert receiver.parser.feed(stream[at:] + frame(second)) == b""
    assert receiver.received == [first, second]
