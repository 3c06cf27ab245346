"""The native index against the plain one: random histories, every prompt compared."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.prefix_index import hashes, rows
from support.reference_index import ReferencePrefixIndex

from kvmesh.hashing import sequence_hashes
from kvmesh.index import create_index

RANKS = st.sampled_from([0, 1, 2, 63, 64, 700])
TIERS = st.integers(0, 3)
SALTS = st.sampled_from([0, 9])
# A small tree of prompts over an alphabet of two blocks, so that histories collide.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def engine_hash(dialect: int, prompt: list[int]) -> int:
    """Name a block as one engine would: by its prefix, or, in dialect 2, poorly."""
    if dialect == 2:
        return len(prompt)
    return hash((dialect, *prompt)) & (2**64 - 1)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.oracle = ReferencePrefixIndex()
        self.native = create_index()
        self.names: list[int] = []

    @rule(
        rank=RANKS,
        tier=TIERS,
        salt=SALTS,
        dialect=st.integers(0, 2),
        prompt=PROMPTS,
        start=st.integers(0, 8),
        how=st.sampled_from(["store", "attach"]),
    )
    def add(
        self, rank: int, tier: int, salt: int, dialect: int, prompt: list[int], start: int, how: str
    ) -> None:
        start = min(start, len(prompt) - 1)
        engine = [engine_hash(dialect, prompt[: i + 1]) for i in range(len(prompt))]
        local = hashes(prompt)
        names, blocks = hashes(engine[start:]), local[8 * start :]
        if start and how == "attach":
            before = int.from_bytes(
                sequence_hashes(local, salt)[8 * start - 8 : 8 * start], "little"
            )
            for index in (self.oracle, self.native):
                index.attach(rank, tier, before, names, blocks)
        else:
            parent = engine[start - 1] if start else None
            known = self.oracle.store(rank, tier, parent, names, blocks, salt)
            assert self.native.store(rank, tier, parent, names, blocks, salt) == known
        self.names += engine

    @rule(rank=RANKS, tier=TIERS, seed=st.integers(0, 2**16), count=st.integers(1, 6))
    def remove(self, rank: int, tier: int, seed: int, count: int) -> None:
        held = [name for s in self.oracle.dump(rank) if s.tier == tier for name in _words(s.engine)]
        pool = held or self.names or [0]
        chosen = hashes(random.Random(seed).choices(pool, k=count))
        assert self.native.remove(rank, tier, chosen) == self.oracle.remove(rank, tier, chosen)

    @rule(rank=RANKS, tier=st.none() | TIERS)
    def clear(self, rank: int, tier: int | None) -> None:
        assert self.native.clear(rank, tier) == self.oracle.clear(rank, tier)

    @rule(rank=RANKS)
    def replace_by_dump(self, rank: int) -> None:
        dump = self.native.dump(rank)
        self.native.clear(rank)
        self.native.load(rank, dump)

    @rule(salt=SALTS, prompts=st.lists(PROMPTS, min_size=1, max_size=20))
    def query(self, salt: int, prompts: list[list[int]]) -> None:
        sequences = [sequence_hashes(hashes(prompt), salt) for prompt in prompts]
        answers = [rows(answer) for answer in self.native.find_batch(list(sequences))]
        assert answers == [rows(self.oracle.find(sequence)) for sequence in sequences]
        assert answers == [rows(self.native.find(sequence)) for sequence in sequences]

    @invariant()
    def sizes_agree(self) -> None:
        assert self.native.stats()[:2] == self.oracle.stats()[:2]
        assert rows(self.native.ranks()) == rows(self.oracle.ranks())

    def teardown(self) -> None:
        for row in rows(self.native.ranks()):
            self.native.clear(row)
        assert self.native.stats()[:2] == (0, 0)


def _words(buffer: bytes) -> list[int]:
    return list(memoryview(buffer).cast("Q"))


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestIndexMachine = IndexMachine.TestCase
