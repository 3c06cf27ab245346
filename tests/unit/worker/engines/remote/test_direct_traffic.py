"""Estimate of the requests that reach a server directly, and the time of those of this worker."""

from kvmesh.worker.engines.remote.direct_traffic import STALE_S, DirectTraffic, OwnRequests
from kvmesh.worker.engines.remote.gauges import Gauges


def test_requests_beyond_the_worker_s_own_are_those_of_others() -> None:
    traffic = DirectTraffic()
    assert traffic.update(Gauges(4, 2, 0.5, 1.0), own=6, now=0.0) == (0, 0)
    assert traffic.update(Gauges(4, 2, 0.5, 2.0), own=5, now=1.0) == (1, 1)
    assert traffic.update(Gauges(4, 0, 0.5, 3.0), own=1, now=2.0) == (3, 0)
    assert traffic.update(Gauges(1, 0, 0.5, 4.0), own=3, now=3.0) == (0, 0)


def test_gauges_of_a_server_without_steps_grow_stale() -> None:
    traffic = DirectTraffic()
    aborted = Gauges(0, 1, 0.0, 7.0)  # it has not stepped since, so that the gauge stays
    assert traffic.update(aborted, own=0, now=0.0) == (1, 1)
    assert traffic.update(aborted, own=0, now=STALE_S) == (1, 1)
    assert traffic.update(aborted, own=0, now=STALE_S + 1) == (0, 0)
    assert traffic.update(Gauges(1, 0, 0.1, 8.0), own=0, now=STALE_S + 2) == (1, 0)


def test_a_server_without_metrics_has_no_other_clients() -> None:
    assert DirectTraffic().update(Gauges(), own=0, now=0.0) == (0, 0)


def test_requests_that_ended_since_the_last_step_are_not_those_of_others() -> None:
    traffic = DirectTraffic()
    gauges = Gauges(1, 0, 0.1, 5.0)
    assert traffic.update(gauges, own=1, now=0.0) == (0, 0)
    assert traffic.update(gauges, own=0, now=1.0) == (0, 0)


def test_busy_time_counts_overlapping_requests_once() -> None:
    own = OwnRequests()
    own.begin(10.0)
    own.begin(11.0)
    own.end(12.0)
    assert own.take_busy_s(12.5) == 2.5
    own.end(13.0)
    own.begin(20.0)
    assert own.take_busy_s(21.0) == 0.5 + 1.0
    own.end(21.0)
    assert own.take_busy_s(30.0) == 0.0


def test_the_most_requests_at_once_are_those_since_a_restart() -> None:
    own = OwnRequests()
    for _ in range(3):
        own.begin(0.0)
    own.end(1.0)
    assert own.most == 3
    own.restart_most()
    assert own.most == 2
