"""The workloads of `index.py`: prompt families on workers, and a recorded trace on many workers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvmesh.hashing import sequence_hashes

FAMILIES = 40
SHARED = (64, 256)
PRIVATE = (128, 384)


@dataclass(frozen=True)
class Prompt:
    """One conversation that a worker holds completely; it already held its first `known` blocks."""

    worker: int
    known: int
    local: bytes
    sequence: bytes


@dataclass(frozen=True)
class Event:
    """Consecutive blocks of one prompt; `parent` is the block before, None at a prompt's start."""

    worker: int
    parent: int | None
    engine: bytes
    local: bytes


def prompts(workers: int, blocks: int, seed: int = 1) -> Iterator[Prompt]:
    """Fill each worker with `blocks` private blocks behind prefixes of skewed popularity."""
    rng = np.random.default_rng(seed)
    families = [rng.bytes(8 * int(rng.integers(*SHARED, endpoint=True))) for _ in range(FAMILIES)]
    popularity = 1 / np.arange(1, FAMILIES + 1)
    popularity /= popularity.sum()
    for worker in range(workers):
        held: set[int] = set()
        filled = 0
        while filled < blocks:
            family = int(rng.choice(FAMILIES, p=popularity))
            suffix = int(rng.integers(*PRIVATE, endpoint=True))
            local = families[family] + rng.bytes(8 * suffix)
            known = len(families[family]) // 8 if family in held else 0
            yield Prompt(worker, known, local, sequence_hashes(local))
            filled += len(local) // 8 - known
            held.add(family)


def events(prompt: Prompt, size: int) -> Iterator[Event]:
    """Cut a prompt's new blocks into events; engine hashes are the sequence hashes."""
    start = 8 * prompt.known
    parent = int.from_bytes(prompt.sequence[start - 8 : start], "little") if start else None
    for at in range(start, len(prompt.local), 8 * size):
        engine = prompt.sequence[at : at + 8 * size]
        yield Event(prompt.worker, parent, engine, prompt.local[at : at + 8 * size])
        parent = int.from_bytes(engine[-8:], "little")


def interleaved(all_prompts: list[Prompt], size: int) -> list[Event]:
    """The workers' events as a mesh sees them: every worker sends in turn."""
    queues: dict[int, list[Event]] = {}
    for prompt in all_prompts:
        queues.setdefault(prompt.worker, []).extend(events(prompt, size))
    longest = max(map(len, queues.values()))
    return [queue[i] for i in range(longest) for queue in queues.values() if i < len(queue)]


def trace_requests(path: Path, duplication: int, split: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (local, sequence) of each request of a Mooncake trace, its copies interleaved.

    Each trace block of 512 tokens becomes `split` blocks; copies share nothing.
    """
    with path.open() as lines:
        recorded = [np.array(json.loads(line)["hash_ids"], dtype=np.uint64) for line in lines]
    parts = np.arange(split, dtype=np.uint64)
    for ids in recorded:
        blocks = (ids[:, None] * np.uint64(split) + parts).reshape(-1) + np.uint64(1)
        mixed = blocks * np.uint64(0x9E3779B97F4A7C15)
        for copy in range(duplication):
            local = (mixed ^ np.uint64(copy << 48)).tobytes()
            yield local, sequence_hashes(local)
