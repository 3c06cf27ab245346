"""Concurrent readers and writers: exact results for static ranks, consistent ones for others."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from support.prefix_index import hashes, rows

from kvmesh.hashing import sequence_hashes
from kvmesh.index import PrefixIndex, create_index

DEPTH = 300
LOCAL = hashes(range(DEPTH))
SEQUENCE = sequence_hashes(LOCAL)
ROUNDS = 150


def read(index: PrefixIndex, done: Event, seed: int) -> int:
    rng = random.Random(seed)
    queries = 0
    while not done.is_set():
        length = rng.randint(1, DEPTH)
        for answer in (
            index.find(SEQUENCE[: 8 * length]),
            *index.find_batch([SEQUENCE[: 8 * length]] * 3),
        ):
            found = rows(answer)
            assert found[0] == (length, 0, 0, 0)
            assert all(sum(depths) <= length for depths in found.values())
            queries += 1
    return queries


def write(index: PrefixIndex, rank: int) -> None:
    rng = random.Random(rank)
    for round_ in range(ROUNDS):
        length = rng.randint(2, DEPTH)
        index.store(rank, 0, None, SEQUENCE[: 8 * length], LOCAL[: 8 * length])
        assert rows(index.find(SEQUENCE))[rank] == (length, 0, 0, 0)
        hole = rng.randrange(1, length)
        index.remove(rank, 0, SEQUENCE[8 * hole : 8 * hole + 8])
        assert rows(index.find(SEQUENCE))[rank] == (hole, 0, 0, 0)
        if round_ % 2:
            index.remove(rank, 0, SEQUENCE)
        else:
            index.clear(rank)
        assert rank not in rows(index.find(SEQUENCE))


def test_readers_and_writers_of_different_ranks_run_together() -> None:
    index = create_index()
    index.store(0, 0, None, SEQUENCE, LOCAL)
    done = Event()
    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read, index, done, seed) for seed in range(2)]
        writers = [pool.submit(write, index, rank) for rank in (1, 2, 3, 4000)]
        try:
            for writer in writers:
                writer.result()
        finally:
            done.set()
        assert all(reader.result() > 0 for reader in readers)
    index.clear(0)
    assert index.stats()[:2] == (0, 0)


def test_dumps_and_statistics_may_be_taken_meanwhile() -> None:
    index = create_index()
    index.store(0, 0, None, SEQUENCE, LOCAL)
    done = Event()

    def repeat(action: Callable[[], object]) -> None:
        while not done.is_set():
            action()

    def dump() -> None:
        copy = create_index()
        copy.load(0, index.dump(0))
        assert rows(copy.find(SEQUENCE))[0] == (DEPTH, 0, 0, 0)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(repeat, action) for action in (dump, index.stats, index.ranks)]
        try:
            write(index, 5)
        finally:
            done.set()
        for other in others:
            other.result()
