"""Use by tenant has a bounded number of names, and loses nothing."""

from random import Random

import pytest

from kvmesh.frontend.tenant_figures import HALF_LIFE_S, OTHER, PUBLIC, TenantFigures, TenantUse


def tokens(count: int) -> TenantUse:
    return TenantUse(requests=1, prompt_tokens=count)


def counted(figures: TenantFigures) -> dict[str, int]:
    return {tenant: use.prompt_tokens for tenant, _, use in figures.series()}


def test_each_tenant_has_a_name_until_the_limit() -> None:
    figures = TenantFigures(2)
    for tenant in ("a", "b", "c", "d"):
        figures.add(tenant, "m", tokens(10), 0.0)
    assert counted(figures) == {"a": 10, "b": 10, OTHER: 20}


def test_amounts_are_summed_by_model() -> None:
    figures = TenantFigures(2)
    figures.add("a", "m", TenantUse(1, 1, 2, 3, 4, 0.5), 0.0)
    figures.add("a", "m", TenantUse(1, 0, 2, 3, 4, 0.5), 0.0)
    figures.add(None, "n", TenantUse(1), 0.0)
    assert list(figures.series()) == [
        ("a", "m", TenantUse(2, 1, 4, 6, 8, 1.0)),
        (PUBLIC, "n", TenantUse(1)),
    ]


def test_a_busier_tenant_takes_the_name_of_the_least_busy_one() -> None:
    figures = TenantFigures(2)
    figures.add("a", "m", tokens(10), 0.0)
    figures.add("b", "m", tokens(100), 0.0)
    figures.add("c", "m", tokens(15), 0.0)  # not yet much busier
    assert counted(figures) == {"a": 10, "b": 100, OTHER: 15}
    figures.add("c", "m", tokens(1), 0.0)
    figures.add("a", "m", tokens(1), 0.0)
    assert counted(figures) == {"b": 100, OTHER: 16, "c": 1}


def test_old_use_counts_less() -> None:
    figures = TenantFigures(1)
    figures.add("a", "m", tokens(100), 0.0)
    for halving in range(1, 5):
        figures.add("b", "m", tokens(1), halving * (HALF_LIFE_S + 1))
    figures.add("b", "m", tokens(20), 4 * (HALF_LIFE_S + 1))
    assert "b" in counted(figures)


def test_a_tenant_called_other_has_no_name_of_its_own() -> None:
    figures = TenantFigures(1)
    figures.add(OTHER, "m", tokens(100), 0.0)
    figures.add("a", "m", tokens(1), 0.0)
    assert counted(figures) == {OTHER: 100, "a": 1}


@pytest.mark.parametrize("limit", [1, 3])
def test_names_stay_bounded_and_every_use_counts_once(limit: int) -> None:
    random, figures, total, last = Random(limit), TenantFigures(limit), 0, 0
    lost = 0
    for step in range(3000):
        before = counted(figures)
        amount = random.randrange(1, 100)
        figures.add(f"t{random.randrange(200)}", "m", tokens(amount), float(step))
        after = counted(figures)
        gone = set(before) - set(after)
        lost += sum(before[name] for name in gone)
        total += amount
        assert len(set(after) - {OTHER}) <= limit
        assert sum(after.values()) + lost == total
        last = len(figures._tenants)
    assert last <= 9 * limit
