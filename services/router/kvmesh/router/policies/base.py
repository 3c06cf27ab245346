"""How one of several eligible ranks is chosen. Policies are pure: time and rng are passed in."""

from random import Random

import numpy as np

from kvmesh.bus.messages import Decision, Outcome, RouteRequest
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick


class Policy:
    """Base of all policies. Only `choose` must be written; the rest is for policies that learn.

    Decisions made here are told to `placed` in any case. With `history_s` above 0, `placed` and
    `finished` are told every decision and outcome of the model, also those of other replicas, and
    after a restart those of the last `history_s` seconds.
    """

    @property
    def history_s(self) -> float:
        return 0.0

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        """Choose one of at least one candidate; `model` is the cost model of this request."""
        raise NotImplementedError

    def on_placed(self, decision: Decision, now: float) -> None:
        """A request was placed, here or by a replica. May be told the same decision twice."""

    def on_finished(self, outcome: Outcome, now: float) -> None:
        """A placed request has ended."""

    def on_freed(self, request: str, now: float) -> None:
        """A request is over or was given up. Its outcome comes before or after, or never."""

    def admits(self, request: RouteRequest, now: float) -> bool:
        """Whether the request may be placed now; if not, it is asked again until its deadline."""
        return True

    def queue_boost_s(self, request: RouteRequest) -> float:
        """Seconds by which a request counts as come earlier in the queue; inf: it passes it by."""
        return 0.0

    def state(self) -> bytes | None:
        """What the replicas and the next start should know; None if there is nothing."""
        return None

    def merge(self, router: str, state: bytes, own: bool) -> None:
        """Take the `state` of a replica, or the own one of before a restart.

        Raises ValueError if it is unreadable.
        """

    def tick(self, now: float) -> None:
        """House-keeping, about once a second."""


class Kv(Policy):
    """Least KV cost: work to prefill, less what is cached, plus blocks to decode with."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.cost(candidates)
        return PolicyChoice(pick(cost, model.temperature, rng), cost)


class KvMultiplicative(Policy):
    """Prefill times decode: no backlog of the one kind is made good by a lack of the other."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.prefill(candidates) * (candidates.decode + 1)
        if candidates.slowness is not None:
            cost *= candidates.slowness
        if candidates.preference is not None:
            cost *= candidates.preference
        return PolicyChoice(pick(cost, model.temperature, rng), cost)


class LeastLoaded(Policy):
    """Fewest active requests; among those, the smallest share of blocks in use."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = _load(candidates)
        return PolicyChoice(pick(cost, 0, rng), cost)


class PowerOfTwo(Policy):
    """The less loaded one of two drawn at random (Mitzenmacher 2001): no herd, little state."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = _load(candidates)
        if len(candidates) == 1:
            return PolicyChoice(0, cost)
        first, second = rng.sample(range(len(candidates)), 2)
        return PolicyChoice(first if cost[first] <= cost[second] else second, cost)


class LoadAware(Policy):
    """beta times load, relative to the most loaded candidate, less the prompt's cached share."""

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
    """Any rank, each as likely as the next."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        return PolicyChoice(rng.randrange(len(candidates)), np.zeros(len(candidates)))


def _load(candidates: Candidates) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return candidates.requests + candidates.decode / (
        candidates.decode + np.maximum(candidates.capacity, 1.0)
    )
