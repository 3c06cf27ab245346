"""Base class of policies and the simple ones. Policies are pure: time and rng are passed in."""

from math import isfinite
from random import Random
from typing import Protocol

import numpy as np

from kvmesh.bus.messages import Decision, Outcome, RouteRequest
from kvmesh.returns.forecaster import ReturnChance
from kvmesh.returns.tool_calls import ReportedTools
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick
from kvmesh.router.state.rank_speeds import RankSpeeds


class Returns(Protocol):
    """Forecasts of the returns of sessions; `tools` are those that harnesses have reported."""

    @property
    def tools(self) -> ReportedTools: ...

    def within(self, session: str, seconds: float, now: float) -> ReturnChance | None:
        """The probability that a session is back within that time; None if unknown."""
        ...


class Policy:
    """Base of all policies. Only `choose` is required; the rest is for policies that learn.

    `on_placed` is called with this router's decisions. With `history_s` above 0, `on_placed` and
    `on_finished` are called with the decisions and outcomes of all replicas, and after a restart
    with those of the last `history_s` seconds.
    """

    @property
    def history_s(self) -> float:
        """Seconds of the decision stream to replay at start; 0: do not follow it."""
        return 0.0

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        """Choose among at least one candidate; `model` is the cost model of this request."""
        raise NotImplementedError

    def on_placed(self, decision: Decision, now: float) -> None:
        """A request was placed, here or by a replica; may be called twice with a decision."""

    def on_finished(self, outcome: Outcome, now: float) -> None:
        """A placed request has ended."""

    def on_freed(self, request: str, now: float) -> None:
        """A request ended or was given up; its outcome arrives before, after or never."""

    def follow(self, returns: Returns | None, speeds: RankSpeeds) -> None:
        """Called at start with the router's forecasts of returns, if it learns them, and speeds."""

    def admits(self, request: RouteRequest, now: float) -> bool:
        """True if the request may be placed now; else called again until its deadline."""
        return True

    def queue_boost_s(self, request: RouteRequest) -> float:
        """Seconds subtracted from the arrival time in the queue; inf bypasses the queue."""
        return 0.0

    def tick(self, now: float) -> None:
        """Housekeeping, about once a second."""


class Kv(Policy):
    """Least KV cost: blocks to prefill, less the cached ones, plus active blocks."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.cost(candidates)
        chosen = pick(cost, model.temperature, rng)
        return PolicyChoice(chosen, cost, _wait_note(candidates, chosen))


class KvMultiplicative(Policy):
    """Prefill times decode: little of one does not compensate for much of the other."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.prefill(candidates) * (candidates.decode + 1)
        if candidates.slowness is not None:
            cost *= candidates.slowness
        if candidates.preference is not None:
            cost *= candidates.preference
        return PolicyChoice(pick(cost, model.temperature, rng), cost)


class LeastLoaded(Policy):
    """Fewest active requests; among equals, the smallest share of blocks in use."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = _load(candidates)
        return PolicyChoice(pick(cost, 0, rng), cost)


class PowerOfTwo(Policy):
    """The less loaded of two drawn at random (Mitzenmacher 2001): avoids herding."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = _load(candidates)
        if len(candidates) == 1:
            return PolicyChoice(0, cost)
        first, second = rng.sample(range(len(candidates)), 2)
        return PolicyChoice(first if cost[first] <= cost[second] else second, cost)


class LoadAware(Policy):
    """beta times load relative to the most loaded candidate, less the prompt's cached share."""

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        load = candidates.prefill + candidates.decode
        cached = candidates.overlap.sum(1) / candidates.prompt
        cost = self._beta * load / load.max() - cached
        return PolicyChoice(pick(cost, model.temperature, rng), cost)


class RoundRobin(Policy):
    """Each rank in turn, in the order of their slots."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        chosen = int(candidates.slots.searchsorted(self._last, "right")) % len(candidates)
        self._last = int(candidates.slots[chosen])
        return PolicyChoice(chosen, np.zeros(len(candidates)))


class Uniform(Policy):
    """A uniformly random rank."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        return PolicyChoice(rng.randrange(len(candidates)), np.zeros(len(candidates)))


def _wait_note(candidates: Candidates, chosen: int) -> str | None:
    """The note on a request that is placed where its blocks are not free yet, else None."""
    shortage = candidates.shortage
    if shortage is None or not shortage[chosen]:
        return None
    seconds = float(candidates.wait_s(shortage)[chosen])
    return f"waits about {seconds:.1f} s for memory" if isfinite(seconds) else "waits for memory"


def _load(candidates: Candidates) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return candidates.requests + candidates.decode / (
        candidates.decode + np.maximum(candidates.capacity, 1.0)
    )
