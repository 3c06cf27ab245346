"""Thompson policy: learns request durations per rank, with `kv` as the prior.

A linear model (Agrawal and Goyal 2013) predicts the duration of a request on a candidate from the
terms of its KV cost; the residual is learned per rank and per (rank, prefix family). The prior is
the order of `kv`, so without evidence the policy decides as `kv`.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.bus.messages import BanditStats, Decision, LearnerReport, MessageDecoder, Outcome
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.policies.base import Policy
from kvmesh.router.policies.thompson_trust import Saturation, Trust
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick
from kvmesh.router.state.arrays import Floats
from kvmesh.runtime.lru import LruCache

FEATURES = 5  # 1 and the logarithms of cost, prefill, decode, requests
PRIOR = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
PRIOR_PRECISION = np.diag([1e-3, 5.0, 5.0, 5.0, 5.0])  # the time of a block is unknown
OFFSET_PRIOR = 5.0  # weight of a zero offset, in observations
MAX_EXTRA_COST = 2.0  # maximum cost above the best of `kv`, as a share of it, at full trust
FORBIDDEN = 1e6
ITL_WEIGHT = 0.5
MAX_PROPOSED = 4096
MAX_OFFSETS = 2048
_stats = MessageDecoder(BanditStats)


@dataclass(slots=True)
class ThompsonTrial:
    """A request whose outcome is awaited.

    `waited` is its time in the queue, which does not depend on the rank. Where the policy and `kv`
    disagreed, `held_out` says whether `kv` decided, and `expected` is the predicted value of the
    choice of `kv`.
    """

    context: Floats
    rank: str
    family: str
    since: float
    waited: float = 0.0
    held_out: bool | None = None
    expected: float = 0.0


class Evidence:
    """Sums over the outcomes that one replica observed.

    All sums decay with each outcome, also the offsets of other ranks: a rank without recent
    outcomes becomes uncertain again. `offsets` holds count, sum and the `age` of their last update.
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
        if len(self.offsets) > MAX_OFFSETS:
            self.offsets.popitem(last=False)

    def offset(self, name: str) -> tuple[float, float]:
        """Count and sum of residuals, decayed to the present."""
        count, total, age = self.offsets.get(name, (0.0, 0.0, self.age))
        decay = self._forgetting ** (self.age - age)
        return count * decay, total * decay

    def stats(self) -> BanditStats:
        return BanditStats(
            count=self.count,
            gram=self.gram.ravel().tolist(),
            moment=self.moment.tolist(),
            offsets={name: self.offset(name) for name in self.offsets},
        )

    @classmethod
    def of(cls, stats: BanditStats, forgetting: float) -> "Evidence":
        """The evidence in a message; raises ValueError if its shapes are wrong."""
        evidence = cls(forgetting)
        evidence.count = stats.count
        evidence.gram = np.array(stats.gram).reshape(FEATURES, FEATURES)
        evidence.moment = np.array(stats.moment).reshape(FEATURES)
        evidence.offsets = OrderedDict((name, (*sums, 0)) for name, sums in stats.offsets.items())
        return evidence


class Thompson(Policy):
    """Samples from the posterior and chooses the best; decides as `kv` below `min_outcomes`.

    The value of an outcome, lower is better, is log(TTFT) plus half of log(time per token). An
    outcome missing after `feedback_s` seconds counts as a first token that late. Its Trust bounds
    departures from `kv`; in saturation there are none.
    """

    def __init__(
        self, exploration: float, forgetting: float, feedback_s: float, min_outcomes: int
    ) -> None:
        self._exploration = exploration
        self._forgetting = forgetting
        self._feedback_s = feedback_s
        self._min_outcomes = min_outcomes
        self._trust = Trust()
        self._saturation = Saturation()
        self._own = Evidence(forgetting)
        self._others: dict[str, Evidence] = {}
        self._proposed: LruCache[str, ThompsonTrial] = LruCache(MAX_PROPOSED)
        self._trials: OrderedDict[str, ThompsonTrial] = OrderedDict()
        self._mean: Floats = PRIOR
        self._spread: NDArray[np.float64] = np.eye(FEATURES)
        self._normal: np.random.Generator | None = None
        self._itl = 0.05
        self._update_posterior()

    @property
    def history_s(self) -> float:
        return self._feedback_s

    @property
    def evidence(self) -> float:
        """Number of outcomes of all replicas, decayed by age."""
        return self._own.count + sum(other.count for other in self._others.values())

    # choosing

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        cost = model.cost(candidates)
        best = pick(cost, model.temperature, rng)
        saturated = self._saturation.observe(candidates.prefill)
        contexts = _contexts(candidates, model, cost)
        rank_of, family = partial(_name, candidates), _family(candidates.request.sequence_hashes)
        trial = ThompsonTrial(contexts[best], rank_of(best), family, candidates.now)
        self._propose(candidates.request.request, trial)
        if self.evidence < self._min_outcomes:
            return PolicyChoice(best, cost, "learning")
        if saturated:
            return PolicyChoice(best, cost, "saturated: as kv")
        value = self._sample(candidates, contexts, family, rng)
        value[cost > (1 + MAX_EXTRA_COST * self._trust.radius) * (cost.min() + 1)] += FORBIDDEN
        chosen = int(value.argmin())
        if chosen == best:
            return PolicyChoice(best, value)
        trial.expected = float(contexts[best] @ self._mean)
        trial.held_out = self._trust.holds_out(rng)
        if trial.held_out:
            return PolicyChoice(best, value, "held out: as kv")
        trial.context, trial.rank = contexts[chosen], rank_of(chosen)
        return PolicyChoice(chosen, value)

    def _propose(self, request: str, trial: ThompsonTrial) -> None:
        self._proposed.put(request, trial)

    def _sample(
        self, candidates: Candidates, contexts: NDArray[np.float64], family: str, rng: Random
    ) -> Floats:
        if self._normal is None:
            self._normal = np.random.default_rng(rng.getrandbits(64))
        normal, scale = self._normal, self._exploration
        weights = self._mean + scale * (self._spread @ normal.standard_normal(FEATURES))
        value: Floats = contexts @ weights
        names = [_name(candidates, at) for at in range(len(candidates))]
        for keys in (names, [f"{name} {family}" for name in names]):
            counts, totals = self._offsets(keys)
            noise = normal.standard_normal(len(candidates)) / np.sqrt(counts + OFFSET_PRIOR)
            value += totals / (counts + OFFSET_PRIOR) + scale * noise
        return value

    def _offsets(self, names: list[str]) -> tuple[Floats, Floats]:
        sums = np.zeros((len(names), 2))
        for evidence in (self._own, *self._others.values()):
            sums += np.array([evidence.offset(name) for name in names])
        return sums[:, 0], sums[:, 1]

    # learning

    def on_placed(self, decision: Decision, now: float) -> None:
        trial = self._proposed.pop(decision.request)
        if trial is not None:
            trial.waited = decision.wait_s
            self._trials[decision.request] = trial

    def on_finished(self, outcome: Outcome, now: float) -> None:
        trial = self._trials.pop(outcome.request, None)
        if trial is None:
            return
        if outcome.ttft_s is not None:
            self._learn(trial, outcome.ttft_s - trial.waited, _time_per_token(outcome))
        elif outcome.finish == "error":
            self._learn(trial, self._feedback_s, None)

    def tick(self, now: float) -> None:
        while self._trials:
            request, trial = next(iter(self._trials.items()))
            if trial.since + self._feedback_s > now:
                break
            del self._trials[request]
            self._learn(trial, self._feedback_s, None)

    def _learn(self, trial: ThompsonTrial, ttft: float, itl: float | None) -> None:
        if itl is not None:
            self._itl += (itl - self._itl) * 0.05
        value = math.log(max(ttft, 1e-4)) + ITL_WEIGHT * math.log(max(itl or self._itl, 1e-5))
        if trial.held_out is not None:
            self._trust.record(trial.held_out, value - trial.expected)
        residual = value - float(trial.context @ self._mean)
        counts, totals = self._offsets([trial.rank])
        own = float(totals[0] / (counts[0] + OFFSET_PRIOR))
        self._own.observe(trial.context, value)
        self._own.residual(trial.rank, residual)
        self._own.residual(f"{trial.rank} {trial.family}", residual - own)
        self._update_posterior()

    def _update_posterior(self) -> None:
        gram = PRIOR_PRECISION + self._own.gram
        moment = PRIOR_PRECISION @ PRIOR + self._own.moment
        for other in self._others.values():
            gram = gram + other.gram
            moment = moment + other.moment
        covariance = np.asarray(np.linalg.inv(gram), np.float64)
        self._mean = covariance @ moment
        self._spread = np.asarray(np.linalg.cholesky((covariance + covariance.T) / 2), np.float64)

    def report(self, model: str) -> Iterator[LearnerReport]:
        trust = self._trust
        learning = self.evidence < self._min_outcomes
        reason = f"departs from kv within {trust.radius:.2f} of its trust"
        if learning:
            reason = f"fewer than {self._min_outcomes} outcomes"
        elif self._saturation.saturated:
            reason = "most ranks have a prefill backlog"
        yield LearnerReport(
            model=model,
            learner="thompson",
            fallback="kv",
            observations=self.evidence,
            held_out=trust.departed.count + trust.held_out.count,
            measure="time of a request over that expected of the choice of kv",
            own=math.exp(trust.departed.mean),
            other=math.exp(trust.held_out.mean),
            gain=1.0 - math.exp(trust.departed.mean - trust.held_out.mean),
            on=not learning and not self._saturation.saturated,
            reason=reason,
        )

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
        self._update_posterior()


def _contexts(candidates: Candidates, model: CostModel, cost: Floats) -> NDArray[np.float64]:
    columns = (
        cost,
        model.prefill(candidates),
        np.maximum(candidates.decode, 0.0),
        candidates.requests,
    )
    return np.column_stack((np.ones(len(candidates)), np.log1p(np.array(columns)).T))


def _name(candidates: Candidates, at: int) -> str:
    rank = candidates.rank(at)
    return f"{rank.worker}/{rank.rank}"


def _family(sequence_hashes: bytes) -> str:
    """Key of prompts with the same first block: one agent's system prompt and tools."""
    return sequence_hashes[:HASH_BYTES].hex()


def _time_per_token(outcome: Outcome) -> float | None:
    if outcome.ttft_s is None or outcome.output_tokens < 2:
        return None
    return (outcome.total_s - outcome.ttft_s) / (outcome.output_tokens - 1)
