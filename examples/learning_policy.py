"""A policy that learns: it fits the time to the first token to what it knows of a rank, and
explores as LinUCB does (Li et al., 2010).

    PYTHONPATH=examples kvmesh simulate demo --compare kv,learning_policy:LearnsTtft,round-robin
    PYTHONPATH=examples kvmesh up --policy learning_policy:LearnsTtft
"""

from random import Random

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvmesh.bus.messages import Decision, Outcome
from kvmesh.router.policies.base import Policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel, pick

BLOCKS = 1000.0  # features are near 1, so that all are learned equally fast
EXPLORE = 0.02  # seconds by which a rank of which nothing is known seems better than it is
FADE = 0.9995  # per outcome: a fleet changes


class LearnsTtft(Policy):
    """The lowest time to the first token, as learned from the requests before."""

    history_s = 600.0  # the outcomes of all routers; after a restart, those of ten minutes

    def __init__(self) -> None:
        self._placed: dict[str, NDArray[np.float64]] = {}
        self._seen, self._sums = np.eye(4), np.zeros(4)

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        computed = candidates.prompt - candidates.overlap.sum(1)
        known = _features(computed, candidates.prefill, candidates.decode)
        inverse = np.linalg.inv(self._seen)
        doubt = np.sqrt(np.einsum("ij,jk,ik->i", known, inverse, known))
        cost = known @ (inverse @ self._sums) - EXPLORE * doubt
        return PolicyChoice(pick(cost, 0.0, rng), cost)

    def on_placed(self, decision: Decision, now: float) -> None:
        chosen = decision.chosen
        computed = decision.tokens / max(decision.block_size, 1) - sum(chosen.overlap)
        self._placed[decision.request] = _features(computed, chosen.prefill, chosen.decode)

    def on_finished(self, outcome: Outcome, now: float) -> None:
        known = self._placed.pop(outcome.request, None)
        if known is not None and outcome.ttft_s is not None:
            self._seen = FADE * self._seen + np.outer(known, known)
            self._sums = FADE * self._sums + known * outcome.ttft_s

    def on_freed(self, request: str, now: float) -> None:
        if len(self._placed) > 100_000:  # outcomes that never came
            self._placed.clear()


def _features(computed: ArrayLike, prefill: ArrayLike, decode: ArrayLike) -> NDArray[np.float64]:
    """1, and in thousands of blocks: to compute, to compute before, and held while decoding."""
    columns = np.broadcast_arrays(np.float64(BLOCKS), computed, prefill, decode)
    return np.stack(columns, -1) / BLOCKS
