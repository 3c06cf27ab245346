"""Bound of the rate at which a worker that serves sends its weights. Pure; times are seconds."""

from math import inf

from kvmesh.weights.frames import ServingReport

TOLERANCE = 0.05  # of the times between tokens: how much longer they may become
SHARE = 1 / 16  # of the highest rate, which always flows
LEAST_RATE = 1e6
SLOWER, FASTER = 0.6, 1.2
WEIGHT = 0.4  # of a new window in a mean
WINDOWS = 2  # with the present rate before it changes
MIN_GAPS = 8  # between tokens that a window must have
PROBE_S = 2.0  # between windows with little sending, which show the times without it
KV_S = 0.5  # after a report of KV transfers, unless another one follows
EXPIRES_S = 1.5  # after which a worker that reports nothing serves nobody
FORGET = 0.98  # of the highest rate, per window without a bound


class ServingGuard:
    """Compares the times between tokens with and without sending, and bounds the rate by them.

    While KV blocks are transferred, weights get a small share of the network.
    """

    def __init__(self) -> None:
        self._allowed = inf
        self._peak = 0.0
        self._quiet = self._loud = 0.0  # times between tokens with little and with much sending
        self._noise = 0.0  # of the former, as a share: what differs without sending, too
        self._windows = 0
        self._sent = 0
        self._at = self._heard_at = self._probed_at = self._kv_until = -inf
        self._probing = False

    def report(self, report: ServingReport, sent: int, now: float) -> None:
        """Take in what the worker has served; `sent` counts the bytes of weights so far."""
        self._kv_until = now + KV_S if report.transfers else min(self._kv_until, now)
        if report.gaps < MIN_GAPS:
            return
        rate = (sent - self._sent) / max(now - self._at, 1e-3)
        fresh, shared = now - self._heard_at > EXPIRES_S, self._kv_until > self._at
        self._heard_at = self._at = now
        self._sent = sent
        if fresh or shared:  # the window began long ago, or KV blocks had the network
            return
        self._peak = max(self._peak * (FORGET if self._allowed == inf else 1.0), rate)
        if self._probing or rate < self._least / 2:
            if self._quiet:
                self._noise = _mean(self._noise, abs(report.slow_s / self._quiet - 1))
            self._quiet = _mean(self._quiet, report.slow_s)
            self._probing = False
            self._probed_at = now
            return
        self._loud = _mean(self._loud, report.slow_s)
        self._windows += 1
        if self._windows >= WINDOWS and self._quiet:
            self._change(rate)
        self._probing = not self._quiet or now - self._probed_at > PROBE_S

    def rate(self, now: float) -> float:
        """Bytes/s that may be sent now; 0: no bound."""
        if now < self._kv_until:
            return self._least
        if now - self._heard_at > EXPIRES_S:
            return 0.0
        allowed = self._least if self._probing else max(self._allowed, self._least)
        return 0.0 if allowed == inf else allowed

    @property
    def _least(self) -> float:
        return max(self._peak * SHARE, LEAST_RATE)

    def _change(self, rate: float) -> None:
        tolerance = max(TOLERANCE, self._noise)
        if self._loud > self._quiet * (1 + tolerance):
            self._allowed = max(min(self._allowed, rate) * SLOWER, self._least)
        elif self._allowed < inf and self._loud < self._quiet * (1 + tolerance / 2):
            self._allowed *= FASTER
            if self._allowed > 2 * self._peak:
                self._allowed = inf
        else:
            return
        self._loud, self._windows = 0.0, 0


def _mean(before: float, value: float) -> float:
    return before + WEIGHT * (value - before) if before else value
