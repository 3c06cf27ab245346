"""Rates of return: bins of age, and their form on the wire."""

from math import exp, inf

import pytest

from kvmesh.returns.rates import AGE_ENDS, BINS, age_bin, pack_rates, share_returned, unpack_rates
from kvmesh.returns.value import chances_by_age


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [(-1.0, 0), (0.0, 0), (0.49, 0), (0.5, 1), (0.99, 1), (1.0, 2), (8191.0, 14), (8192.0, 15)],
)
def test_an_age_belongs_to_the_bin_that_contains_it(age_s: float, expected: int) -> None:
    assert age_bin(age_s) == expected


def test_the_last_bin_has_no_end() -> None:
    assert AGE_ENDS[-1] == inf
    assert [age_bin(age_s) for age_s in (1e12, 1.7e308, inf)] == [BINS - 1] * 3


def test_rates_survive_the_wire_within_their_precision() -> None:
    rates = [0.0, *(0.37 * 1.9**-k for k in range(BINS - 1))]
    packed = pack_rates(rates)
    assert len(packed) == BINS
    assert unpack_rates(packed) == pytest.approx(rates, rel=0.045)


def test_rates_beyond_the_range_are_clipped() -> None:
    found = unpack_rates(pack_rates([1e-30, 1e30, *[0.0] * (BINS - 2)]))
    assert 0 <= found[0] < 1e-7
    assert found[1] > 200


def test_a_forecast_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rates of return instead of 16"):
        unpack_rates(b"abc")


def test_the_chance_of_a_return_falls_with_the_returns_that_are_over() -> None:
    soon = [1.0] * 4 + [0.0] * (BINS - 4)
    chances = chances_by_age(soon)
    assert chances[0] == pytest.approx(1 - exp(-4.0))
    assert list(chances) == sorted(chances, reverse=True)
    assert set(chances[4:]) == {0.0}
    assert chances_by_age([0.0] * BINS) == (0.0,) * BINS
    assert chances_by_age([0.001] * BINS)[BINS - 1] > 0.99


@pytest.mark.parametrize("within_s", [0.0, 0.3, 1.0, 60.0, 20_000.0, inf])
def test_a_constant_rate_is_an_exponential_distribution(within_s: float) -> None:
    assert share_returned([0.1] * BINS, within_s) == pytest.approx(1 - exp(-0.1 * within_s))


def test_prompts_that_no_longer_return_stay_out() -> None:
    early = [2.0, 1.0, *[0.0] * (BINS - 2)]
    assert share_returned(early, 0.5) == pytest.approx(1 - exp(-1.0))
    for within_s in (1.0, 1e9, inf):
        assert share_returned(early, within_s) == pytest.approx(1 - exp(-1.5))
