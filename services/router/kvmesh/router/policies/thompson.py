"""Learning which worker is fast, for whom: Thompson sampling with `kv` as the prior belief.

A linear model (Agrawal and Goyal 2013) predicts how long a request takes on a candidate from the
terms of its KV cost; what the terms do not explain is learned per rank and per (rank, prefix
family). The prior says exactly what `kv` says, so without evidence the order is that of `kv`.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.bus.messages import BanditStats, Decision, Outcome
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.policies.base import Policy
from kvmesh.router.policies.thompson_trust import Saturation, Trust
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick
from kvmesh.router.state.arrays import Floats
from kvmesh.runtime.lru import LruCache

FEATURES = 5  # 1 and the logarithms of cost, prefill, decode, requests
PRIOR = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
CERTAINTY = np.diag([1e-3, 5.0, 5.0, 5.0, 5.0])  # of the prior: how long a block takes is unknown
SHRINK = 5.0  # evidence that an offset is zero, in observations
REACH = 2.0  # at full trust, take what `kv` finds dearer than its best by this share, no more
FORBIDDEN = 1e6
ITL_WEIGHT = 0.5
MOST_DRAFTS = 4096
MOST_OFFSETS = 2048
_stats = msgspec.msgpack.Decoder(BanditStats)


@dataclass(slots=True)
class ThompsonTrial:
    """A placed request whose outcome is awaited.

    `waited` is its time in the queue, which is no matter of where it went. Where policy and `kv`
    disagreed, `held_out` says whether it was left to `kv`, of whose choice `expected` was thought.
    """

    context: Floats
    rank: str
    family: str
    since: float
    waited: float = 0.0
    held_out: bool | None = None
    expected: float = 0.0


class Evidence:
    """Sums over outcomes, as this replica or another one has seen them.

    Everything fades with each new outcome, also offsets that it says nothing of: what is not tried
    for long becomes uncertain again. `offsets` holds count, sum, and `age` when last brought up.
    """

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self.age = 0
        self.count = 0.0
        self.gram: NDArray[np.float64] = np.zeros((FEATURES, FEATURES))
        self.moment: Floats = np.zeros(FEATURES)
        self.offsets: OrderedDict[str, tuple[float, float, int]] = OrderedDict()

    def observe(self, context: Floats, value: float) -> None:
        self.age += 1
        self.count = self.count * self._forgetting + 1
        self.gram = self.gram * self._forgetting + np.outer(context, context)
        self.moment = self.moment * self._forgetting + context * value

    def residual(self, name: str, value: float) -> None:
        count, total = self.offset(name)
        self.offsets[name] = (count + 1, total + value, self.age)
        self.offsets.move_to_end(name)
        if len(self.offsets) > MOST_OFFSETS:
            self.offsets.popitem(last=False)

    def offset(self, name: str) -> tuple[float, float]:
        """Count and sum of residuals, as much as they are worth now."""
        count, total, age = self.offsets.get(name, (0.0, 0.0, self.age))
        worth = self._forgetting ** (self.age - age)
        return count * worth, total * worth

    def stats(self) -> BanditStats:
        return BanditStats(
            count=self.count,
            gram=self.gram.ravel().tolist(),
            moment=self.moment.tolist(),
            offsets={name: self.offset(name) for name in self.offsets},
        )

    @classmethod
    def of(cls, stats: BanditStats, forgetting: float) -> "Evidence":
        """Raises ValueError unless the sums are of this form."""
        evidence = cls(forgetting)
        evidence.count = stats.count
        evidence.gram = np.array(stats.gram).reshape(FEATURES, FEATURES)
        evidence.moment = np.array(stats.moment).reshape(FEATURES)
        evidence.offsets = OrderedDict((name, (*sums, 0)) for name, sums in stats.offsets.items())
        return evidence


class Thompson(Policy):
    """Samples from what is believed and takes the best; `kv` until `least` outcomes are known.

    Smaller is better: the value of an outcome is log(TTFT) plus half of log(time per token).
    An outcome that does not come within `feedback` seconds counts as a first token that late.
    How far it departs from `kv` is for its Trust, and not at all in saturation.
    """

    def __init__(self, exploration: float, forgetting: float, feedback: float, least: int) -> None:
        self._exploration = exploration
        self._forgetting = forgetting
        self._feedback = feedback
        self._least = least
        self._trust = Trust()
        self._saturation = Saturation()
        self._own = Evidence(forgetting)
        self._others: dict[str, Evidence] = {}
        self._drafts: LruCache[str, ThompsonTrial] = LruCache(MOST_DRAFTS)
        self._trials: OrderedDict[str, ThompsonTrial] = OrderedDict()
        self._mean: Floats = PRIOR
        self._spread: NDArray[np.float64] = np.eye(FEATURES)
        self._normal: np.random.Generator | None = None
        self._itl = 0.05
        self._believe()

    @property
    def follows(self) -> float:
        return self._feedback

    @property
    def evidence(self) -> float:
        """Outcomes known here and in the replicas, old ones for less."""
        return self._own.count + sum(other.count for other in self._others.values())

    # choosing

    def choose(self, view: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.cost(view)
        best = pick(cost, model.temperature, rng)
        saturated = self._saturation.look(view.prefill)
        contexts = _contexts(view, model, cost)
        rank_of, family = partial(_name, view), _family(view.request.sequence_hashes)
        trial = ThompsonTrial(contexts[best], rank_of(best), family, view.now)
        self._draft(view.request.request, trial)
        if self.evidence < self._least:
            return PolicyChoice(best, cost, "learning")
        if saturated:
            return PolicyChoice(best, cost, "saturated: as kv")
        value = self._sample(view, contexts, family, rng)
        value[cost > (1 + REACH * self._trust.radius) * (cost.min() + 1)] += FORBIDDEN
        chosen = int(value.argmin())
        if chosen == best:
            return PolicyChoice(best, value)
        trial.expected = float(contexts[best] @ self._mean)
        trial.held_out = self._trust.holds_out(rng)
        if trial.held_out:
            return PolicyChoice(best, value, "held out: as kv")
        trial.context, trial.rank = contexts[chosen], rank_of(chosen)
        return PolicyChoice(chosen, value)

    def _draft(self, request: str, trial: ThompsonTrial) -> None:
        self._drafts.put(request, trial)

    def _sample(
        self, view: Candidates, contexts: NDArray[np.float64], family: str, rng: Random
    ) -> Floats:
        if self._normal is None:
            self._normal = np.random.default_rng(rng.getrandbits(64))
        normal, scale = self._normal, self._exploration
        weights = self._mean + scale * (self._spread @ normal.standard_normal(FEATURES))
        value: Floats = contexts @ weights
        names = [_name(view, at) for at in range(len(view))]
        for keys in (names, [f"{name} {family}" for name in names]):
            counts, totals = self._offsets(keys)
            noise = normal.standard_normal(len(view)) / np.sqrt(counts + SHRINK)
            value += totals / (counts + SHRINK) + scale * noise
        return value

    def _offsets(self, names: list[str]) -> tuple[Floats, Floats]:
        sums = np.zeros((len(names), 2))
        for evidence in (self._own, *self._others.values()):
            sums += np.array([evidence.offset(name) for name in names])
        return sums[:, 0], sums[:, 1]

    # learning

    def placed(self, decision: Decision, now: float) -> None:
        trial = self._drafts.pop(decision.request)
        if trial is not None:
            trial.waited = decision.wait_s
            self._trials[decision.request] = trial

    def finished(self, outcome: Outcome, now: float) -> None:
        trial = self._trials.pop(outcome.request, None)
        if trial is None:
            return
        if outcome.ttft_s is not None:
            self._learn(trial, outcome.ttft_s - trial.waited, _time_per_token(outcome))
        elif outcome.finish == "error":
            self._learn(trial, self._feedback, None)

    def tick(self, now: float) -> None:
        while self._trials:
            request, trial = next(iter(self._trials.items()))
            if trial.since + self._feedback > now:
                break
            del self._trials[request]
            self._learn(trial, self._feedback, None)

    def _learn(self, trial: ThompsonTrial, ttft: float, itl: float | None) -> None:
        if itl is not None:
            self._itl += (itl - self._itl) * 0.05
        value = math.log(max(ttft, 1e-4)) + ITL_WEIGHT * math.log(max(itl or self._itl, 1e-5))
        if trial.held_out is not None:
            self._trust.judge(trial.held_out, value - trial.expected)
        residual = value - float(trial.context @ self._mean)
        counts, totals = self._offsets([trial.rank])
        own = float(totals[0] / (counts[0] + SHRINK))
        self._own.observe(trial.context, value)
        self._own.residual(trial.rank, residual)
        self._own.residual(f"{trial.rank} {trial.family}", residual - own)
        self._believe()

    def _believe(self) -> None:
        gram = CERTAINTY + self._own.gram
        moment = CERTAINTY @ PRIOR + self._own.moment
        for other in self._others.values():
            gram = gram + other.gram
            moment = moment + other.moment
        covariance = np.asarray(np.linalg.inv(gram), np.float64)
        self._mean = covariance @ moment
        self._spread = np.asarray(np.linalg.cholesky((covariance + covariance.T) / 2), np.float64)

    # sharing

    def state(self) -> bytes | None:
        return msgspec.msgpack.encode(self._own.stats()) if self._own.count else None

    def merge(self, router: str, state: bytes, own: bool) -> None:
        try:
            evidence = Evidence.of(_stats.decode(state), self._forgetting)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        if own:
            self._own = evidence
        else:
            self._others[router] = evidence
        self._believe()


def _contexts(view: Candidates, model: CostModel, cost: Floats) -> NDArray[np.float64]:
    columns = (cost, model.prefill(view), np.maximum(view.decode, 0.0), view.requests)
    return np.column_stack((np.ones(len(view)), np.log1p(np.array(columns)).T))


def _name(view: Candidates, at: int) -> str:
    rank = view.rank(at)
    return f"{rank.worker}/{rank.rank}"


def _family(sequence: bytes) -> str:
    """Prompts that begin alike: one agent program with its tools and system prompt."""
    return sequence[:HASH_BYTES].hex()


def _time_per_token(outcome: Outcome) -> float | None:
    if outcome.ttft_s is None or outcome.output_tokens < 2:
        return None
    return (outcome.total_s - outcome.ttft_s) / (outcome.output_tokens - 1)
