"""Shadow caches: they tell whether forecasts have more hits than recency."""

from random import Random

from kvmesh.returns.rates import BINS
from kvmesh.returns.shadow_caches import MAX_CONVERSATIONS, ShadowCaches

NEVER = (0.0,) * BINS
SOON = (1.0,) * BINS


def replay(shadow: ShadowCaches, right: bool) -> None:
    """One conversation in four returns, after five others; forecasts say so, or the opposite."""
    rng = Random(1)
    names = [rng.getrandbits(64) for _ in range(400)]
    for number, name in enumerate(names):
        returns = number % 4 == 0
        shadow.use(name, 0, 10, float(number))
        shadow.end_use(name, SOON if returns is right else NEVER, float(number))
        if number >= 20 and number % 4 == 0:
            before = names[number - 20]
            shadow.use(before, 10, 10, number + 0.5)
            shadow.end_use(before, NEVER, number + 0.5)


def test_right_forecasts_win() -> None:
    shadow = ShadowCaches()
    shadow.capacity = 100
    replay(shadow, right=True)
    assert shadow.returns == 95
    assert shadow.forecasts_win
    assert shadow.hits_by_value > 0.9 * shadow.wanted


def test_wrong_forecasts_do_not() -> None:
    shadow = ShadowCaches()
    shadow.capacity = 260
    replay(shadow, right=False)
    assert shadow.hits_by_recency > shadow.hits_by_value
    assert not shadow.forecasts_win


def test_where_all_fits_nothing_is_to_be_won() -> None:
    shadow = ShadowCaches()
    shadow.capacity = 10_000
    replay(shadow, right=True)
    assert shadow.hits_by_recency == shadow.hits_by_value > 0
    assert not shadow.forecasts_win


def test_a_few_returns_prove_nothing() -> None:
    shadow = ShadowCaches()
    shadow.capacity = 20
    for number in range(10):
        shadow.use(number, 0, 10, 0.0)
        shadow.end_use(number, SOON, 0.0)
        shadow.use(number, 10, 10, 1.0)
    assert not shadow.forecasts_win


def test_the_sample_shrinks_instead_of_growing() -> None:
    shadow, rng = ShadowCaches(), Random(2)
    shadow.capacity = 1_000_000
    for number in range(5000):
        shadow.use(rng.getrandbits(64), 0, 10, float(number))
    assert shadow.share < 1.0
    assert len(shadow) <= MAX_CONVERSATIONS


def test_a_use_without_an_end_is_given_up() -> None:
    shadow = ShadowCaches()
    shadow.capacity = 20
    shadow.use(1, 0, 10, 0.0)
    shadow.use(2, 0, 10, 4000.0)
    shadow.end_use(2, SOON, 4000.0)
    shadow.use(3, 0, 10, 4001.0)
    shadow.use(2, 10, 10, 4002.0)
    assert shadow.hits_by_value == 10
