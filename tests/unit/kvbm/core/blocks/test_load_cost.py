"""Cost of loading against computing, and measured speeds of paths between tiers."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvbm.core.blocks import load_cost
from kvmesh.kvbm.core.blocks.load_cost import (
    DOUBT_S,
    CostStep,
    EngineSpeed,
    LoadDoubt,
    Traffic,
    blocks_worth_loading,
)

MB = 1 << 20
MEMORY = CostStep(MB, 0.0, 0)


def test_unknown_speeds_permit_loading() -> None:
    assert blocks_worth_loading([MEMORY] * 9, EngineSpeed(0, 0), 16) == 9
    assert blocks_worth_loading([MEMORY] * 9, EngineSpeed(1000, 0), 16) == 9


def test_loading_must_beat_computing() -> None:
    slow, fast = CostStep(MB, 1e6, 0), CostStep(MB, 1e9, 0)
    engine = EngineSpeed(compute_tps=1600, load_bps=1e10)  # a block in 10 ms
    assert blocks_worth_loading([fast] * 5, engine, 16) == 5
    assert blocks_worth_loading([slow] * 5, engine, 16) == 0
    assert blocks_worth_loading([MEMORY, fast, slow, slow], engine, 16) == 2


def test_a_slow_block_is_loaded_if_later_blocks_compensate() -> None:
    slow = CostStep(MB, 5e7, 0)  # 21 ms
    engine = EngineSpeed(compute_tps=1600, load_bps=1e10)
    assert blocks_worth_loading([slow, MEMORY], engine, 16) == 0
    assert blocks_worth_loading([slow, *[MEMORY] * 5], engine, 16) == 6


def test_queued_bytes_count_once() -> None:
    engine = EngineSpeed(compute_tps=1600, load_bps=1e10)
    assert blocks_worth_loading([CostStep(MB, 1e9, 100 * MB)] * 5, engine, 16) == 0
    assert blocks_worth_loading([CostStep(MB, 1e9, 100 * MB)] * 20, engine, 16) == 20


@given(
    st.lists(
        st.builds(
            CostStep,
            st.just(MB),
            st.sampled_from([0.0, 2.0**25, 2.0**30, 2.0**40]),
            st.sampled_from([0, 4 * MB, 64 * MB]),
            st.integers(1, 40),
        ),
        max_size=5,
    )
)
def test_a_step_of_many_blocks_costs_as_much_as_single_steps(runs: list[CostStep]) -> None:
    """All durations are sums of powers of two, so that none is rounded."""
    engine = EngineSpeed(compute_tps=1024, load_bps=0)
    single = [replace(run, blocks=1) for run in runs for _ in range(run.blocks)]
    with patch.object(load_cost, "START_S", 2.0**-9):
        assert blocks_worth_loading(runs, engine, 16) == blocks_worth_loading(single, engine, 16)


def worth(doubt: LoadDoubt, load_bps: float, now: float, blocks: int = 100) -> int:
    """Blocks worth loading of a prompt in memory, at 10 ms to compute one."""
    return blocks_worth_loading([MEMORY] * blocks, doubt.speed(1600, load_bps, now), 16)


def test_a_worker_that_loads_slowly_tries_again_briefly_as_its_measurement_ages() -> None:
    doubt, slow = LoadDoubt(), 40.0 * MB  # 25 ms for a block
    doubt.end_load(False, 100.0)
    assert worth(doubt, slow, 100.0) == 0
    assert worth(doubt, slow, 100 + DOUBT_S) == 0
    assert worth(doubt, slow, 100 + 2 * DOUBT_S) == 4  # 0.1 s
    assert worth(doubt, slow, 100 + 2 * DOUBT_S, blocks=3) == 3
    assert worth(doubt, slow, 1e9) == 4


def test_a_slow_trial_ends_the_doubt_and_a_fast_one_makes_the_next_longer() -> None:
    doubt, slow = LoadDoubt(), 40.0 * MB
    doubt.end_load(False, 0.0)
    assert worth(doubt, slow, 40.0) == 4
    doubt.end_load(True, 41.0)
    assert worth(doubt, 1.25 * slow, 41.0) == 10
    doubt.end_load(True, 42.0)
    assert worth(doubt, 2 * slow, 42.0) == 32
    assert worth(doubt, 10 * slow, 42.0) == 100
    doubt.end_load(False, 43.0)
    assert worth(doubt, slow, 43.0) == 0
    assert worth(doubt, slow, 83.0) == 4


def test_no_report_lets_a_trial_grow_without_bound() -> None:
    doubt = LoadDoubt()
    for _ in range(2000):
        doubt.end_load(True, 0.0)
    assert worth(doubt, 200.0, 1e9) == 1
    for load_bps in (float("inf"), float("nan"), -1.0, 1e308):
        assert 0 <= worth(doubt, load_bps, 1e12) <= 100


def moved(traffic: Traffic, blocks: int, start: float, seconds: float) -> None:
    for _ in range(blocks):
        traffic.begin(start)
    for _ in range(blocks):
        traffic.end(MB, start + seconds)


def test_speed_is_measured_over_concurrent_moves() -> None:
    traffic = Traffic()
    moved(traffic, 1, 0.0, 3.0)
    assert traffic.speed(3.0) == 0.0
    for start in (3.0, 4.0, 5.0):
        moved(traffic, 4, start, 0.01)
    assert traffic.speed(5.01) == pytest.approx(4 * MB / 0.01)
    traffic.begin(100.0)
    traffic.end(0, 100.1)
    assert (traffic.failed, traffic.moving) == (1, 0)
    assert traffic.bps == pytest.approx(4 * MB / 0.01)


@pytest.mark.parametrize("odd", range(load_cost.FIRST_SAMPLES))
@pytest.mark.parametrize("seconds", [1e-6, 5.0])
def test_one_odd_measurement_of_the_first_does_not_count(odd: int, seconds: float) -> None:
    """A load took 5 s on a machine with too much to do, or seemed to take no time."""
    traffic = Traffic()
    moved(traffic, 1, 0.0, 1.0)
    for number in range(load_cost.FIRST_SAMPLES):
        assert traffic.speed(10.0 * number + 9.0) == 0.0
        moved(traffic, 4, 10.0 + 10.0 * number, seconds if number == odd else 0.01)
    assert traffic.bps == pytest.approx(4 * MB / 0.01)


def test_the_time_of_a_failure_is_not_that_of_the_path() -> None:
    """A holder that does not send ends its transfers by a timeout; others went on meanwhile."""
    traffic = Traffic()
    moved(traffic, 1, 0.0, 1.0)
    for start in (1.0, 1.2, 1.4):
        moved(traffic, 4, start, 0.01)
    fast = traffic.bps
    for _ in range(3):
        traffic.begin(2.0)
    traffic.end(MB, 2.01)
    traffic.end(0, 4.0)
    traffic.end(MB, 4.0001)
    assert traffic.bps == fast
    assert (traffic.done, traffic.failed, traffic.moving) == (15, 1, 0)
    moved(traffic, 1, 5.0, 1.0)
    assert traffic.bps < fast


def test_a_slow_path_is_tried_again_after_a_while() -> None:
    traffic = Traffic()
    for start in (0.0, 6.0, 8.0, 10.0):
        moved(traffic, 1, start, 1.0)
    assert traffic.speed(11.0) == MB
    assert traffic.speed(51.0) == 4 * MB
    traffic.begin(51.0)
    assert traffic.speed(90.0) == MB
    traffic.end(MB, 52.0)
    assert traffic.speed(52.0) == MB
    assert traffic.speed(1e6) == MB * 2**20


def test_the_share_of_time_with_moves_is_that_of_the_last_minutes() -> None:
    traffic = Traffic()
    assert traffic.busy_share(100.0) == 0.0
    traffic.begin(100.0)
    traffic.begin(101.0)
    traffic.end(MB, 105.0)
    assert traffic.busy_share(400.0) == pytest.approx(1.0, abs=0.01)
    traffic.end(MB, 400.0)
    assert traffic.busy_share(400.0 + load_cost.BUSY_S) == pytest.approx(0.365, abs=0.01)
    assert traffic.busy_share(1000.0) < 0.01
