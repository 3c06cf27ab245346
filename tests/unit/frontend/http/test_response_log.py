"""The log of a background response."""

import random
from dataclasses import dataclass
from unittest.mock import AsyncMock

import pytest

from kvmesh.bus.errors import Conflict, MessageTooLarge, NotFound
from kvmesh.frontend.http.responses.background import kept_headers
from kvmesh.frontend.http.responses.log import MAX_BODY, EventRecord, ResponseLog, RunHead

MOST = 5000


@dataclass
class Entry:
    value: bytes
    revision: int


class SmallBucket:
    """A bucket that refuses values of more than MOST bytes."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._revision = 0

    async def get(self, key: str) -> Entry:
        if key not in self.entries:
            raise NotFound("no such key")
        return self.entries[key]

    async def create(self, key: str, value: bytes) -> int:
        if key in self.entries:
            raise Conflict("it is there")
        return self._store(key, value)

    async def update(self, key: str, value: bytes, last: int) -> int:
        if self.entries[key].revision != last:
            raise Conflict("it was replaced")
        return self._store(key, value)

    def _store(self, key: str, value: bytes) -> int:
        if len(value) > MOST:
            raise MessageTooLarge(key, len(value))
        self._revision += 1
        self.entries[key] = Entry(value, self._revision)
        return self._revision


def log_in(bucket: SmallBucket) -> ResponseLog:
    return ResponseLog(bucket, AsyncMock(), "tenant.response", MOST)  # type: ignore[arg-type]


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that no compression makes fewer."""
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (noise(4000), True),
        (noise(23_456), True),  # in parts
        (bytes(6000), True),  # it takes little once compressed
        (bytes(MAX_BODY + 1), False),
    ],
)
async def test_a_head_keeps_its_body_up_to_a_size_whatever_a_message_holds(
    body: bytes, kept: bool
) -> None:
    bucket = SmallBucket()
    log = log_in(bucket)
    revision = await log.begin(RunHead("frontend", "token", 0, body, {}, b"{}", "target"))
    head, found = await log.head()
    assert (head.body, head.target, found) == (body if kept else b"", "target", revision)
    larger = RunHead("", "token", 0, b"", {}, noise(17_000, 1), "target")
    await log.replace(larger, revision)
    assert (await log.head())[0] == larger
    with pytest.raises(Conflict):
        await log.replace(larger, revision)


async def test_records_of_any_size_are_stored_and_read_again() -> None:
    bucket = SmallBucket()
    log = log_in(bucket)
    records = [EventRecord(noise(size, size), [size], [1]) for size in (10, 4000, 5001, 30_000)]
    for number, record in enumerate(records):
        await log.append(number, record)
    assert [await log.record(number) for number in range(5)] == [*records, None]
    with pytest.raises(Conflict):  # another frontend, which loses, replaces no part
        await log.append(3, EventRecord(noise(20_000, 7), [], []))
    assert await log.record(3) == records[3]


def test_kept_headers_tell_the_client_and_hold_no_credentials() -> None:
    kept = {"user-agent": "codex_exec/0.9", "thread-id": "t", "x-session-id": "s"}
    secret = {"Authorization": "a", "X-Api-Key": "k", "X-Auth-Token": "t", "Cookie": "c"}
    assert kept_headers({**kept, **secret, "Accept": "*/*"}) == kept
