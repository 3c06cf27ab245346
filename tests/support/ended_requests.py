"""Ended requests with blocks."""

from collections.abc import Sequence
from random import Random

import numpy as np
from msgspec.structs import replace

from kvmesh.bus.messages import Decision, Outcome
from kvmesh.workload.capture import CapturedRound
from support.planned_model import BLOCK, START, decision, outcome


def events(
    name: str, at: float, blocks: Sequence[int], output: int = 50, cached: int = 0,
    session: str | None = None,
) -> tuple[Decision, Outcome]:  # fmt: skip
    """The decision about a request whose prompt has these blocks, and its outcome."""
    placed = decision(name, at, len(blocks) * BLOCK)
    hints = replace(placed.hints, session=session)
    hashes = np.array(blocks, dtype=np.uint64).tobytes()
    ended = replace(outcome(name, at + 1.0, output, cached=cached), time=at + 1.0)
    return replace(placed, sequence_hashes=hashes, hints=hints), ended


def ended(*arguments: object, **more: object) -> CapturedRound:
    placed, end = events(*arguments, **more)  # type: ignore[arg-type]
    return CapturedRound(decision=placed, outcome=end, arrival=placed.time, end=end.time)


def distinct(count: int, rate: float, blocks: int = 64, seed: int = 0) -> list[CapturedRound]:
    """Poisson arrivals of prompts that share nothing."""
    rng, at = Random(seed), START
    found = []
    for number in range(count):
        at += rng.expovariate(rate)
        first = 1 + number * blocks
        found.append(ended(f"r-{number}", at, range(first, first + blocks)))
    return found
