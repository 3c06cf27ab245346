"""Trust region of a learned policy around `kv`, from trials against held-out requests."""

import math
from random import Random

from kvmesh.router.state.arrays import Floats

HELD_OUT_SHARE = 0.1  # of the contested requests
MIN_OUTCOMES = 10  # of each arm for a verdict
MAX_OUTCOMES = 400  # without a verdict, then both arms restart
MIN_RADIUS = 1 / 16
SATURATED_SHARE = 0.6
SMOOTHING = 20  # decisions over which saturation is smoothed


class Arm:
    """Mean and variance of the outcomes of one arm (Welford's algorithm)."""

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
    """`radius`, from MIN_RADIUS to 1, grows or shrinks with the results of departures from `kv`.

    A request is *contested* if the policy's choice differs from that of `kv`. A random share of
    these is placed by `kv`, so both arms have requests of the same kind. Values, lower is better,
    are relative to the prediction for the choice of `kv`, which removes the effect of prompt length
    and momentary load. The arms begin anew with each verdict.
    """

    def __init__(self) -> None:
        self.radius = 0.5
        self.held_out = Arm()
        self.departed = Arm()

    def holds_out(self, rng: Random) -> bool:
        """Draw whether a contested request goes to the control arm."""
        return rng.random() < HELD_OUT_SHARE

    def record(self, held_out: bool, value: float) -> None:
        """Record the outcome of a contested request; may change the radius."""
        control, trial = self.held_out, self.departed
        (control if held_out else trial).add(value)
        if min(control.count, trial.count) < MIN_OUTCOMES:
            return
        margin = math.sqrt(control.error + trial.error)
        if trial.mean > control.mean + margin:
            self._restart(max(self.radius / 2, MIN_RADIUS))
        elif trial.mean < control.mean - margin:
            self._restart(min(self.radius * 2, 1.0))
        elif control.count + trial.count > MAX_OUTCOMES:
            self._restart(self.radius)

    def _restart(self, radius: float) -> None:
        self.radius = radius
        self.held_out = Arm()
        self.departed = Arm()


class Saturation:
    """Detects that most ranks have a prefill backlog most of the time.

    Every computed token then delays other requests, which a request's own outcome does not show: a
    policy that learns from outcomes would trade cached blocks for shorter waits.
    """

    def __init__(self) -> None:
        self._busy = 0.0

    def observe(self, prefill: Floats) -> bool:
        """Record one request's prefill blocks by candidate; returns whether ranks are saturated."""
        self._busy += (float((prefill > 0).mean()) - self._busy) / SMOOTHING
        return self.saturated

    @property
    def saturated(self) -> bool:
        return self._busy > SATURATED_SHARE
