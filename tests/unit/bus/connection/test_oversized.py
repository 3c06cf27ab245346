"""Messages of an outage that exceed the limit of the next login."""

from kvmesh.bus.connection.oversized import without_oversized

SUBSCRIBE = b"SUB a.b.c 1\r\n"


def message(size: int) -> bytes:
    return b"PUB a %d\r\n%b\r\n" % (size, bytes(size))


def parts(size: int) -> list[bytes]:
    return [b"PUB a %d\r\n" % size, bytes(size), b"\r\n"]


def test_whole_messages_count_by_their_payload() -> None:
    small, large = message(100), message(101)
    assert len(small) > 100
    assert without_oversized([small, SUBSCRIBE, large, small], 100) == (
        [small, SUBSCRIBE, small],
        1,
    )


def test_headers_count() -> None:
    large = b"HPUB a 50 110\r\n%b\r\n" % bytes(110)
    assert without_oversized([large, SUBSCRIBE], 100) == ([SUBSCRIBE], 1)


def test_messages_in_parts_go_with_their_heads_and_ends() -> None:
    kept = [SUBSCRIBE, *parts(100), b"PING\r\n"]
    found = without_oversized([SUBSCRIBE, *parts(101), *parts(100), *parts(300), b"PING\r\n"], 100)
    assert found == (kept, 2)
