"""Value of held blocks by age, against a search over all times to hold them."""

from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.returns.rates import BINS
from kvmesh.returns.value import BIN_WIDTHS, values_by_age

RATES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 10.0)), min_size=BINS, max_size=BINS).map(
    tuple
)


def best(rates: tuple[float, ...], at: int) -> float:
    """The greatest number of returns per second of holding from the start of bin `at`."""
    found, alive, returns, seconds = 0.0, 1.0, 0.0, 0.0
    for rate, width in zip(rates[at:], BIN_WIDTHS[at:], strict=True):
        if rate:
            share = 1.0 - exp(-rate * width)
            returns += alive * share
            seconds += alive * share / rate
            alive *= 1.0 - share
        else:
            seconds += alive * width
        found = max(found, returns / seconds if seconds < inf else 0.0)
    return found


@given(RATES)
def test_a_value_is_the_most_returns_per_second_of_holding(rates: tuple[float, ...]) -> None:
    values = values_by_age(rates)
    assert values == pytest.approx([best(rates, at) for at in range(BINS)], rel=1e-6, abs=1e-9)


def test_the_value_of_a_falling_rate_is_the_rate() -> None:
    rates = tuple(2.0**-k for k in range(BINS))
    assert values_by_age(rates) == rates


def test_a_rate_that_rises_later_counts_before() -> None:
    """A tool that takes a minute: the longer it has run, the sooner the prompt returns."""
    rates = [0.0] * BINS
    rates[8] = 0.1  # from 64 to 128 seconds
    values = values_by_age(rates)
    assert 0 < values[0] < values[5] < values[7] < values[8] == 0.1
    assert values[9] == 0.0
