"""Pace of prefetches beside requests: what they lose, in a simulated engine."""

import pytest

from kvmesh.worker.adapters.prefetching.pacer import (
    LOST_SHARE,
    MAX_PAUSE_S,
    MAX_SLICE_S,
    PrefetchPacer,
)

OVERHEAD_S = 0.002
BLOCK_S = 0.0005


def run_slices(pacer: PrefetchPacer, until: float) -> list[tuple[float, float, int]]:
    """Slices on an engine with constant costs: start, end, and blocks of each."""
    now, slices = 0.0, []
    while now < until:
        pause = pacer.pause(now)
        assert pause is not None
        now += pause
        blocks, start = pacer.blocks, now
        now += OVERHEAD_S + blocks * BLOCK_S
        slices.append((start, now, blocks))
        pacer.record_slice(now - start, now)
    return slices


@pytest.mark.parametrize("first_token_s", [0.01, 0.05, 0.2, 2.0])
def test_arriving_requests_lose_a_bounded_share_of_their_first_token(first_token_s: float) -> None:
    pacer = PrefetchPacer(1000)
    for _ in range(50):
        pacer.begin()
        pacer.record_first_token(first_token_s)
        pacer.end(True)
    slices = run_slices(pacer, 60.0)[20:]
    waits = sum((end - start) ** 2 / 2 for start, end, _ in slices)
    mean_wait = waits / (slices[-1][1] - slices[0][0])
    assert mean_wait < 1.01 * LOST_SHARE * first_token_s
    assert all(end - start < 1.5 * MAX_SLICE_S for start, end, _ in slices)


def test_slow_requests_permit_full_speed() -> None:
    pacer = PrefetchPacer(1000)
    for _ in range(50):
        pacer.begin()
        pacer.record_first_token(1.0)
        pacer.end(True)
    slices = run_slices(pacer, 10.0)
    assert sum(blocks for *_, blocks in slices) * BLOCK_S > 0.9 * 10.0


def test_decoding_requests_lose_a_bounded_share_of_the_time() -> None:
    pacer = PrefetchPacer(1000)
    pacer.begin()
    pacer.record_first_token(0.05)
    slices = run_slices(pacer, 20.0)
    assert sum(end - start for start, end, _ in slices) < 1.05 * LOST_SHARE * 20.0
    assert sum(blocks for *_, blocks in slices) * BLOCK_S > 0.3 * LOST_SHARE * 20.0


def test_no_slice_starts_before_the_first_tokens_of_requests() -> None:
    pacer = PrefetchPacer(1000)
    assert pacer.pause(0.0) == 0.0
    pacer.begin()
    pacer.begin()
    assert pacer.pause(0.0) is None
    pacer.end(False)
    pacer.record_first_token(0.1)
    assert pacer.pause(0.0) == 0.0
    pacer.end(True)


def test_requests_of_other_clients_count_like_those_of_callers() -> None:
    pacer = PrefetchPacer(1000)
    pacer.record_others(1, 1)
    assert pacer.pause(0.0) is None
    pacer.record_others(1, 0)
    slices = run_slices(pacer, 20.0)
    assert sum(end - start for start, end, _ in slices) < 1.05 * LOST_SHARE * 20.0
    pacer.record_others(0, 0)
    assert pacer.pause(100.0) == 0.0


def test_a_slice_is_one_step_at_most() -> None:
    pacer = PrefetchPacer(8)
    for number in range(20):
        pacer.record_slice(1e-6, float(number))
    assert pacer.blocks == 8
    assert PrefetchPacer(0).blocks == 1


def test_one_slice_on_a_machine_that_stalls_does_not_stop_prefetches() -> None:
    pacer = PrefetchPacer(1000)
    run_slices(pacer, 1.0)
    pacer.record_slice(60.0, 61.0)
    assert pacer.pause(61.0 + MAX_PAUSE_S) == 0.0
