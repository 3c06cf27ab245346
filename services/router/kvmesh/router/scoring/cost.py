"""The linear KV cost of a candidate, in blocks, and the choice of a candidate by cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np

from kvmesh.router.errors import InvalidRouteRequest
from kvmesh.router.scoring.candidates import Candidates
from kvmesh.router.state.arrays import ZERO, Floats

_ALIASES = {
    "overlap_score_credit": "overlap_credit",
    "overlap_score_weight": "overlap_credit",
    "router_temperature": "temperature",
}
SHORTAGE_COST = 1e6  # per missing block: more than all other terms together
_OVERRIDES = ("prefill_weight", "request_weight", "credit_decay", "temperature")


@dataclass(frozen=True)
class CostModel:
    """Weights of the cost; `credits` is the value of an overlapping block of each tier."""

    credits: tuple[float, float, float, float] = (1.0, 0.75, 0.25, 0.25)
    prefill_weight: float = 3.0
    request_weight: float = 0.0
    credit_decay: float = 0.0
    temperature: float = 0.0

    @cached_property
    def _credits(self) -> Floats:
        return np.array(self.credits)

    @cached_property
    def _weight(self) -> Floats:
        return np.array(self.prefill_weight)  # scales arrays faster than a float does

    def prefill(self, candidates: Candidates) -> Floats:
        """Blocks to prefill before this request's first token, its own included.

        With a credit decay d, credits are divided by 1 + d · e, where e is the candidate's prefill
        backlog beyond the least one, in lengths of this prompt.
        """
        credited: Floats = candidates.overlap.dot(self._credits)
        if self.credit_decay:
            excess = (candidates.prefill - candidates.prefill.min()) / candidates.prompt
            credited /= 1 + self.credit_decay * excess
        blocks: Floats = candidates.prefill + candidates.prompt
        blocks -= credited
        return np.maximum(blocks, ZERO, out=blocks)

    def cost(self, candidates: Candidates) -> Floats:
        """prefill_weight · prefill + decode + request_weight · active requests, in blocks.

        The sum is multiplied by the candidate's slowness. Each missing block adds SHORTAGE_COST:
        the request would wait there for running ones to end, and later ones behind it (ADR 9).
        """
        cost = self.prefill(candidates)
        if self.prefill_weight != 1:
            cost *= self._weight
        cost += candidates.decode
        if self.request_weight:
            cost += self.request_weight * candidates.requests
        if candidates.slowness is not None:
            cost *= candidates.slowness
        shortage = candidates.shortage
        if shortage is not None:
            cost += SHORTAGE_COST * shortage
        return cost if candidates.preference is None else cost * candidates.preference

    def overridden(self, overrides: Mapping[str, float]) -> "CostModel":
        """This model with a request's own weights; raises InvalidRouteRequest naming a bad one."""
        model = self
        for name, value in overrides.items():
            key = _ALIASES.get(name, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRouteRequest(f"override {name}: {value} is not a weight")
            if key == "overlap_credit":
                model = replace(model, credits=(value, *model.credits[1:]))
            elif key in _OVERRIDES:
                model = replace(model, **{key: value})  # type: ignore[arg-type]
            else:
                known = ", ".join(("overlap_credit", *_OVERRIDES))
                raise InvalidRouteRequest(f"override {name!r} is none of {known}")
        return model


def pick(cost: Floats, temperature: float, rng: Random) -> int:
    """Index of the cheapest candidate, ties at random; with a temperature, softmax over −cost.

    Costs are normalised to their range first, so that a temperature means the same at any load.
    Candidates short of more blocks than the cheapest are never drawn.
    """
    low = cost[cost.argmin()]
    if temperature <= 0:
        ties: list[int] = (cost == low).nonzero()[0].tolist()
        return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]
    drawable = (cost < low + SHORTAGE_COST).nonzero()[0]
    excess = cost[drawable] - low
    span = float(excess.max())
    if span == 0:
        return int(drawable[rng.randrange(len(drawable))])
    total = np.exp(excess / (-span * temperature)).cumsum()
    at = min(int(total.searchsorted(rng.random() * total[-1], "right")), len(drawable) - 1)
    return int(drawable[at])
