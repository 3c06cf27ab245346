"""Lookups of one instant share a query to the index."""

import asyncio
from typing import cast

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import OverlapQuery
from kvmesh.bus.subjects import Subjects
from kvmesh.router.index_client import MAX_BYTES, MAX_PROMPTS, IndexClient, OverlapLookup


class RecordingBus:
    """Records the queries; nobody replies."""

    def __init__(self) -> None:
        self.subjects = Subjects("test")
        self.queries: list[OverlapQuery] = []

    def new_inbox(self) -> str:
        return "inbox"

    def post(self, _subject: str, query: OverlapQuery, _reply: str = "") -> None:
        self.queries.append(query)


def client() -> tuple[IndexClient, list[OverlapQuery]]:
    bus = RecordingBus()
    return IndexClient(cast(Bus, bus), "m", 60.0), bus.queries


def lookup(hashes: bytes) -> OverlapLookup:
    return OverlapLookup(hashes, 1, lambda _: None)


async def test_lookups_of_one_iteration_share_a_query() -> None:
    index, queries = client()
    for name in (b"a", b"b"):
        index.query(lookup(name))
    assert not queries
    await asyncio.sleep(0)
    assert [query.prompts for query in queries] == [[b"a", b"b"]]


async def test_a_lookup_may_go_at_once_and_takes_waiting_ones_along() -> None:
    index, queries = client()
    index.query(lookup(b"a"), at_once=True)
    index.query(lookup(b"b"))
    index.query(lookup(b"c"), at_once=True)
    await asyncio.sleep(0)
    assert [query.prompts for query in queries] == [[b"a"], [b"b", b"c"]]


async def test_a_query_is_bounded_in_prompts_and_bytes() -> None:
    index, queries = client()
    for _ in range(MAX_PROMPTS + 1):
        index.query(lookup(b"a"))
    await asyncio.sleep(0)
    assert [len(query.prompts) for query in queries] == [MAX_PROMPTS, 1]
    large = bytes(MAX_BYTES // 2)
    for hashes in (large, large, b"a" * 8, bytes(2 * MAX_BYTES)):
        index.query(lookup(hashes))
    await asyncio.sleep(0)
    assert [len(query.prompts) for query in queries[2:]] == [2, 1]
