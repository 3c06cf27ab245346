"""Candidate fleets within bounds, and the promises that one would keep."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from support.planned_model import TIMES

from kvmesh.planner.capacity.queueing import ModelledEngine, RequestShape
from kvmesh.planner.core.fleets import (
    MOST_VECTORS,
    MOST_WORKERS,
    RELAXED,
    Bounds,
    aims,
    decode_only,
    efficient_fleets,
    fulfilment,
    prefill_only,
)
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise

KIND = ModelledEngine(TIMES, 8192, 256, 1_000_000)
TTFT = Promise("ttft", 0.9, 2.0)


def shapes(rate: float = 1.0, count: int = 200, *classes: str) -> list[RequestShape]:
    rng, at, found = Random(2), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        name = classes[number % len(classes)] if classes else ""
        found.append(RequestShape(at, 4096, 4096, 100, name))
    return found


def test_fleets_of_one_pool_are_all_numbers_within_bounds() -> None:
    assert efficient_fleets([Pool("a")], [1.0], Bounds((2,), (5,))) == [(2,), (3,), (4,), (5,)]
    assert efficient_fleets([Pool("a")], [1.0], Bounds((3,), (3,))) == [(3,)]
    assert efficient_fleets([Pool("a", devices=4)], [1.0], Bounds((0,), (9,), 10)) == [
        (0,), (1,), (2,),
    ]  # fmt: skip
    assert efficient_fleets([Pool("a")], [1.0], Bounds((3,), (2,))) == []
    assert efficient_fleets([Pool("a", devices=8)], [1.0], Bounds((1,), (2,), 7)) == []


def test_the_cheaper_kind_comes_first() -> None:
    pools = [Pool("fast", cost=4.0), Pool("slow", cost=1.0)]
    fleets = efficient_fleets(pools, [1.0, 0.5], Bounds((0, 0), (2, 3)))
    assert fleets == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3)]


def test_pools_without_cost_are_ordered_by_capacity() -> None:
    assert efficient_fleets([Pool("a", cost=0.0)], [1.0], Bounds((0,), (3,))) == [(3,)]


@pytest.mark.parametrize(
    "most", [(10**9,), (999, 999), (150, 150, 150), (10**6, 3), (12,) * 5], ids=str
)
def test_many_fleets_are_thinned_out_within_their_bounds(most: tuple[int, ...]) -> None:
    pools = [Pool(str(n), cost=1.0 + n) for n in range(len(most))]
    speeds = [1.0 + n for n in range(len(most))]
    fleets = efficient_fleets(pools, speeds, Bounds((1,) * len(most), most))
    assert len(fleets) <= MOST_VECTORS + 1
    assert all(1 <= n <= high for fleet in fleets for n, high in zip(fleet, most, strict=True))
    assert fleets[0] == (1,) * len(most)
    assert fleets[-1] == most
    costs = [sum(n * pool.cost for n, pool in zip(f, pools, strict=True)) for f in fleets[:10]]
    assert costs == [costs[0] + step for step in range(10)]  # none is left out among few


def test_more_workers_keep_more() -> None:
    load = shapes(3.0)
    aimed = aims(load, [KIND], [TTFT])
    shares = [fulfilment(load, [KIND] * n, aimed).shares[0] for n in (1, 3, 5, 9)]
    assert all(a <= b for a, b in pairwise(shares))
    assert shares[0] < 0.2
    assert shares[-1] > 0.95


def test_without_workers_nothing_is_kept_and_without_requests_all() -> None:
    load = shapes()
    assert fulfilment(load, [], aims(load, [KIND], [TTFT])).shares == (0.0,)
    kept = fulfilment([], [KIND], aims([], [KIND], [TTFT]))
    assert (kept.shares, kept.quantiles) == ((1.0,), (0.0,))
    assert aims([], [KIND], [TTFT])[0].reachable


def test_a_share_is_that_of_the_class() -> None:
    load = shapes(1.5, 300, "", "batch", "chat")
    batch = Promise("ttft", 0.9, 600.0, "", "batch")
    aimed = aims(load, [KIND], [TTFT, batch, Promise("itl", 0.9, 1.0)])
    assert [len(aim.numbers) for aim in aimed] == [200, 100, 300]
    general, lenient, _ = fulfilment(load, [KIND], aimed).shares
    assert general < 0.5
    assert lenient == 1.0


def test_a_promise_for_a_class_without_requests_is_kept() -> None:
    load = shapes()
    aimed = aims(load, [KIND], [Promise("ttft", 0.99, 0.001, "", "nobody")])
    assert aimed[0].reachable
    assert fulfilment(load, [KIND], aimed).shares == (1.0,)


def test_a_promise_about_the_queue_bounds_the_wait_alone() -> None:
    load = shapes(0.3)
    aimed = aims(load, [KIND], [Promise("queue", 0.9, 0.5), Promise("ttft", 0.9, 0.5)])
    assert [aim.reachable for aim in aimed] == [True, False]
    few, many = (fulfilment(load, [KIND] * n, aimed) for n in (1, 6))
    assert few.shares[0] < many.shares[0]
    assert many.shares[0] > 0.95
    assert many.quantiles[0] < 0.5 < many.quantiles[1]


def test_a_bound_that_no_worker_keeps_is_relaxed_by_request() -> None:
    load = [replace(s, uncached=8000 if n % 2 else 400) for n, s in enumerate(shapes(0.2))]
    (aim,) = aims(load, [KIND], [Promise("ttft", 0.9, 0.5)])
    assert not aim.reachable
    assert aim.bounds[0] == 0.5
    assert aim.bounds[1] == pytest.approx(RELAXED * TIMES.prefill(8000))
    assert fulfilment(load, [KIND] * 20, [aim]).shares[0] > 0.95


def test_a_prompt_that_fits_no_worker_does_not_make_the_fleet_grow() -> None:
    load = [replace(s, prompt=2_000_000) if n % 5 == 0 else s for n, s in enumerate(shapes(0.2))]
    (aim,) = aims(load, [KIND], [TTFT])
    assert not aim.reachable
    assert inf in aim.bounds
    assert fulfilment(load, [KIND] * 9, [aim]).shares[0] > 0.95


def test_the_parts_of_a_request_for_prefill_and_decode() -> None:
    shape = RequestShape(1.0, 5000, 6000, 70, "batch")
    assert prefill_only(shape) == replace(shape, output=1)
    assert decode_only(shape) == replace(shape, uncached=1)


def test_a_part_of_a_large_fleet_stands_for_all_of_it() -> None:
    def load(workers: int) -> list[RequestShape]:
        return [RequestShape(n * 0.4 / workers, 2000, 4000, 40) for n in range(1500)]

    shares = []
    for workers in (MOST_WORKERS, 8 * MOST_WORKERS):
        requests = load(workers)
        shares.append(
            fulfilment(requests, [KIND] * workers, aims(requests, [KIND], [TTFT])).shares[0]
        )
    assert shares[0] == pytest.approx(shares[1], abs=0.02)
