"""The model slows down while real workers are worse than it, and recovers."""

from kvmesh.planner.capacity.slowdown import LEAST, MOST, SETTLED_S, USUAL, Comparison, Slowdown


def test_results_count_once_the_fleet_has_not_changed_for_long() -> None:
    slowdown = Slowdown()
    assert slowdown.settled_since((2,), 100.0) is None
    assert slowdown.settled_since((2,), 100.0 + SETTLED_S) == 100.0
    assert slowdown.settled_since((3,), 101.0 + SETTLED_S) is None
    assert slowdown.settled_since((0,), 900.0) is None
    assert slowdown.settled_since((0,), 999.0) is None


def test_the_factor_rises_while_less_is_kept_and_recovers_within_bounds() -> None:
    slowdown = Slowdown()
    for _ in range(20):
        slowdown.learn([Comparison(0.5, 80, 0.98, 0.95), Comparison(1.0, 80, 0.98, 0.95)])
    assert slowdown.factor == MOST
    slowdown.learn([Comparison(0.93, 80, 0.98, 0.95)])
    assert slowdown.factor < MOST
    for _ in range(200):
        slowdown.learn([])
    assert slowdown.factor == USUAL


def test_the_same_results_slow_the_model_down_once() -> None:
    slowdown = Slowdown()
    slowdown.settled_since((2,), 0.0)
    assert slowdown.settled_since((2,), SETTLED_S) == 0.0
    slowdown.learn([Comparison(0.5, 80, 0.98, 0.95)])
    assert slowdown.settled_since((2,), SETTLED_S + 5.0) is None
    assert slowdown.settled_since((2,), 2 * SETTLED_S + 5.0) == SETTLED_S + 5.0


def test_few_requests_must_be_later_to_slow_the_model_down() -> None:
    assert not Comparison(0.89, 80, 0.98, 0.95).worse
    assert Comparison(0.89, 4000, 0.98, 0.95).worse
    assert Comparison(0.84, 80, 0.98, 0.95).worse


def test_real_workers_that_keep_more_than_modelled_make_the_model_faster() -> None:
    slowdown = Slowdown()
    assert not Comparison(0.9, 80, 0.85, 0.95).better
    for _ in range(30):
        slowdown.learn([Comparison(0.98, 80, 0.85, 0.95), Comparison(1.0, 80, 0.99, 0.95)])
    assert slowdown.factor == LEAST
    slowdown.learn([])
    assert slowdown.factor == LEAST
    slowdown.learn([Comparison(0.5, 80, 0.85, 0.95)])
    for _ in range(30):
        slowdown.learn([])
    assert slowdown.factor == USUAL
