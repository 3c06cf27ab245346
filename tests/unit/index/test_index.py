"""The behaviour of a prefix index, over both implementations."""

from random import Random

import pytest
from support.prefix_index import FACTORIES, Factory, hashes, rows

from kvmesh.hashing import sequence_hashes
from kvmesh.index import MAX_RANKS, OverlapSegment

LOCAL = hashes(range(100, 110))
ENGINE = hashes(range(10))
SEQUENCE = sequence_hashes(LOCAL)

pytestmark = pytest.mark.parametrize("create", FACTORIES)


def part(buffer: bytes, start: int, stop: int) -> bytes:
    return buffer[8 * start : 8 * stop]


def test_an_empty_index_matches_nothing(create: Factory) -> None:
    index = create()
    assert index.find(SEQUENCE) == b""
    assert index.find(b"") == b""
    assert index.find_batch([SEQUENCE, b""]) == [b"", b""]
    assert index.remove(3, 0, ENGINE) == b""
    assert index.clear(3) == 0
    assert index.ranks() == b""
    assert index.dump(3) == []
    assert index.stats()[:2] == (0, 0)


def test_the_longest_prefix_counts(create: Factory) -> None:
    index = create()
    assert index.store(7, 0, None, part(ENGINE, 0, 4), part(LOCAL, 0, 4))
    assert index.store(9, 0, None, ENGINE, LOCAL)
    assert rows(index.find(SEQUENCE)) == {7: (4, 0, 0, 0), 9: (10, 0, 0, 0)}
    assert rows(index.find(part(SEQUENCE, 0, 2))) == {7: (2, 0, 0, 0), 9: (2, 0, 0, 0)}
    assert rows(index.find(part(SEQUENCE, 0, 6) + hashes([1, 2]))) == {
        7: (4, 0, 0, 0),
        9: (6, 0, 0, 0),
    }


def test_a_batch_answers_each_prompt(create: Factory) -> None:
    index = create()
    for rank in range(70):
        index.store(rank, 0, None, part(ENGINE, 0, 1 + rank % 10), part(LOCAL, 0, 1 + rank % 10))
    prompts = [part(SEQUENCE, 0, n) for n in range(11)] * 9
    assert [rows(a) for a in index.find_batch(list(prompts))] == [
        rows(index.find(p)) for p in prompts
    ]


def test_a_chain_grows_from_its_parents_engine_hash(create: Factory) -> None:
    index = create()
    assert index.store(1, 0, None, part(ENGINE, 0, 3), part(LOCAL, 0, 3))
    assert index.store(1, 0, 2, part(ENGINE, 3, 6), part(LOCAL, 3, 6))
    assert not index.store(1, 0, 8, part(ENGINE, 9, 10), part(LOCAL, 9, 10))
    assert not index.store(2, 0, 2, part(ENGINE, 3, 6), part(LOCAL, 3, 6))
    assert rows(index.find(SEQUENCE)) == {1: (6, 0, 0, 0)}


def test_namespaces_do_not_meet(create: Factory) -> None:
    index = create()
    assert index.store(1, 0, None, ENGINE, LOCAL, 5)
    assert index.find(SEQUENCE) == b""
    assert rows(index.find(sequence_hashes(LOCAL, 5))) == {1: (10, 0, 0, 0)}


def test_a_removed_middle_block_hides_what_follows_until_it_returns(create: Factory) -> None:
    index = create()
    index.store(1, 0, None, ENGINE, LOCAL)
    index.store(2, 0, None, ENGINE, LOCAL)
    assert len(index.remove(1, 0, hashes([4, 77]))) == 8
    assert rows(index.find(SEQUENCE)) == {1: (4, 0, 0, 0), 2: (10, 0, 0, 0)}
    assert index.store(1, 0, 3, part(ENGINE, 4, 5), part(LOCAL, 4, 5))
    assert rows(index.find(SEQUENCE)) == {1: (10, 0, 0, 0), 2: (10, 0, 0, 0)}


def test_the_first_block_may_go_and_return(create: Factory) -> None:
    index = create()
    index.store(1, 0, None, ENGINE, LOCAL)
    index.remove(1, 0, hashes([0]))
    assert index.find(SEQUENCE) == b""
    index.store(1, 0, None, part(ENGINE, 0, 1), part(LOCAL, 0, 1))
    assert rows(index.find(SEQUENCE)) == {1: (10, 0, 0, 0)}


def test_tiers_continue_where_the_ones_above_stop(create: Factory) -> None:
    index = create()
    index.store(1, 0, None, part(ENGINE, 0, 3), part(LOCAL, 0, 3))
    assert index.store(1, 1, 2, part(ENGINE, 3, 5), part(LOCAL, 3, 5))
    assert index.store(1, 2, 4, part(ENGINE, 5, 9), part(LOCAL, 5, 9))
    assert rows(index.find(SEQUENCE)) == {1: (3, 2, 4, 0)}
    index.remove(1, 0, hashes([1]))
    assert rows(index.find(SEQUENCE)) == {1: (1, 0, 0, 0)}
    index.attach(
        1, 3, int.from_bytes(part(SEQUENCE, 0, 1), "little"), hashes([50]), part(LOCAL, 1, 2)
    )
    assert rows(index.find(SEQUENCE)) == {1: (1, 0, 0, 8)}


def test_a_block_in_two_tiers_survives_the_loss_of_one(create: Factory) -> None:
    index = create()
    index.store(1, 0, None, ENGINE, LOCAL)
    index.store(1, 1, None, ENGINE, LOCAL)
    assert index.stats()[:2] == (10, 20)
    assert index.clear(1, 0) == 10
    assert rows(index.find(SEQUENCE)) == {1: (0, 10, 0, 0)}
    assert rows(index.ranks()) == {1: (0, 10, 0, 0)}
    assert index.clear(1) == 10
    assert index.find(SEQUENCE) == b""


def test_storing_again_changes_nothing(create: Factory) -> None:
    index = create()
    for _ in range(2):
        assert index.store(1, 0, None, ENGINE, LOCAL)
    assert index.store(1, 0, 4, part(ENGINE, 3, 8), part(LOCAL, 5, 10))
    assert index.stats()[:2] == (10, 10)
    assert len(index.remove(1, 0, ENGINE + ENGINE)) == 80
    assert index.stats()[:2] == (0, 0)


def test_two_engine_hashes_may_name_one_block(create: Factory) -> None:
    index = create()
    index.store(1, 0, None, ENGINE, LOCAL)
    index.store(1, 0, None, hashes(range(50, 60)), LOCAL)
    assert index.stats()[:2] == (10, 20)
    assert len(index.remove(1, 0, ENGINE)) == 80
    assert rows(index.find(SEQUENCE)) == {1: (10, 0, 0, 0)}
    assert len(index.remove(1, 0, hashes([55]))) == 8
    assert rows(index.find(SEQUENCE)) == {1: (5, 0, 0, 0)}


def test_clearing_one_rank_leaves_the_others(create: Factory) -> None:
    index = create()
    for rank in (0, 64, 4000, MAX_RANKS - 1):
        index.store(rank, 0, None, ENGINE, LOCAL)
    assert index.clear(4000) == 10
    assert set(rows(index.find(SEQUENCE))) == {0, 64, MAX_RANKS - 1}


def test_a_dump_restores_what_a_rank_holds(create: Factory) -> None:
    index, other = create(), create()
    fork = hashes([900, 901])
    index.store(1, 0, None, ENGINE, LOCAL, 5)
    index.store(1, 0, 4, hashes([20, 21]), fork)
    index.store(1, 1, 9, hashes([30]), hashes([903]))
    index.store(2, 0, None, ENGINE, LOCAL, 5)
    index.remove(1, 0, hashes([2, 7]))
    other.load(1, index.dump(1))
    prompts = [sequence_hashes(LOCAL, 5), sequence_hashes(part(LOCAL, 0, 5) + fork, 5)]
    for restored in (False, True):
        for prompt in prompts:
            assert rows(other.find(prompt)).get(1) == rows(index.find(prompt)).get(1)
        if not restored:
            for target in (index, other):
                assert target.store(1, 0, 1, hashes([2]), part(LOCAL, 2, 3))
    assert rows(other.ranks()) == {1: rows(index.ranks())[1]}


def test_a_dumped_chain_is_one_segment(create: Factory) -> None:
    index = create()
    index.store(1, 2, None, ENGINE, LOCAL, 5)
    assert index.dump(1) == [OverlapSegment(2, True, 5, ENGINE, LOCAL)]
    index.remove(1, 2, part(ENGINE, 0, 2))
    previous = int.from_bytes(part(sequence_hashes(LOCAL, 5), 1, 2), "little")
    assert index.dump(1) == [
        OverlapSegment(2, False, previous, part(ENGINE, 2, 10), part(LOCAL, 2, 10))
    ]


def test_bad_arguments_are_refused_and_change_nothing(create: Factory) -> None:
    index = create()
    for rank, tier, engine, local in [
        (MAX_RANKS, 0, ENGINE, LOCAL),
        (0, 4, ENGINE, LOCAL),
        (0, 0, ENGINE[:-1], LOCAL),
        (0, 0, ENGINE, LOCAL[:-8]),
    ]:
        with pytest.raises(ValueError):  # noqa: PT011
            index.store(rank, tier, None, engine, local)
        with pytest.raises(ValueError):  # noqa: PT011
            index.attach(rank, tier, 0, engine, local)
    for call in (
        lambda: index.remove(0, 0, b"1234567"),
        lambda: index.remove(0, 4, ENGINE),
        lambda: index.clear(MAX_RANKS),
        lambda: index.clear(0, 4),
        lambda: index.dump(MAX_RANKS),
        lambda: index.find(b"123"),
        lambda: index.find_batch([SEQUENCE, b"123"]),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            call()
    assert index.stats()[:2] == (0, 0)


@pytest.mark.parametrize("ranks", [2, 3, 64, 65, 300])
def test_sets_of_any_size_grow_and_shrink(create: Factory, ranks: int) -> None:
    index = create()
    for rank in range(ranks):
        index.store(rank, rank % 3, None, part(ENGINE, 0, 2), part(LOCAL, 0, 2))
    assert len(rows(index.find(SEQUENCE))) == ranks
    for gone in range(ranks):
        index.clear(gone)
        assert set(rows(index.find(SEQUENCE))) == set(range(gone + 1, ranks))
    assert index.stats()[:2] == (0, 0)


def test_a_long_chain_is_dropped_without_recursion(create: Factory) -> None:
    index = create()
    blocks = hashes(range(20_000))
    index.store(1, 0, None, blocks, blocks)
    assert rows(index.find(sequence_hashes(blocks))) == {1: (20_000, 0, 0, 0)}
    index.remove(1, 0, blocks)
    assert index.stats()[:2] == (0, 0)


@pytest.mark.parametrize("size", [4, 13, 14])
def test_look_ups_end_however_often_blocks_are_replaced(create: Factory, size: int) -> None:
    rng, index = Random(1), create()
    held: list[bytes] = []
    for _ in range(2_000):
        held.append(rng.randbytes(8))
        index.store(0, 0, None, held[-1], rng.randbytes(8))
        if len(held) == size:
            assert len(index.remove(0, 0, held.pop(rng.randrange(size)))) == 8
        assert len(index.remove(0, 0, rng.randbytes(8))) == 0
    assert index.stats().entries == size - 1
