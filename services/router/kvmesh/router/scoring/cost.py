"""The KV cost of a candidate, in blocks of prefill, and the choice of a candidate by cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np

from kvmesh.placement_rules.weights import (
    CROWD_WEIGHT,
    DECODE_WEIGHT,
    MOST_CROWD_WEIGHT,
    STALL_WEIGHT,
)
from kvmesh.router.errors import InvalidRouteRequest
from kvmesh.router.scoring.candidates import Candidates
from kvmesh.router.state.arrays import ZERO, Floats

_ALIASES = {  # Dynamo's names
    "overlap_score_credit": "overlap_credit",
    "overlap_score_credit_decay": "credit_decay",
    "overlap_score_weight": "prefill_weight",
    "prefill_load_scale": "prefill_weight",
    "decode_active_request_weight": "request_weight",
    "router_temperature": "temperature",
}
SHORTAGE_COST = 1e6  # per missing block: more than all other terms together
WAIT_WEIGHT = 4.0  # of the wait for memory: later requests wait behind this one
LINEAR_WEIGHT = 3.0  # of a block to prefill, where the cost is linear without a set weight
ANSWER_WEIGHT = 0.4  # of a later end of the answer, relative to a later first token
COPY_WEIGHT = 2.0  # of an uncached block, for the copies that it evicts and the ranks it delays
FAIR_SHARE = 1.2  # of the mean of recent prompts
BALANCE_WEIGHT = 4.0  # of each further mean, in lengths of the prompt, on a rank with at least
BUSY_REQUESTS = 4.0  # active requests; fewer count in proportion
_STALL, _COPY = np.array(STALL_WEIGHT), np.array(1 + COPY_WEIGHT)
_CROWD, _DECODE = np.array(CROWD_WEIGHT), np.array(DECODE_WEIGHT)
_FAIR, _MOST = np.array(FAIR_SHARE), np.array(MOST_CROWD_WEIGHT)
_BUSY = np.array(BUSY_REQUESTS)
_OVERRIDES = ("prefill_weight", "request_weight", "credit_decay", "temperature")


@dataclass(frozen=True)
class CostModel:
    """Weights of the cost; `credits` is the value of an overlapping block of each tier.

    With a `prefill_weight` the cost is linear. Without one, what a placement costs others decides
    the weight of a block to prefill (ADR 44).
    """

    credits: tuple[float, float, float, float] = (1.0, 0.75, 0.25, 0.25)
    prefill_weight: float | None = None
    request_weight: float = 0.0
    credit_decay: float = 0.0
    temperature: float = 0.0

    @cached_property
    def _credits(self) -> Floats:
        return np.array(self.credits)

    def prefill(self, candidates: Candidates) -> Floats:
        """Blocks to prefill before this request's first token, its own included."""
        blocks: Floats = candidates.prefill + candidates.prompt
        blocks -= self._credited(candidates)
        return np.maximum(blocks, ZERO, out=blocks)

    def _credited(self, candidates: Candidates) -> Floats:
        """Blocks of the prompt that need no prefill.

        A block that is loaded from the node saves no more than the part of its computing time that
        its load, as measured, does not take. With a credit decay d, credits are divided by
        1 + d · e, where e is the candidate's prefill backlog beyond the least one, in lengths of
        this prompt.
        """
        table = candidates.table
        if table.loads_measured:
            saved = 1 - table.load_ratio.take(candidates.slots)
            worth = np.minimum(self._credits, np.maximum(saved, ZERO, out=saved)[:, None])
            worth[:, 0] = self._credits[0]
            credited: Floats = (candidates.overlap * worth).sum(1)
        else:
            credited = candidates.overlap.dot(self._credits)
        if self.credit_decay:
            excess = (candidates.prefill - candidates.prefill.min()) / candidates.prompt
            credited /= 1 + self.credit_decay * excess
        return credited

    def cost(self, candidates: Candidates) -> Floats:
        """The cost of each candidate: linear with a `prefill_weight`, else with its effects.

        A linear cost is multiplied by the candidate's slowness. Without a weight, the slowness
        multiplies the time of the request's answer, which counts by ANSWER_WEIGHT, and its square
        root the time until the first token, since the backlog of a slow rank shows the rest. The
        effects on others are not multiplied: the load of a slow rank, whose requests stay longer,
        shows them already (ADR 53). Where blocks are missing, the request would wait for running
        ones to end, and later ones behind it.
        """
        weight, slowness = self.prefill_weight, candidates.slowness
        cost = self._effects(candidates) if weight is None else self._linear(candidates, weight)
        if self.request_weight:
            cost += self.request_weight * candidates.requests
        if slowness is not None:
            if weight is not None:
                cost *= slowness
            else:
                cost += (np.sqrt(slowness) - 1) * self.prefill(candidates)
                if candidates.answer is not None:
                    answer = candidates.answer * slowness
                    answer -= answer[answer.argmin()]
                    answer *= ANSWER_WEIGHT
                    cost += answer
        shortage = candidates.shortage
        if shortage is not None:
            cost += self._lack(candidates, shortage)
        return cost if candidates.preference is None else cost * candidates.preference

    def _linear(self, candidates: Candidates, weight: float) -> Floats:
        """weight · prefill + decode."""
        cost = self.prefill(candidates)
        if weight != 1:
            cost *= weight
        cost += candidates.decode
        return cost

    def _effects(self, candidates: Candidates) -> Floats:
        """The wait for the first token, and what the placement costs others, in blocks of prefill.

        The uncached blocks of the prompt count once for its own first token, COPY_WEIGHT times for
        the blocks that they evict, and STALL_WEIGHT times for each active request that stands still
        while they are computed. Active blocks count more on a crowded rank, whose decode steps are
        long. Recent prompts beyond FAIR_SHARE of the mean count too while the rank is busy: a rank
        that all prompts prefer, since it alone holds their common prefix, gives some to a second
        one. A session alone stays where it is.
        """
        own: Floats = candidates.prompt - self._credited(candidates)
        np.maximum(own, ZERO, out=own)
        cost: Floats = candidates.requests * _STALL
        cost += _COPY
        cost *= own
        cost += candidates.prefill
        decode, table, slots = candidates.decode, candidates.table, candidates.slots
        crowd = decode / table.usable_blocks.take(slots)
        crowd *= crowd
        crowd *= _CROWD
        np.minimum(crowd, _MOST, out=crowd)
        crowd += _DECODE
        crowd *= decode
        cost += crowd
        recent = table.recent_blocks.take(slots)
        mean = float(np.add.reduce(recent)) / len(recent)
        if recent[recent.argmax()] > FAIR_SHARE * mean:
            recent *= 1 / mean
            recent -= _FAIR
            np.maximum(recent, ZERO, out=recent)
            recent *= np.minimum(candidates.requests, _BUSY)
            recent *= BALANCE_WEIGHT / BUSY_REQUESTS * candidates.prompt
            cost += recent
        return cost

    def _lack(self, candidates: Candidates, shortage: Floats) -> Floats:
        """The cost of missing blocks: the time until running requests have freed them (ADR 55).

        SHORTAGE_COST for each, where that is not known, and in a linear cost.
        """
        cost: Floats = SHORTAGE_COST * shortage
        if self.prefill_weight is None and candidates.block_s:
            seconds = candidates.wait_s(shortage)
            cost = np.where(np.isinf(seconds), cost, WAIT_WEIGHT / candidates.block_s * seconds)
        return cost

    def overridden(self, overrides: Mapping[str, float]) -> "CostModel":
        """This model with a request's own weights; raises InvalidRouteRequest naming a bad one.

        A credit above 1 counts as 1: a block saves at most its own prefill. With more, a rank that
        holds half of a prompt would equal one that holds all of it.
        """
        model = self
        for name, value in overrides.items():
            key = _ALIASES.get(name, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRouteRequest(f"override {name}: {value} is not a weight")
            if key == "overlap_credit":
                model = replace(model, credits=(min(value, 1.0), *model.credits[1:]))
            elif key in _OVERRIDES:
                model = replace(model, **{key: value})  # type: ignore[arg-type]
            else:
                known = ", ".join(("overlap_credit", *_OVERRIDES))
                raise InvalidRouteRequest(f"override {name!r} is none of {known}")
        return model


def pick(cost: Floats, temperature: float, rng: Random) -> int:
    """Index of the cheapest candidate, ties at random; with a temperature, softmax over −cost.

    Costs are normalised to their range first, so that a temperature means the same at any load.
    Candidates that cost SHORTAGE_COST more than the cheapest are never drawn.
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
