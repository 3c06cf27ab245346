"""Session affinity with a spill-over rule: a routing policy of your own.

A policy must not block. It takes randomness from `rng` alone, so a simulation can be repeated.
"""

from random import Random

from kvmesh.bus.messages import Decision
from kvmesh.router.policies.base import Policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick


class StickyWithSpill(Policy):
    """A session stays on its rank until that rank runs 4 requests more than the idlest one."""

    spill = 4

    def __init__(self) -> None:
        self._rank_of: dict[str, tuple[str, int]] = {}

    @property
    def history_s(self) -> float:
        return 600.0  # follow all decisions, after a restart those of the last ten minutes

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.cost(candidates)
        best = pick(cost, model.temperature, rng)
        session = candidates.request.hints.session
        if session not in self._rank_of:
            return PolicyChoice(best, cost)
        bound = candidates.index_of(*self._rank_of[session])
        requests = candidates.requests
        if bound is None or requests[bound] - requests.min() > self.spill:
            return PolicyChoice(best, cost, "spilled over")
        return PolicyChoice(bound, cost, "stayed")

    def on_placed(self, decision: Decision, now: float) -> None:
        if decision.hints.session:
            chosen = decision.chosen
            self._rank_of[decision.hints.session] = (chosen.instance, chosen.rank)
