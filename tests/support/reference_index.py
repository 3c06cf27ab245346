"""Prefix index in plain Python: the reference that the native core is tested against."""

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from struct import iter_unpack
from typing import NamedTuple

from kvmesh.hashing import sequence_hashes
from kvmesh.index.interface import (
    MAX_RANKS,
    ROW,
    TIERS,
    Buffer,
    IndexStats,
    OverlapSegment,
)


class _Block(NamedTuple):
    root: bool
    previous: int
    local: int
    sequence: int


class ReferencePrefixIndex:
    """Maps engine hashes to blocks, per (rank, tier)."""

    def __init__(self) -> None:
        self._held: defaultdict[tuple[int, int], dict[int, _Block]] = defaultdict(dict)

    def store(
        self, rank: int, tier: int, parent: int | None, engine: Buffer, local: Buffer, salt: int = 0
    ) -> bool:
        _check(rank, tier)
        if parent is None:
            self._add(rank, tier, True, salt, engine, local)
            return True
        held = [self._held[rank, t] for t in (tier, *range(TIERS))]
        block = next((blocks[parent] for blocks in held if parent in blocks), None)
        self._add(rank, tier, False, block.sequence if block else None, engine, local)
        return block is not None

    def attach(self, rank: int, tier: int, previous: int, engine: Buffer, local: Buffer) -> None:
        _check(rank, tier)
        self._add(rank, tier, False, previous, engine, local)

    def load(self, rank: int, segments: list[OverlapSegment]) -> None:
        for tier, root, previous, engine, local in segments:
            _check(rank, tier)
            self._add(rank, tier, root, previous, engine, local)

    def _add(
        self, rank: int, tier: int, root: bool, previous: int | None, engine: Buffer, local: Buffer
    ) -> None:
        engine_hashes, local_hashes = _hashes(engine), _hashes(local)
        if len(engine_hashes) != len(local_hashes):
            raise ValueError("engine and local hashes differ in number")
        if previous is None:
            return
        sequences = _hashes(sequence_hashes(local, previous))
        held = self._held[rank, tier]
        for key, local_hash, sequence in zip(engine_hashes, local_hashes, sequences, strict=True):
            held.setdefault(key, _Block(root, previous, local_hash, sequence))
            root, previous = False, sequence

    def remove(self, rank: int, tier: int, engine: Buffer) -> bytes:
        _check(rank, tier)
        held = self._held[rank, tier]
        blocks = [held.pop(key) for key in _hashes(engine) if key in held]
        return array("Q", [block.sequence for block in blocks]).tobytes()

    def clear(self, rank: int, tier: int | None = None) -> int:
        _check(rank, tier or 0)
        tiers = range(TIERS) if tier is None else [tier]
        return sum(len(self._held.pop((rank, t), {})) for t in tiers)

    def find(self, sequence: Buffer) -> bytes:
        prompt = _hashes(sequence)
        rows = ((rank, *self._depths(rank, prompt)) for rank in {rank for rank, _ in self._held})
        return b"".join(ROW.pack(*row) for row in rows if any(row[1:]))

    def _depths(self, rank: int, prompt: list[int]) -> Iterator[int]:
        union: set[int] = set()
        depth = 0
        for tier in range(TIERS):
            union |= {block.sequence for block in self._held[rank, tier].values()}
            reached = next((i for i, hash_ in enumerate(prompt) if hash_ not in union), len(prompt))
            yield reached - depth
            depth = reached

    def find_batch(self, sequences: list[Buffer]) -> list[bytes]:
        return [self.find(sequence) for sequence in sequences]

    def dump(self, rank: int) -> list[OverlapSegment]:
        _check(rank, 0)
        return [segment for tier in range(TIERS) for segment in self._segments(rank, tier)]

    def _segments(self, rank: int, tier: int) -> Iterator[OverlapSegment]:
        run: list[tuple[int, _Block]] = []
        for key, block in self._held[rank, tier].items():
            if run and (block.root or block.previous != run[-1][1].sequence):
                yield _segment(tier, run)
                run = []
            run.append((key, block))
        if run:
            yield _segment(tier, run)

    def ranks(self) -> bytes:
        ranks = sorted({rank for (rank, _), held in self._held.items() if held})
        counts = ((rank, *(len(self._held[rank, tier]) for tier in range(TIERS))) for rank in ranks)
        return b"".join(ROW.pack(*row) for row in counts)

    def stats(self) -> IndexStats:
        held = [blocks for blocks in self._held.values() if blocks]
        distinct = {block.sequence for blocks in held for block in blocks.values()}
        entries = chain.from_iterable(blocks.values() for blocks in held)
        size = sum(map(sys.getsizeof, held)) + sum(map(sys.getsizeof, entries))
        return IndexStats(len(distinct), sum(map(len, held)), size)


def _segment(tier: int, run: list[tuple[int, _Block]]) -> OverlapSegment:
    first = run[0][1]
    return OverlapSegment(
        tier,
        first.root,
        first.previous,
        _packed(key for key, _ in run),
        _packed(block.local for _, block in run),
    )


def _packed(hashes: Iterable[int]) -> bytes:
    return b"".join(hash_.to_bytes(8, "little") for hash_ in hashes)


def _hashes(buffer: Buffer) -> list[int]:
    if memoryview(buffer).nbytes % 8:
        raise ValueError("hashes must be whole 64-bit words")
    return [hash_ for (hash_,) in iter_unpack("<Q", buffer)]


def _check(rank: int, tier: int) -> None:
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank} is outside 0..{MAX_RANKS - 1}")
    if not 0 <= tier < TIERS:
        raise ValueError(f"tier {tier} is outside 0..{TIERS - 1}")
