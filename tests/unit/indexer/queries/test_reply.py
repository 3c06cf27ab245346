"""Replies to overlap queries: rank numbers become rank keys."""

import struct

import pytest

from kvmesh.bus.messages import OverlapQuery, OverlapReply, RankKey
from kvmesh.hashing import sequence_hashes
from kvmesh.index import create_index
from kvmesh.index.interface import PrefixIndex
from kvmesh.indexer.queries.reply import answer
from kvmesh.indexer.removed_blocks import RemovedBlocks

KEYS = [RankKey("a", 0), RankKey("", 0), RankKey("b", 0), RankKey("b", 1)]


def pack(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def prompt(*blocks: int) -> bytes:
    return sequence_hashes(pack(*blocks), 0)


@pytest.fixture
def index() -> PrefixIndex:
    index = create_index()
    index.store(0, 0, None, pack(1, 2), pack(1, 2))
    index.store(2, 0, None, pack(1), pack(1))
    index.store(2, 1, 1, pack(2, 3), pack(2, 3))
    index.store(3, 2, None, pack(9), pack(9))
    return index


def read(reply: OverlapReply) -> list[dict[tuple[str, int], tuple[int, ...]]]:
    found = []
    for rows in reply.rows:
        named = {}
        for place, *depths in struct.iter_unpack("<5I", rows):
            named[reply.ranks[place].instance, reply.ranks[place].rank] = tuple(depths)
        found.append(named)
    return found


def test_rows_name_ranks_and_tiers(index: PrefixIndex) -> None:
    reply = answer(index, KEYS, OverlapQuery([prompt(1, 2, 3, 4)]), 0.5, RemovedBlocks(0))
    assert read(reply) == [{("a", 0): (2, 0, 0, 0), ("b", 0): (1, 2, 0, 0)}]
    assert reply.lag == 0.5


def test_prompts_of_one_query_share_the_list_of_ranks(index: PrefixIndex) -> None:
    reply = answer(
        index,
        KEYS,
        OverlapQuery([prompt(1), prompt(8), prompt(9), prompt()]),
        0.0,
        RemovedBlocks(0),
    )
    assert len(reply.ranks) == 3
    assert read(reply) == [
        {("a", 0): (1, 0, 0, 0), ("b", 0): (1, 0, 0, 0)},
        {},
        {("b", 1): (0, 0, 1, 0)},
        {},
    ]


def test_without_a_record_of_removals_none_are_known(index: PrefixIndex) -> None:
    query, known = OverlapQuery([prompt(1)]), RemovedBlocks(8, lambda: 7.0)
    assert answer(index, KEYS, query, 0.0, known).since == 7.0
    assert answer(index, KEYS, query, 0.0, RemovedBlocks(0, lambda: 7.0)).since == 0.0


def test_no_prompts_get_no_rows(index: PrefixIndex) -> None:
    assert answer(index, KEYS, OverlapQuery([]), 0.0, RemovedBlocks(0)) == OverlapReply([], [])


def test_a_prompt_of_partial_hashes_is_an_error(index: PrefixIndex) -> None:
    with pytest.raises(ValueError, match="hash"):
        answer(index, KEYS, OverlapQuery([b"odd"]), 0.0, RemovedBlocks(0))
