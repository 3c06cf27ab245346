"""How far a learned policy may depart from `kv`: found by trial against held-out requests."""

import math
from random import Random

from kvmesh.router.state.arrays import Floats

HELD_OUT = 0.1  # of the contested requests
ENOUGH = 10  # outcomes of each arm for a verdict
STALE = 400  # outcomes without a verdict, after which it begins anew
LEAST = 1 / 16
BUSY = 0.6
MEMORY = 20  # decisions over which saturation is smoothed


class Arm:
    """Mean and variance of the outcomes of requests treated alike (Welford's sums)."""

    __slots__ = ("count", "mean", "squares")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)

    @property
    def error(self) -> float:
        """Squared standard error of the mean."""
        return self.squares / (self.count - 1) / self.count


class Trust:
    """`radius`, from LEAST to 1, grows and shrinks with what departures from `kv` achieve.

    A request is *contested* if the policy would route it otherwise than `kv`. A random part of
    these is routed by `kv` all the same, so both arms hold requests of the same kind. Values are
    the lower the better, less what was expected of the choice of `kv`, which takes the length of
    the prompt and the load of the moment out of them.
    """

    def __init__(self) -> None:
        self.radius = 0.5
        self._held_out = Arm()
        self._departed = Arm()

    def holds_out(self, rng: Random) -> bool:
        """Whether a contested request is for the control arm."""
        return rng.random() < HELD_OUT

    def judge(self, held_out: bool, value: float) -> None:
        """Take the outcome of a contested request; may change the radius."""
        control, trial = self._held_out, self._departed
        (control if held_out else trial).add(value)
        if min(control.count, trial.count) < ENOUGH:
            return
        margin = math.sqrt(control.error + trial.error)
        if trial.mean > control.mean + margin:
            self._begin(max(self.radius / 2, LEAST))
        elif trial.mean < control.mean - margin:
            self._begin(min(self.radius * 2, 1.0))
        elif control.count + trial.count > STALE:
            self._begin(self.radius)

    def _begin(self, radius: float) -> None:
        self.radius = radius
        self._held_out = Arm()
        self._departed = Arm()


class Saturation:
    """Whether most ranks have prefill before them most of the time.

    Then every token that is computed delays others, which the outcome of a request does not show:
    whoever goes by outcomes alone would give up cached blocks for a shorter wait of his own.
    """

    def __init__(self) -> None:
        self._busy = 0.0

    def observe(self, prefill: Floats) -> bool:
        """Take note of the candidates of one request, by the blocks that each has to prefill."""
        self._busy += (float((prefill > 0).mean()) - self._busy) / MEMORY
        return self._busy > BUSY
