"""Session policy: affinity of sessions to ranks; a subagent starts on its parent's rank."""

from collections import OrderedDict
from random import Random
from typing import Literal, NamedTuple

from kvmesh.bus.messages import Decision, Hints
from kvmesh.router.policies.base import Policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick

MAX_BINDINGS = 65_536
MAX_ID_LENGTH = 256


class Binding(NamedTuple):
    """The rank of a session, and the time at which the binding expires if unused."""

    instance: str
    rank: int
    expires: float


class SessionPolicy(Policy):
    """KV cost with affinity. Bindings follow from the decision stream, so replicas share them.

    `hard`: a bound session stays on its rank, whatever the load, while that rank is eligible.
    `soft`: it moves when another rank is cheaper by more than `spill` times its prompt in blocks.
    """

    def __init__(self, mode: Literal["hard", "soft"], ttl: float, spill: float) -> None:
        self._ttl = ttl
        self._hard = mode == "hard"
        self._spill = spill
        self._bound: OrderedDict[str, Binding] = OrderedDict()

    @property
    def history_s(self) -> float:
        return self._ttl

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.cost(candidates)
        best = pick(cost, model.temperature, rng)
        bound = self._bound_candidate(candidates)
        if bound is None or bound == best:
            return PolicyChoice(best, cost)
        if self._hard:
            return PolicyChoice(bound, cost, "session affinity")
        if cost[bound] - cost[best] > self._spill * candidates.prompt:
            return PolicyChoice(best, cost, "session spilled over")
        return PolicyChoice(bound, cost, "session affinity")

    def on_placed(self, decision: Decision, now: float) -> None:
        key = decision.hints.session
        if not key or len(key) > MAX_ID_LENGTH:
            return
        if decision.hints.session_final:
            self._bound.pop(key, None)
            return
        chosen = decision.chosen
        self._bound[key] = Binding(chosen.instance, chosen.rank, now + self._ttl)
        self._bound.move_to_end(key)
        if len(self._bound) > MAX_BINDINGS:
            self._bound.popitem(last=False)

    def tick(self, now: float) -> None:
        while self._bound:
            key, binding = next(iter(self._bound.items()))
            if binding.expires > now:
                break
            del self._bound[key]

    def _bound_candidate(self, candidates: Candidates) -> int | None:
        binding = self._binding(candidates.request.hints)
        if binding is None or binding.expires <= candidates.now:
            return None
        return candidates.index_of(binding.instance, binding.rank)

    def _binding(self, hints: Hints) -> Binding | None:
        own = self._bound.get(hints.session) if hints.session else None
        if own is None and hints.parent_session:
            return self._bound.get(hints.parent_session)
        return own
