"""Proof of the ranks' speeds: the times of requests beside those expected of them. Pure."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from kvmesh.bus.messages import Decision, LearnerReport, Outcome
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.runtime.lru import LruCache

MAX_OPEN = 4096
_SHORTEST_S = 1e-4
LEAST = 12.0  # requests before a verdict
MEMORY = 0.98  # weight of a request after the next one


class PairedErrors:
    """Mean errors of a learner (`own`) and its `fallback`, lower is better; older ones fade.

    The verdict changes if the mean difference exceeds its standard error: to `trusted` if the
    learner is better, and from it if it is worse. Until then it is trusted. `count` is the number
    of requests that still weigh.
    """

    def __init__(self) -> None:
        self.trusted = True
        self.count = 0.0
        self._own = 0.0
        self._fallback = 0.0
        self._squares = 0.0

    @property
    def own(self) -> float:
        return self._own / self.count if self.count else 0.0

    @property
    def fallback(self) -> float:
        return self._fallback / self.count if self.count else 0.0

    @property
    def gain(self) -> float:
        """The share of the fallback's error that the learner avoids; negative if it adds to it."""
        return 1.0 - self.own / self.fallback if self.fallback > 0 else 0.0

    def add(self, own: float, fallback: float) -> None:
        """Record the errors on one request."""
        self.count = self.count * MEMORY + 1.0
        self._own = self._own * MEMORY + own
        self._fallback = self._fallback * MEMORY + fallback
        self._squares = self._squares * MEMORY + (own - fallback) ** 2
        if self.count < LEAST:
            return
        worse = self.own - self.fallback
        variance = max(self._squares / self.count - worse * worse, 0.0)
        margin = math.sqrt(variance / self.count)
        if abs(worse) > margin:
            self.trusted = worse < 0


class _Expected(NamedTuple):
    """Of a request on a rank of median speed: seconds to the first token, and for each other one.

    On its own rank they take `slowness` times as long. It waited `wait_s` in the router's queue.
    """

    first_s: float
    step_s: float
    slowness: float
    wait_s: float


class SpeedTrial:
    """Compares the times expected with and without the speeds that were learned before.

    Only requests on ranks that are unlike the median one tell the two apart. While the speeds
    expect worse, costs do not use them; they are learned and compared further.
    """

    def __init__(self, speeds: RankSpeeds) -> None:
        self._speeds = speeds
        self._open: LruCache[str, _Expected] = LruCache(MAX_OPEN)
        self.errors = PairedErrors()

    def on_placed(self, decision: Decision, slot: int | None) -> None:
        """A request was placed on the rank in a slot; None if that is unknown."""
        seconds = self._speeds.seconds
        if slot is None or seconds is None or decision.prefill is not None:
            return
        slowness = self._speeds.learned(slot)
        if slowness == 1.0:
            return
        chosen, size = decision.chosen, decision.block_size
        own = max(decision.tokens - sum(chosen.overlap) * size, 0)
        first_s = (chosen.prefill * size + own) * seconds.prompt_token + seconds.step
        expected = _Expected(first_s, seconds.step, slowness, decision.wait_s)
        self._open.put(decision.request, expected)

    def on_finished(self, outcome: Outcome) -> None:
        """A request has ended."""
        expected = self._open.pop(outcome.request)
        if expected is None or outcome.ttft_s is None or outcome.finish in ("error", "cancelled"):
            return
        before_s = max(expected.wait_s, outcome.prepare_s + outcome.route_s)
        first_s = expected.first_s
        whole_s = first_s + max(outcome.output_tokens - 1, 0) * expected.step_s
        observed = (outcome.ttft_s - before_s, outcome.total_s - before_s)
        self.errors.add(
            _error((first_s * expected.slowness, whole_s * expected.slowness), observed),
            _error((first_s, whole_s), observed),
        )
        self._speeds.trusted = self.errors.trusted

    def report(self, model: str) -> Iterator[LearnerReport]:
        """The gain of the speeds in the expected times of requests."""
        errors, speeds = self.errors, self._speeds
        if not speeds.compared:
            return
        unlike = speeds.slowness is not None
        if not unlike:
            reason = "all ranks are alike"
        elif not errors.trusted:
            reason = "equal speeds expect the times of requests better"
        elif not errors.count:
            reason = "no request on an unlike rank has ended yet"
        else:
            reason = "they expect the times of requests as well as equal speeds, or better"
        yield LearnerReport(
            model=model,
            learner="speeds",
            fallback="equal speeds",
            observations=speeds.compared,
            held_out=errors.count,
            measure="factor by which expected times are wrong",
            own=math.exp(errors.own),
            other=math.exp(errors.fallback),
            gain=errors.gain,
            on=unlike and errors.trusted,
            reason=reason,
        )


def _error(expected: tuple[float, float], observed: tuple[float, float]) -> float:
    """The mean logarithm of the factors by which times were expected wrongly."""
    pairs = zip(expected, observed, strict=True)
    logs = [abs(math.log(max(e, _SHORTEST_S) / max(o, _SHORTEST_S))) for e, o in pairs]
    return sum(logs) / len(logs)
