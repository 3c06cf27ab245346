"""A learner is judged on requests that it has not learned from, beside its fallback."""

from random import Random

import pytest

from kvmesh.router.state.speed_trial import LEAST, PairedErrors


def gain_after(errors: PairedErrors, count: int, own: float, rng: Random) -> tuple[bool, float]:
    """The verdict and the gain after so many more requests, of which the fallback errs by 1."""
    for _ in range(count):
        errors.add(own + rng.random(), 1.0 + rng.random())
    return errors.trusted, errors.gain


def test_a_learner_is_trusted_until_it_loses_and_again_once_it_wins() -> None:
    errors, rng = PairedErrors(), Random(0)
    assert gain_after(errors, int(LEAST) - 2, 2.0, rng)[0]
    trusted, gain = gain_after(errors, 20, 2.0, rng)
    assert not trusted
    assert gain < -0.3
    trusted, gain = gain_after(errors, 200, 0.5, rng)
    assert trusted
    assert gain == pytest.approx(1 / 3, abs=0.1)


def test_equal_errors_change_nothing() -> None:
    errors = PairedErrors()
    for _ in range(100):
        errors.add(1.0, 1.0)
    assert errors.trusted
    assert errors.gain == 0.0
    assert errors.count < 51


def test_without_requests_there_is_no_gain() -> None:
    errors = PairedErrors()
    assert (errors.own, errors.fallback, errors.gain) == (0.0, 0.0, 0.0)
