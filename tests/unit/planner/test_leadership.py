"""The planner with the oldest lease leads."""

from kvmesh.bus.messages import Instance, Role
from kvmesh.planner.leadership import Leadership


def card(name: str, started: float) -> Instance:
    return Instance(instance=name, role=Role.PLANNER, name=name, version="", started=started)


def test_the_oldest_leads_and_equal_ones_are_ordered_by_instance() -> None:
    a, b, c = card("a", 5.0), card("b", 5.0), card("c", 9.0)
    leadership = Leadership()
    for each in (a, b, c):
        leadership.joined(each)
    assert [leadership.leads(each, 0.0) for each in (a, b, c)] == [True, False, False]
    leadership.left("a")
    leadership.left("a")
    assert [leadership.leads(each, 0.0) for each in (b, c)] == [True, False]


def test_a_single_planner_leads_even_before_it_sees_its_own_card() -> None:
    assert Leadership().leads(card("a", 1.0), 0.0)


def test_a_planner_whose_lease_lapsed_waits_for_the_cards_of_the_others() -> None:
    old, new = card("a", 1.0), card("a", 20.0)
    leadership = Leadership()
    leadership.joined(old)
    leadership.lapsed(now=100.0, lease_s=10.0)
    assert not leadership.leads(old, 109.0)
    assert not leadership.leads(new, 111.0)  # its own card is still the former one
    leadership.joined(new)
    assert not leadership.leads(new, 109.0)
    assert leadership.leads(new, 110.0)
    leadership.joined(card("b", 15.0))
    assert not leadership.leads(new, 111.0)
