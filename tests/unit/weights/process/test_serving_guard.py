"""The bound of sending by the times between tokens, against a worker in virtual time."""

import random
from collections.abc import Callable

from kvmesh.weights.frames import ServingReport
from kvmesh.weights.process.main import KV_S, LEAST_RATE, ServingGuard

LINK = 1e9
STEP_S = 0.25
BASE_S = 0.02


class Worker:
    """A worker with streams whose token times grow with the rate at which it sends."""

    def __init__(self, slowdown: Callable[[float], float]) -> None:
        self.guard = ServingGuard()
        self.now = 100.0
        self.sent = 0
        self._slowdown = slowdown

    def run(self, seconds: float, sending: bool = True, gaps: int = 50) -> tuple[float, float]:
        """Mean rate and mean time between tokens."""
        steps = int(seconds / STEP_S)
        sent, total = self.sent, 0.0
        for _ in range(steps):
            rate = (self.guard.rate(self.now) or LINK) if sending else 0.0
            rate = min(rate, LINK)
            self.now += STEP_S
            self.sent += int(rate * STEP_S)
            took = BASE_S * (1 + self._slowdown(rate))
            total += took
            if gaps:
                self.guard.report(ServingReport(gaps, took), self.sent, self.now)
        return (self.sent - sent) / (steps * STEP_S), total / steps


def test_sending_that_slows_serving_is_bounded() -> None:
    worker = Worker(lambda rate: rate / LINK)  # twice as slow at full rate
    worker.run(5, sending=False)
    worker.run(10)
    rate, took = worker.run(30)
    assert took < BASE_S * 1.1
    assert rate > LINK / 50


def test_noise_is_no_slowdown() -> None:
    draws = random.Random(1)
    worker = Worker(lambda rate: draws.uniform(-0.25, 0.25))
    worker.run(5, sending=False)
    worker.run(10)
    rate, _ = worker.run(60)
    assert rate > 0.3 * LINK


def test_sending_that_slows_nothing_is_fast() -> None:
    worker = Worker(lambda rate: 0.0)
    worker.run(5, sending=False)
    worker.run(10)
    rate, _ = worker.run(30)
    assert rate > 0.8 * LINK


def test_the_bound_rises_once_serving_does_not_suffer() -> None:
    worker = Worker(lambda rate: rate / LINK)
    worker.run(30)
    bounded = worker.run(10)[0]
    worker._slowdown = lambda rate: 0.0
    worker.run(60)
    assert worker.run(20)[0] > 4 * bounded


def test_a_worker_without_streams_sends_at_full_rate() -> None:
    worker = Worker(lambda rate: rate / LINK)
    worker.run(30)
    assert worker.run(3, gaps=0)[0] > 0.3 * LINK
    assert worker.guard.rate(worker.now) == 0.0


def test_a_share_always_flows() -> None:
    worker = Worker(lambda rate: 10.0 if rate > 0 else 0.0)
    worker.run(3, sending=False)
    worker.run(60)
    assert worker.run(10)[0] >= LEAST_RATE


def test_transfers_of_kv_come_first_for_a_bounded_time() -> None:
    guard = ServingGuard()
    guard.report(ServingReport(50, BASE_S), 0, 10.0)
    guard.report(ServingReport(50, BASE_S), int(LINK), 11.0)
    assert guard.rate(11.0) in (0.0, LINK / 16)
    guard.report(ServingReport(transfers=True), int(LINK), 11.1)
    assert guard.rate(11.2) == LINK / 16
    guard.report(ServingReport(transfers=True), int(LINK), 11.4)
    assert guard.rate(11.4 + KV_S - 0.01) == LINK / 16
    assert guard.rate(20.0) == 0.0


def test_nothing_is_learned_while_kv_is_transferred() -> None:
    guard = ServingGuard()
    sent = 0
    for step in range(100):
        now = 10.0 + step * STEP_S
        transfers = step > 1
        sent += int((LINK if not transfers else guard.rate(now)) * STEP_S)
        guard.report(ServingReport(50, BASE_S, transfers), sent, now)
    assert guard.rate(now) == LINK / 16
    guard.report(ServingReport(50, BASE_S), sent, now + STEP_S)  # its window had transfers, too
    guard.report(ServingReport(transfers=True), sent, now + 2 * STEP_S)
    assert guard.rate(now + 2 * STEP_S) == LINK / 16
