"""Fleets without requests: they rest, wake at once, and count what runs."""

from dataclasses import replace

import pytest

from kvmesh.bus.messages import Capacity, Instance, ModelCard, Role, SeqAdd, SeqFree, SeqWait
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool

OPTIONS = PlanOptions(startup_s=5.0, down_cooldown_s=10.0, zero_after_s=60.0)
STEP = 5.0


def card(name: str) -> Instance:
    return Instance(
        instance=name,
        role=Role.WORKER,
        name=name,
        version="",
        started=0.0,
        model=ModelCard(name="m", context=4096, block_size=16, files=""),
        capacity=Capacity(blocks=1000, max_sequences=8, max_batched_tokens=2048),
    )


def planner(least: int, workers: int, options: PlanOptions = OPTIONS) -> PlannerCore:
    core = PlannerCore(options, [Pool("w", min=least, max=8)])
    for number in range(workers):
        core.joined(card(f"w-{number}"), "w", 0.0)
    core.observe_wanted({"w": workers}, 0.0)
    return core


def arrive(core: PlannerCore, at: float, count: int) -> None:
    for number in range(count):
        request = f"{at}-{number}"
        core.on_sequence(SeqWait(request, "r-1", "", 0, "", at, 900, 0.0, 1.0))
        core.on_sequence(SeqAdd(request, "w-0", 0, b"", 0, 9, 0, 0.0))
        core.on_sequence(SeqFree(request))


def run(core: PlannerCore, start: float, end: float) -> list[int]:
    """The wanted numbers of the decisions in a period."""
    found = []
    now = start
    while now < end:
        found.append(core.decide(now).wanted["w"])
        now += STEP
    return found


@pytest.mark.parametrize(("least", "rest"), [(1, 1), (2, 2), (0, 1)])
def test_a_fleet_without_requests_shrinks_to_its_least_size(least: int, rest: int) -> None:
    core = planner(least, 4, replace(OPTIONS, zero_after_s=3600.0))
    arrive(core, 1.0, 20)
    sizes = run(core, 5.0, 900.0)
    assert sizes[:6] == [4] * 6  # a past need keeps workers for a while
    assert sizes[-1] == rest
    assert sizes == sorted(sizes, reverse=True)


def test_a_fleet_that_requests_keep_waiting_for_does_not_shrink() -> None:
    core = planner(1, 4)
    core.on_sequence(SeqWait("q", "r-1", "", 0, "", 1.0, 900, 0.0, 1e6))
    assert set(run(core, 5.0, 400.0)) == {4}


def test_requests_of_the_window_do_not_wake_an_idle_fleet() -> None:
    core = planner(0, 1)
    arrive(core, 1.0, 5)
    sizes = run(core, 5.0, 900.0)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_a_wake_starts_a_worker_at_the_next_decision() -> None:
    core = planner(0, 1)
    arrive(core, 1.0, 5)
    run(core, 5.0, 302.0)
    core.left("w-0")
    assert run(core, 302.0, 320.0) == [0] * 4
    core.wake(1, 320.0)
    assert run(core, 321.0, 322.0) == [1]


def test_a_worker_that_has_just_come_does_not_leave_at_once() -> None:
    core = planner(0, 1)
    assert core.decide(30.0).wanted == {"w": 1}
    assert core.decide(90.0).wanted == {"w": 0}


def test_a_planner_that_takes_over_waits_for_the_cooldown() -> None:
    core = planner(1, 4)
    core.resumed(200.0, {})
    assert core.decide(205.0).wanted == {"w": 4}
    assert core.decide(250.0).wanted == {"w": 1}


def test_an_assumed_number_begins_and_cancels_starts() -> None:
    view = PoolView(Pool("w"), 5.0)
    for number in range(2):
        view.joined(card(f"w-{number}"), 0.0, begun=False)
    view.assume(5, 0.0)
    assert (view.wanted, view.starts.pending) == (5, 3)
    view.assume(5, 1.0)
    assert view.starts.pending == 3
    view.want(6, 1.0)  # as an advisory planner does at each interval
    view.assume(2, 2.0)
    assert (view.wanted, view.starts.pending) == (2, 0)
    assert view.give_up(100.0, 900.0) == 0
