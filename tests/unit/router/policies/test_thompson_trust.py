"""Bounds of the Thompson policy's deviations from kv, in simulated fleets."""

from collections.abc import Callable
from random import Random
from statistics import mean

import pytest
from support.routing import overlaps, request, sequence, worker

from kvmesh.bus.messages import Candidate, Decision, Outcome
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies.thompson import Thompson
from kvmesh.router.policies.thompson_trust import MIN_RADIUS, Trust
from kvmesh.settings.schema import RouterSettings

TEN = sequence(*range(10))
World = Callable[[Candidate, int], float]


def first_tokens(policy: str, world: World, turns: int, seed: int = 1) -> list[float]:
    """Times to the first token of one request after another, each on four workers.

    One of them, at random, holds most of the prompt; all decode something, and none prefills.
    """
    rng = Random(seed)
    settings = RouterSettings(
        policy=policy, predicted_ttl_s=0.0, queue_threshold=0.0, prefill_weight=3.0
    )
    core = RouterCore("m", "r", settings, Random(seed))
    for name in "abcd":
        core.join(worker(name))
    times = []
    for turn in range(turns):
        core.table.active_blocks[:4] = [rng.uniform(0, 40) for _ in range(4)]
        held = overlaps({rng.choice("abcd"): (8,)})
        decision = core.decide(request(str(turn), TEN), held, float(turn))
        core.apply_route_event(decision, float(turn))
        times.append(world(decision.chosen, turn) * rng.lognormvariate(0, 0.3))
        core.apply_route_event(outcome(decision, times[-1]), float(turn))
    return times


def outcome(decision: Decision, ttft: float) -> Outcome:
    return Outcome(
        request=decision.request, instance=decision.chosen.instance, time=0.0, cached_tokens=0,
        output_tokens=11, ttft_s=ttft, total_s=ttft + 0.5, finish="stop",
    )  # fmt: skip


def prefill_only(chosen: Candidate, _: int) -> float:
    return 0.05 + 0.05 * (10 - sum(chosen.overlap))


def fast_until_learned(chosen: Candidate, turn: int) -> float:
    """One worker is fast for 60 requests, then the slowest."""
    usual = 0.05 + 0.02 * (10 - sum(chosen.overlap)) + 0.01 * chosen.decode
    return usual * (1 if chosen.instance != "c" else 0.2 if turn < 60 else 3)


def test_it_departs_from_kv_where_outcomes_improve() -> None:
    kv, bandit = (mean(first_tokens(p, prefill_only, 800)) for p in ("kv", "thompson"))
    assert bandit < 0.8 * kv


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_worker_that_turns_slow_costs_little(seed: int) -> None:
    kv, bandit = (mean(first_tokens(p, fast_until_learned, 800, seed)) for p in ("kv", "thompson"))
    assert bandit < 1.05 * kv


@pytest.mark.parametrize(("gain", "radius"), [(-1.0, 1.0), (1.0, MIN_RADIUS)])
def test_the_radius_follows_the_results_of_departures(gain: float, radius: float) -> None:
    trust, rng = Trust(), Random(3)
    for _ in range(2000):
        held_out = trust.holds_out(rng)
        trust.record(held_out, rng.gauss(0.0 if held_out else gain, 1.0))
    assert trust.radius == radius


def test_a_share_of_contested_requests_is_held_out_and_explained() -> None:
    notes = []
    core = RouterCore("m", "r", RouterSettings(policy="thompson", queue_threshold=0.0), Random(1))
    for name in "ab":
        core.join(worker(name))
    for turn in range(600):
        decision = core.decide(request(str(turn), b"", tokens=160), None, float(turn))
        core.apply_route_event(decision, float(turn))
        notes.append(decision.note)
        slow = decision.chosen.instance == "a"
        core.apply_route_event(outcome(decision, 1.0 if slow else 0.1), float(turn))
    assert notes[:50] == ["learning"] * 50
    held_out = notes.count("held out: as kv")
    assert 5 < held_out < 120


def test_in_saturation_it_decides_as_kv() -> None:
    choices = []
    for policy in ("kv", "thompson"):
        core = RouterCore("m", "r", RouterSettings(policy=policy, queue_threshold=0.0), Random(1))
        for name in "abc":
            core.join(worker(name))
        core.table.prefill_tokens[:3] = [8000.0, 9000.0, 10000.0]
        rng, chosen = Random(2), []
        for turn in range(200):
            core.table.active_blocks[:3] = [rng.uniform(0, 40) for _ in range(3)]
            decision = core.decide(request(str(turn), TEN), None, float(turn))
            core.apply_route_event(decision, float(turn))
            core.apply_route_event(
                outcome(decision, 0.1 if decision.chosen.instance == "c" else 3.0), 0.0
            )
            chosen.append(decision.chosen.instance)
        choices.append(chosen)
        if isinstance(core.policies.default, Thompson):
            assert core.policies.default.evidence > 50
            assert decision.note == "saturated: as kv"
    assert choices[0] == choices[1]


def test_queue_time_is_no_evidence() -> None:
    beliefs = []
    for waited in (0.0, 100.0):
        core = RouterCore("m", "r", RouterSettings(policy="thompson"), Random(1))
        core.join(worker("a"))
        decision = core.decide(request("1", TEN), None, waited, arrived=0.0)
        core.commit(decision, waited)
        core.apply_route_event(outcome(decision, waited + 0.5), waited + 0.5)
        beliefs.append(core.policies.default.state())
    assert beliefs[0] == beliefs[1] is not None
