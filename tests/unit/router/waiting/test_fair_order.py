"""Order of the waiting requests, computed by hand; none is lost, starved or duplicated."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routing import entry

from kvmesh.bus.messages import SeqWait
from kvmesh.router.waiting.fair_order import FairOrder


def lane(
    *entries: SeqWait, quantum: float = 100, weights: Any = None, bound: float = 1e9
) -> FairOrder:
    made = FairOrder(quantum, weights or {}, bound)
    for one in entries:
        made.push(one)
    return made


def drain(waiting: FairOrder, time: float = 0.0) -> list[str]:
    """Remove all entries; returns their order."""
    order = []
    while (head := waiting.head(time)) is not None:
        waiting.remove(head.request, placed=True)
        order.append(head.request)
    assert len(waiting) == 0
    return order


def test_lower_keys_leave_first_and_equal_ones_by_arrival() -> None:
    waiting = lane(entry("late", key=5), entry("b", key=1, arrived=2), entry("a", key=1, arrived=1))
    assert drain(waiting) == ["a", "b", "late"]


def test_a_higher_tier_always_leaves_first() -> None:
    waiting = lane(entry("a"), entry("b", tier=2, key=9), entry("c", tier=1), entry("d", tier=2))
    assert drain(waiting) == ["d", "b", "c", "a"]


def test_fair_classes_take_turns_by_cost() -> None:
    # Class x sends 100 tokens a turn, one request; class y, whose requests cost 50, two.
    waiting = lane(
        *(entry(f"x{i}", fair_class="x", key=i, cost=100) for i in range(3)),
        *(entry(f"y{i}", fair_class="y", key=i, cost=50) for i in range(4)),
    )
    assert drain(waiting) == ["x0", "y0", "y1", "x1", "y2", "y3", "x2"]


def test_a_large_request_waits_for_enough_deficit() -> None:
    waiting = lane(
        entry("big", fair_class="x", cost=250),
        *(entry(f"y{i}", fair_class="y", key=i, cost=100) for i in range(5)),
    )
    # x has 100, then 200, then 300 tokens to its credit.
    assert drain(waiting) == ["y0", "y1", "big", "y2", "y3", "y4"]


def test_rounds_without_a_placement_are_skipped_at_once() -> None:
    waiting = lane(
        entry("x", fair_class="x", cost=10**9),
        entry("y", fair_class="y", cost=10**9 - 5),
        entry("z", fair_class="z", cost=2 * 10**9),
        quantum=1,
    )
    assert drain(waiting) == ["y", "x", "z"]


def test_weights_multiply_the_quantum() -> None:
    waiting = lane(
        *(entry(f"g{i}", fair_class="gold", key=i) for i in range(4)),
        *(entry(f"f{i}", fair_class="free", key=i) for i in range(2)),
        weights={"gold": 2.0},
    )
    assert drain(waiting) == ["g0", "g1", "f0", "g2", "g3", "f1"]


def test_an_old_entry_goes_before_all_others() -> None:
    waiting = lane(entry("old", key=1e9, arrived=0.0), entry("vip", tier=9, arrived=25), bound=30.0)
    assert drain(waiting, time=31.0) == ["old", "vip"]


@pytest.mark.parametrize("bound", [1e9, 0.0])
def test_an_entry_that_changes_its_lane_leaves_the_other(bound: float) -> None:
    waiting = lane(entry("a", lane="x"), entry("b", lane="x", key=1, arrived=1.0), bound=bound)
    waiting.push(entry("a", lane="y"))
    heads = [waiting.head(9.0, blocked) for blocked in ({"y"}, {"x"}, {"x", "y"})]
    assert [head.request if head is not None else None for head in heads] == ["b", "a", None]


def test_an_entry_can_move_and_be_cancelled() -> None:
    waiting = lane(entry("a", key=1), entry("b", key=2), entry("c", key=3))
    waiting.push(entry("c", key=0))
    waiting.push(entry("b", key=2, tier=1))
    waiting.remove("a", placed=False)
    assert drain(waiting) == ["b", "c"]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 400)),
        min_size=1,
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_depends_on_the_events_alone(
    drawn: list[tuple[int, int, int]], rng: Random
) -> None:
    entries = [
        entry(f"e{i}", tier=tier, fair_class=str(fair), key=float(i), cost=cost, arrived=float(i))
        for i, (tier, fair, cost) in enumerate(drawn)
    ]
    quiet, queried = lane(), lane()
    for one in entries:
        quiet.push(one)
        queried.push(one)
        if rng.random() < 0.5:
            queried.head(0.0)
    assert drain(quiet) == drain(queried)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 5), st.integers(1, 400), st.sampled_from("abc")
        ),
        min_size=1,
        max_size=40,
    )
)
def test_without_a_blocked_lane_no_request_is_skipped(
    drawn: list[tuple[int, int, int, str]],
) -> None:
    waiting = lane()
    for i, (tier, fair, cost, name) in enumerate(drawn):
        waiting.push(entry(f"e{i}", tier=tier, fair_class=str(fair), key=i, cost=cost, lane=name))
    while (head := waiting.head(0.0)) is not None:
        assert waiting.head(0.0, {"none of them"}) == head
        others = waiting.head(0.0, {head.lane})
        assert others is None or others.lane != head.lane
        waiting.remove(head.request, placed=True)
    assert not waiting.lanes


@given(st.integers(1, 40), st.integers(0, 200))
def test_no_request_starves_past_the_bound(crowd: int, age: int) -> None:
    waiting = lane(bound=100.0)
    waiting.push(entry("plain", key=1e9, arrived=0.0))
    for number in range(crowd):
        waiting.push(entry(f"vip{number}", tier=5, key=-1e9, arrived=float(age)))
    first = waiting.head(float(age) + 0.5)
    assert first is not None
    assert (first.request == "plain") == (age + 0.5 > 100)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_subdividing_a_class_gains_nothing(weight: float) -> None:
    greedy = [entry(f"x{n}", fair_class=f"x\x1fown{n}") for n in range(12)]
    modest = [entry(f"y{n}", fair_class="y") for n in range(12)]
    mixed = [one for pair in zip(greedy, modest, strict=True) for one in pair]
    order = [name[0] for name in drain(lane(*mixed, weights={"x": weight}))]
    share = weight / (weight + 1)
    for count in range(1, round(12 / share)):
        assert abs(order[:count].count("x") - share * count) <= 2
