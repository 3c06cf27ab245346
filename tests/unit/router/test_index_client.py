"""Queries to the index: lookups of one instant share one, and sessions send deltas."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from nats.aio.msg import Msg
from support.routing import sequence

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import OverlapQuery, OverlapReply, PromptBase, encode
from kvmesh.bus.subjects import Subjects
from kvmesh.router.index_client import (
    MAX_BYTES,
    MAX_PROMPTS,
    IndexClient,
    OverlapLookup,
    OverlapResult,
)


class RecordingBus:
    """Records the queries; nobody replies."""

    def __init__(self) -> None:
        self.subjects = Subjects("test")
        self.queries: list[OverlapQuery] = []
        self.tokens: list[str] = []
        self.deliver: Callable[[Msg], None] = print

    async def subscribe_raw(self, _subject: str, handler: Callable[[Msg], None]) -> None:
        self.deliver = handler

    def new_inbox(self) -> str:
        return "inbox"

    def post(self, _subject: str, query: OverlapQuery, reply: str = "") -> None:
        self.queries.append(query)
        self.tokens.append(reply)

    def answer(self, reply: OverlapReply) -> None:
        """Reply to the latest query."""
        self.deliver(Msg(cast(Any, None), self.tokens[-1], "", encode(reply)))


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


FIRST, SECOND = sequence(*range(200)), sequence(*range(210))
REST = SECOND[len(FIRST) :]


def turn(hashes: bytes, found: list[OverlapResult]) -> OverlapLookup:
    """A lookup for a turn of a session."""
    return OverlapLookup(hashes, 1, found.append, session="s")


async def test_a_turn_sends_the_rest_and_the_whole_if_the_indexer_lacks_the_base() -> None:
    bus = RecordingBus()
    index = IndexClient(cast(Bus, bus), "m", 60.0)
    await index.open()
    index.joined("i", completes_prompts=True)
    found: list[OverlapResult] = []
    index.query(turn(FIRST, found), at_once=True)
    assert bus.queries[-1] == OverlapQuery([FIRST], 1, [], [PromptBase(b"", 0, 1)])
    bus.answer(OverlapReply([], [b""]))
    index.query(turn(SECOND, found), at_once=True)
    assert bus.queries[-1] == OverlapQuery([REST], 1, [], [PromptBase(FIRST[-8:], 200, 1)])
    bus.answer(OverlapReply([], [], incomplete=True))
    assert bus.queries[-1] == OverlapQuery([SECOND], 1, [], [PromptBase(b"", 0, 1)])
    assert len(found) == 1
    bus.answer(OverlapReply([], [b""]))
    assert [result.failure for result in found] == [None, None]


async def test_an_indexer_that_lacks_the_base_of_a_whole_prompt_fails_the_lookup() -> None:
    bus = RecordingBus()
    index = IndexClient(cast(Bus, bus), "m", 60.0)
    await index.open()
    index.joined("i", completes_prompts=True)
    found: list[OverlapResult] = []
    index.query(turn(FIRST, found), at_once=True)
    bus.answer(OverlapReply([], [], incomplete=True))
    assert found[0].failure
    assert len(bus.queries) == 1


async def test_indexers_that_complete_no_prompts_get_them_whole() -> None:
    bus = RecordingBus()
    index = IndexClient(cast(Bus, bus), "m", 60.0)
    index.joined("i", completes_prompts=False)
    for hashes in (FIRST, SECOND):
        index.query(turn(hashes, []), at_once=True)
    assert bus.queries == [OverlapQuery([FIRST], 1), OverlapQuery([SECOND], 1)]
