"""The search for the cheapest fleet asks for few simulations, and finds what a plain one finds."""

from bisect import bisect_left
from collections.abc import Sequence

import pytest
from support.sizing import kind, workload

from kvmesh.planner.core.fleets import Counts
from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.sizing.fleets import SizedFleet, WorkerKind
from kvmesh.simulator.sizing.search import DOUBLE, STEP, first_keeping, size_fleet
from kvmesh.workload.model import Workload

PROMISES = [Promise("ttft", 0.9, 3.0)]


class FakeFleets:
    """Fleets that keep 95 % from `enough` workers per 1,000 requests on, and `short` below that."""

    def __init__(self, enough: float, short: float | None = None) -> None:
        self.enough = enough
        self.short = short
        self.asked: list[tuple[int, int, bool]] = []  # requests, workers, whole

    def __call__(
        self,
        workload: Workload,
        kinds: Sequence[WorkerKind],
        counts: Counts,
        promises: Sequence[Promise],
        options: SimulationOptions,
        *,
        whole: bool,
    ) -> SizedFleet:
        workers = sum(counts)
        self.asked.append((len(workload), workers, whole))
        filled = workers * 1000 / (self.enough * len(workload))
        keeps = filled >= 1
        share = 0.95 if keeps else 0.9 * filled if self.short is None else self.short
        seconds = 3.0 / filled if self.short is None else 9.0
        return SizedFleet(
            counts, float(workers), (share,), (seconds,), keeps, not keeps and not whole
        )

    def with_all(self, requests: int) -> list[int]:
        return [workers for size, workers, _ in self.asked if size == requests]


def sized(fleets: FakeFleets, requests: int, near: Counts | None = None) -> SizedFleet | None:
    kinds = [kind(most=512)]
    options = SimulationOptions()
    return size_fleet(workload(2.0, requests), kinds, PROMISES, options, near=near, simulate=fleets)


@pytest.mark.parametrize("step", [STEP, DOUBLE])
def test_each_answer_is_found_from_each_start(step: float) -> None:
    capacities = [float(n) for n in range(1, 31)]
    for answer in range(len(capacities) + 1):
        for start in (0.0, 1.0, 7.3, 15.0, 30.0, 99.0):
            asked: list[int] = []

            def keeps(place: int, answer: int = answer, asked: list[int] = asked) -> bool:
                asked.append(place)
                return place >= answer

            found = first_keeping(capacities, keeps, start, step)
            assert found == (answer if answer < len(capacities) else None)
            assert len(asked) == len(set(asked))
            if found:
                assert {found - 1, found} <= set(asked)


def test_a_good_guess_needs_few_questions() -> None:
    capacities = [1.0 * n for n in range(1, 201)]
    for wrong in (0.93, 1.0, 1.07):
        asked: list[int] = []

        def keeps(place: int, asked: list[int] = asked) -> bool:
            asked.append(place)
            return capacities[place] >= 100

        place = first_keeping(capacities, keeps, 100 * wrong, STEP)
        assert place == bisect_left(capacities, 100)
        assert len(asked) <= 7


def test_no_place_is_asked_for_without_fleets() -> None:
    assert first_keeping([], lambda _: True, 0.0, DOUBLE) is None


def test_a_part_of_the_workload_says_where_to_begin() -> None:
    fleets = FakeFleets(enough=4.0)
    found = sized(fleets, 12_000)
    assert found is not None
    assert found.counts == (48,)
    asked = fleets.with_all(12_000)
    assert {47, 48} <= set(asked)
    assert len(asked) <= 6
    assert not any(whole for size, _, whole in fleets.asked if size == 12_000)


def test_a_small_workload_is_sized_by_doubling() -> None:
    fleets = FakeFleets(enough=40.0)
    found = sized(fleets, 120)
    assert found is not None
    assert found.counts == (5,)
    assert fleets.asked == [(120, n, True) for n in (1, 2, 4, 8, 6, 5)]


@pytest.mark.parametrize("near", [1, 20, 46, 50, 200, 2000])
def test_the_first_fleet_does_not_change_the_answer(near: int) -> None:
    found = sized(FakeFleets(enough=4.0), 12_000, (near,))
    assert found is not None
    assert found.counts == (48,)


def test_fleets_that_never_keep_end_the_search_early() -> None:
    for near, most in ((None, 2), ((30,), 8)):
        fleets = FakeFleets(enough=10_000.0, short=0.5)
        assert sized(fleets, 12_000, near) is None
        assert len(fleets.with_all(12_000)) <= most


def test_two_failures_do_not_end_a_search_that_has_found_a_fleet() -> None:
    fleets = FakeFleets(enough=25.0, short=0.5)
    found = sized(fleets, 120, (3,))
    assert found is not None
    assert found.counts == (3,)
