"""Division of the index: every prompt has one owner, and every query finds it."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import OverlapQuery, OverlapReply, RankKey
from kvmesh.hashing import sequence_hashes
from kvmesh.indexer.queries.reply import merge
from kvmesh.indexer.shards import Shard

By = Literal["namespace", "root"]
hashes = st.integers(0, (1 << 64) - 1)
divisions = st.sampled_from([("namespace", 2), ("root", 3), ("root", 1), ("namespace", 5)])


def pack(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


@given(division=divisions, salt=hashes, local=st.lists(hashes, min_size=1, max_size=4))
def test_a_prompt_is_stored_and_looked_up_in_one_shard(
    division: tuple[By, int], salt: int, local: list[int]
) -> None:
    by, count = division
    owners = [n for n in range(count) if Shard(n, count, by).owns_root(salt, pack(*local))]
    assert len(owners) == 1
    prompt = sequence_hashes(pack(*local), salt)
    for query in (OverlapQuery([prompt]), OverlapQuery([prompt], salt)):
        owned = Shard(0, count, by).owners(query)
        assert owned[owners[0]] == [0]
        if by == "root" or query.salt is not None:
            assert owned.keys() == {owners[0]}


def test_a_query_of_many_prompts_is_split() -> None:
    prompts = [pack(4, 1), pack(5), b"", pack(6)]
    assert Shard(0, 2, "root").owners(OverlapQuery(prompts)) == {0: [0, 3], 1: [1]}
    with pytest.raises(ValueError, match="64-bit"):
        Shard(0, 2, "root").owners(OverlapQuery([b"odd"]))


def test_the_label_names_the_division() -> None:
    assert Shard().label == "whole"
    assert Shard(1, 3, "root").label == "root-1of3"
    assert Shard(1, 3, "root").label_of(2) == "root-2of3"
    with pytest.raises(ValueError, match="shard 3 of 3"):
        Shard(3, 3)


def row(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def test_replies_of_shards_are_merged() -> None:
    a, b, c = RankKey("a", 0), RankKey("b", 0), RankKey("c", 0)
    first = OverlapReply([a, b], [row(1, 2, 0, 0, 0), row(0, 1, 0, 0, 0)], 0.1)
    second = OverlapReply([c, b], [row(0, 9, 0, 0, 0) + row(1, 3, 0, 0, 0)], 0.4)
    merged = merge(4, [([0, 2], first), ([1], second)])
    assert merged.ranks == [a, b, c]
    assert merged.rows == [
        row(1, 2, 0, 0, 0),
        row(2, 9, 0, 0, 0) + row(1, 3, 0, 0, 0),
        row(0, 1, 0, 0, 0),
        b"",
    ]
    assert merged.lag == 0.4
