"""Thompson policy: kv without evidence, then outcomes; delayed, missing and shared evidence."""

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from support.routing import overlaps, request, sequence, worker

from kvmesh.bus.messages import Decision, Outcome, SeqFree
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies.thompson import Thompson
from kvmesh.settings.schema import RouterSettings

TEN = sequence(*range(10))


def core(**settings: Any) -> tuple[RouterCore, Thompson]:
    options = {"policy": "thompson", "predicted_ttl_s": 0.0, "thompson_trust": 20, **settings}
    router = RouterCore("m", "r", RouterSettings(**options), Random(7))
    for name in "abc":
        router.join(worker(name))
    assert isinstance(router.policies.default, Thompson)
    return router, router.policies.default


def outcome(decision: Decision, ttft: float | None, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "request": decision.request, "instance": decision.chosen.instance, "time": 0.0,
        "cached_tokens": 0, "output_tokens": 11, "ttft_s": ttft, "total_s": (ttft or 0) + 0.5,
        "finish": "stop",
    }  # fmt: skip
    return Outcome(**(fields | changes))


def train(
    router: RouterCore, times: dict[str, float], turns: int, now: float = 0.0
) -> Counter[str]:
    """Place requests one by one with the outcomes of their workers; returns requests by worker."""
    went: Counter[str] = Counter()
    for turn in range(turns):
        decision = router.decide(request(f"t{now}-{turn}", TEN), None, now)
        router.commit(decision, now)
        went[decision.chosen.instance] += 1
        router.apply_route_event(outcome(decision, times[decision.chosen.instance]), now)
        router.apply(SeqFree(decision.request), now)
    return went


def test_without_evidence_it_decides_as_kv() -> None:
    router, policy = core()
    held = overlaps({"b": (10,)})
    decision = router.decide(request("1", TEN), held, 0.0)
    assert (decision.chosen.instance, decision.note) == ("b", "learning")
    assert policy.evidence == 0


def test_it_learns_which_worker_is_slow() -> None:
    router, policy = core()
    times = {"a": 0.1, "b": 0.1, "c": 1.0}
    train(router, times, 60)
    assert policy.evidence > 20
    went = train(router, times, 200, now=1.0)
    assert went["c"] < 15
    assert min(went["a"], went["b"]) > 20


def test_it_notices_that_a_slow_worker_recovers() -> None:
    router, _ = core(thompson_forgetting=0.97)
    train(router, {"a": 0.1, "b": 0.1, "c": 1.0}, 100)
    train(router, {"a": 0.3, "b": 0.3, "c": 0.05}, 300, now=1.0)
    went = train(router, {"a": 0.3, "b": 0.3, "c": 0.05}, 100, now=2.0)
    assert went["c"] > 60


def test_overlap_still_counts_when_workers_are_alike() -> None:
    router, _ = core()
    times = dict.fromkeys("abc", 0.1)
    train(router, times, 60)
    held = overlaps({"b": (10,)})
    chosen = [router.decide(request(f"x{n}", TEN), held, 1.0).chosen.instance for n in range(100)]
    assert chosen.count("b") > 90


def test_it_never_takes_a_rank_far_more_expensive_for_kv() -> None:
    router, _ = core()
    train(router, {"a": 5.0, "b": 5.0, "c": 0.01}, 60)
    for number in range(8):
        load = request(f"l{number}", sequence(*range(100 * number, 100 * number + 30)))
        pinned = router.decide(load, None, 1.0)
        router.commit(_moved(pinned, "c"), 1.0)
    chosen = {router.decide(request(f"x{n}", TEN), None, 1.0).chosen.instance for n in range(50)}
    assert "c" not in chosen


def _moved(decision: Decision, instance: str) -> Decision:
    chosen = msgspec.structs.replace(decision.chosen, instance=instance)
    return msgspec.structs.replace(decision, chosen=chosen)


def test_a_missing_outcome_counts_as_late_and_an_abort_does_not_count() -> None:
    router, policy = core(thompson_feedback_s=30.0)
    lost = router.decide(request("1", TEN), None, 0.0)
    aborted = router.decide(request("2", TEN), None, 0.0)
    unplaced = router.decide(request("3", TEN), None, 0.0)
    router.commit(lost, 0.0)
    router.commit(aborted, 0.0)
    router.apply_route_event(outcome(aborted, None, finish="abort"), 1.0)
    router.expire(29.0)
    assert policy.evidence == 0
    router.expire(31.0)
    assert policy.evidence == 1
    router.apply_route_event(outcome(lost, 0.1), 32.0)
    router.apply_route_event(outcome(unplaced, 0.1), 32.0)
    assert policy.evidence == 1, "late and foreign outcomes are not counted"


def test_replicas_add_up_their_evidence() -> None:
    one, first = core()
    other, second = core()
    train(one, {"a": 0.1, "b": 0.1, "c": 1.0}, 60)
    state = first.state()
    assert state is not None
    assert second.state() is None
    second.merge("one", state, own=False)
    second.merge("one", state, own=False)
    assert second.evidence == pytest.approx(first.evidence)
    went = train(other, {"a": 0.1, "b": 0.1, "c": 1.0}, 100)
    assert went["c"] < 15


@pytest.mark.parametrize("state", [b"", b"\xc1", b"\x84\xa5count\x01"])
def test_unreadable_states_are_refused(state: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        core()[1].merge("x", state, own=False)


def test_it_reports_its_gain_over_kv_on_held_out_requests() -> None:
    router, policy = core()
    [report] = [each for each in router.learning.reports("m") if each.learner == "thompson"]
    assert (report.on, report.fallback) == (False, "kv")
    train(router, {"a": 2.0, "b": 0.1, "c": 0.1}, 40)
    [report] = [each for each in router.learning.reports("m") if each.learner == "thompson"]
    assert report.on
    assert report.observations == pytest.approx(policy.evidence)
    assert "trust" in report.reason
