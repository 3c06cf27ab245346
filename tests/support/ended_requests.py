"""Ended requests with blocks, as an oracle has followed them."""

from collections.abc import Sequence
from random import Random

import numpy as np
from msgspec.structs import replace

from kvmesh.bus.messages import Decision, FleetQuestion, Outcome, PromisedLatency, SimulatedPool
from kvmesh.workload.capture import CapturedRound
from support.planned_model import BLOCK, START, TIMES, decision, outcome

POOL = SimulatedPool(
    name="workers", step_s=TIMES.step, prefill_step_s=TIMES.prefill_step, token_s=TIMES.token,
    kv_token_s=TIMES.kv_token, step_tokens=8192, max_sequences=256, kv_tokens=16_384 * BLOCK,
)  # fmt: skip


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


def question(
    fleets: Sequence[Sequence[int]], level: float, budget_s: float = 60.0,
    pools: Sequence[SimulatedPool] = (POOL,), ttft_s: float = 2.0,
) -> FleetQuestion:  # fmt: skip
    return FleetQuestion(
        model="m",
        pools=list(pools),
        fleets=[list(fleet) for fleet in fleets],
        promises=[PromisedLatency(metric="ttft", quantile=0.9, seconds=ttft_s)],
        level=level,
        since=START,
        budget_s=budget_s,
    )
