"""Candidate fleets that an oracle has simulated: the questions to it, and the use of its answers.

An oracle runs the live cores of router, index and engines, so its results contain cache locality
and evictions, which the queue model leaves out. It may be absent, slow or wrong about the present:
nothing waits for an answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from kvmesh.bus.messages import (
    FleetAnswer,
    FleetCandidate,
    FleetQuestion,
    PromisedLatency,
    SimulatedPool,
)
from kvmesh.planner.capacity.queueing import ModelledEngine
from kvmesh.planner.capacity.step_times import FittedStepTimes
from kvmesh.planner.core.arrivals import LoadSeries
from kvmesh.planner.core.fleets import Aim, Counts, Kept
from kvmesh.planner.core.pools import Pool

FRESH_S = 120.0  # age up to which an answer is used
RENEW_S = 60.0  # age from which another one is asked for
NEAR_LEVEL = 0.1
NEAR_TIMES = 0.15
MOST_FLEETS = 5
MOST_WORKERS = 128
FEWEST_REQUESTS = 100  # of the steady part of the load


@dataclass(frozen=True)
class _Expected:
    """The conditions under which an answer is wanted now, in the terms of a question."""

    pools: list[SimulatedPool]
    promises: list[PromisedLatency]
    names: list[str]  # of the promises, in answers
    level: float
    budget_s: float


class SimulatedFleets:
    """The latest answer about one group of pools, and the next question.

    At each evaluation `expect` states the present conditions, `known` returns the fleets of an
    answer that fits them, and `ask` states the fleets of interest. `question` is then due until it
    is answered, or the next evaluation. Times are in seconds.
    """

    def __init__(self) -> None:
        self._expected: _Expected | None = None
        self.question: FleetQuestion | None = None
        self._asked: FleetQuestion | None = None
        self._answered_at = -inf
        self._candidates: list[FleetCandidate] = []

    def expect(
        self,
        pools: Sequence[Pool],
        kinds: Sequence[ModelledEngine],
        aimed: Sequence[Aim],
        level: float,
        budget_s: float,
    ) -> None:
        """State the present conditions; a budget of 0 means that no simulation is wanted."""
        self.question = self._expected = None
        if budget_s <= 0 or level <= 0:
            return
        self._expected = _Expected(
            pools=[_simulated_pool(pool, kind) for pool, kind in zip(pools, kinds, strict=True)],
            promises=[
                PromisedLatency(
                    metric=aim.promise.metric,
                    quantile=aim.promise.quantile,
                    seconds=aim.promise.seconds,
                    request_class=aim.promise.request_class,
                )
                for aim in aimed
            ],
            names=[str(aim.promise) for aim in aimed],
            level=level,
            budget_s=budget_s,
        )

    def known(self, now: float) -> dict[Counts, Kept]:
        """The simulated fleets, if the answer is fresh and fits the present conditions."""
        wanted, asked = self._expected, self._asked
        if wanted is None or asked is None or now - self._answered_at > FRESH_S:
            return {}
        if abs(wanted.level - asked.level) > NEAR_LEVEL * asked.level:
            return {}
        if wanted.promises != asked.promises or len(wanted.pools) != len(asked.pools):
            return {}
        if not all(map(_alike, wanted.pools, asked.pools)):
            return {}
        found: dict[Counts, Kept] = {}
        for candidate in self._candidates:
            shares = _finite(candidate.shares.get(name) for name in wanted.names)
            quantiles = tuple(candidate.quantiles.get(name, 0.0) for name in wanted.names)
            counts = tuple(candidate.workers.get(pool.name, 0) for pool in wanted.pools)
            if shares is not None and isfinite(candidate.busy):
                found[counts] = Kept(shares, quantiles, candidate.busy)
        return found

    def ask(
        self,
        now: float,
        needed: Counts,
        present: Counts,
        fleets: Sequence[Counts],
        series: LoadSeries,
    ) -> None:
        """Ask about `needed`, its neighbours in `fleets` (by cost), and the present fleet.

        Nothing is asked while an answer about all of them is fresh, or while the load has not been
        steady for long enough.
        """
        wanted = self._expected
        steady_s = now - series.steady_since
        if wanted is None or series.level * steady_s < FEWEST_REQUESTS:
            return
        place = fleets.index(needed) if needed in fleets else 0
        beside = [fleets[n] for n in (place - 1, place + 1) if 0 <= n < len(fleets)]
        chosen = [
            fleet
            for fleet in dict.fromkeys([needed, *beside, present])
            if 0 < sum(fleet) <= MOST_WORKERS
        ]
        known = self.known(now)
        renewed = now - self._answered_at < RENEW_S
        if not chosen or (renewed and all(fleet in known for fleet in chosen)):
            return
        self.question = FleetQuestion(
            model="",  # the planner of the model names it
            pools=wanted.pools,
            fleets=[list(fleet) for fleet in chosen[:MOST_FLEETS]],
            promises=wanted.promises,
            level=wanted.level,
            since=series.steady_since,
            budget_s=wanted.budget_s,
        )

    def answered(self, question: FleetQuestion, answer: FleetAnswer, now: float) -> None:
        """Keep an answer, in place of the one before."""
        self._asked, self._candidates = question, answer.candidates
        self._answered_at = now
        self.question = None


def _finite(values: Iterable[float | None]) -> tuple[float, ...] | None:
    """The values, if all of them are known and finite."""
    found = tuple(value for value in values)
    if any(value is None or not isfinite(value) for value in found):
        return None
    return tuple(value for value in found if value is not None)


def _simulated_pool(pool: Pool, kind: ModelledEngine) -> SimulatedPool:
    """The engine of a pool, in a question."""
    times = linear_times(kind)
    return SimulatedPool(
        name=pool.name,
        step_s=times.step,
        prefill_step_s=times.prefill_step,
        token_s=times.token,
        kv_token_s=times.kv_token,
        step_tokens=kind.step_tokens,
        max_sequences=kind.max_sequences,
        kv_tokens=kind.kv_tokens,
        cost=pool.cost,
    )


def linear_times(kind: ModelledEngine) -> FittedStepTimes:
    """The step times of an engine as straight lines, through two points each.

    The points are a quarter of a step and a whole one, and half of the sequences with a quarter and
    with three quarters of the KV memory.
    """
    times = kind.times
    if isinstance(times, FittedStepTimes):
        return times
    few, many = max(kind.step_tokens // 4, 1), max(kind.step_tokens, 2)
    token = max((times.prefill(many) - times.prefill(few)) / (many - few), 0.0)
    sequences, quarter = max(kind.max_sequences // 2, 1), max(kind.kv_tokens / 4, 1.0)
    low, high = times.decode(sequences, quarter), times.decode(sequences, 3 * quarter)
    kv_token = max((high - low) / (2 * quarter), 0.0)
    return FittedStepTimes(
        step=max(low - kv_token * quarter, 0.0),
        prefill_step=max(times.prefill(few) - token * few, 0.0),
        token=token,
        kv_token=kv_token,
    )


def _alike(one: SimulatedPool, other: SimulatedPool) -> bool:
    """True if two engines have the same limits and nearly the same step times."""
    sizes = [(p.name, p.step_tokens, p.max_sequences, p.kv_tokens) for p in (one, other)]
    return sizes[0] == sizes[1] and all(
        abs(a - b) <= NEAR_TIMES * b for a, b in zip(_times(one), _times(other), strict=True)
    )


def _times(pool: SimulatedPool) -> tuple[float, float]:
    """Seconds of a full step of prefill, and of a decode with half of the KV memory in use."""
    times = FittedStepTimes(pool.step_s, pool.prefill_step_s, pool.token_s, pool.kv_token_s)
    return times.prefill(pool.step_tokens), times.decode(1, pool.kv_tokens / 2)
