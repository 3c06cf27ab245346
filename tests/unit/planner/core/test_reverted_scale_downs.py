"""A scale-down that was reverted soon is not repeated at the same load."""

from kvmesh.planner.core.groups.reverted_scale_downs import REMEMBERED_S, SOON_S, RevertedScaleDowns


def reverted(after: float = 60.0, level: float = 1.0) -> RevertedScaleDowns:
    """Five workers shrink to four at a load of 1, and grow again."""
    one = RevertedScaleDowns()
    one.removed(5.0, 1.0, 0.0)
    one.added(6.0, level, after)
    return one


def test_the_fleet_before_is_kept_for_a_while_at_the_same_load() -> None:
    one = reverted()
    assert one.least(1.0, 60.0) == 5.0
    assert one.least(0.95, 60.0 + REMEMBERED_S) == 5.0
    assert one.least(1.0, 61.0 + REMEMBERED_S) == 0.0
    assert one.least(0.8, 60.0) == 0.0


def test_growth_long_after_or_for_another_load_reverts_nothing() -> None:
    assert reverted(after=SOON_S + 1).least(1.0, 700.0) == 0.0
    assert reverted(level=1.5).least(1.5, 61.0) == 0.0
    assert RevertedScaleDowns().least(1.0, 0.0) == 0.0


def test_one_scale_down_is_reverted_once() -> None:
    one = reverted(level=1.5)
    one.added(7.0, 1.0, 61.0)
    assert one.least(1.0, 62.0) == 0.0
