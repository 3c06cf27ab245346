"""Answers to questions about fleets: rescaling, budget, warm caches, refusals."""

from collections.abc import Callable
from itertools import count

import pytest
from msgspec.structs import replace
from support.ended_requests import POOL, distinct, ended, question
from support.planned_model import BLOCK, START

from kvmesh.bus.messages import FleetAnswer, FleetQuestion, PromisedLatency
from kvmesh.oracle.evaluation import FEWEST, QuestionError, answer
from kvmesh.oracle.warm_up import WarmedRequests, cached_before
from kvmesh.planner.capacity.queueing import ModelledEngine, RequestShape
from kvmesh.planner.capacity.step_times import FittedStepTimes
from kvmesh.planner.core.fleets import aims, fulfilment
from kvmesh.planner.core.promises import Promise
from kvmesh.settings.schema import RouterSettings
from kvmesh.workload.capture import CapturedRound

PROMISE = "ttft p90=2s"
FAST = 1e9  # requests per second: no window is cut


def asked(
    question: FleetQuestion, captured: list[CapturedRound], rate: float = FAST,
    clock: Callable[[], float] = lambda: 0.0,
) -> FleetAnswer:  # fmt: skip
    return answer(question, captured, RouterSettings(), rate, clock)


def shares(found: FleetAnswer) -> list[float]:
    return [share for each in found.candidates for share in each.shares.values()]


def conversations(sessions: int = 24, turns: int = 6) -> list[CapturedRound]:
    """Agents whose prompts grow by 4 blocks, in turn, each with its former prompt cached."""
    found = []
    for number in range(sessions * turns):
        session, turn = number % sessions, number // sessions
        first, length = 1 + session * 1000, 40 + 4 * turn
        found.append(
            ended(
                f"r-{number}", START + number, range(first, first + length), output=10,
                cached=(length - 4) * BLOCK, session=f"s-{session}",
            )
        )  # fmt: skip
    return found


def test_each_fleet_is_simulated_at_the_level_asked_about() -> None:
    captured = distinct(100, 0.7)
    now = asked(question([[2], [4]], 0.7), captured)
    dense = asked(question([[2], [4]], 2.0), captured)
    assert [each.workers for each in now.candidates] == [{"workers": 2}, {"workers": 4}]
    assert {each.evaluated_by for each in now.candidates} == {"simulation"}
    assert now.requests == 100
    assert min(shares(now)) > 0.95
    assert shares(dense)[0] < 0.9
    assert shares(dense)[0] < shares(dense)[1]
    assert dense.candidates[0].busy > now.candidates[0].busy > now.candidates[1].busy
    assert dense.candidates[0].quantiles[PROMISE] > now.candidates[0].quantiles[PROMISE]


def test_a_long_window_is_cut_to_its_latest_part() -> None:
    captured = distinct(120, 1.0)
    budget_s = 60.0
    found = asked(question([[3], [4]], 1.0, budget_s), captured, rate=2.5)
    assert found.requests == int(2.5 * 0.8 * budget_s / 2)
    again = asked(question([[3], [4]], 1.0, budget_s), captured[-found.requests :])
    assert found.candidates == again.candidates


def test_fleets_beyond_the_budget_are_left_out() -> None:
    clock = count(0.0, 0.25)
    captured = distinct(60, 1.0)
    found = asked(question([[3], [4], [5], [6]], 1.0, 40.0), captured, clock=lambda: next(clock))
    assert [each.workers["workers"] for each in found.candidates] == [3, 4]
    late = count(0.0, 100.0)
    with pytest.raises(QuestionError, match="take more than 40 s on the first fleet"):
        asked(question([[3]], 1.0, 40.0), captured, clock=lambda: next(late))


def test_what_was_cached_before_the_window_is_cached_in_it() -> None:
    captured = conversations()
    before = cached_before(captured)
    assert [number for number, _ in before] == list(range(24))
    assert {tokens for _, tokens in before} == {36 * BLOCK}
    workload, seconds = WarmedRequests(captured).workload(1.0, 1e-3, 4)
    warm_up = workload.rounds[len(captured) :]
    assert len(warm_up) == 24
    assert seconds == pytest.approx(2 * 24 * 36 * BLOCK * 1e-3 / 4)
    assert all(round_.at_s < seconds for round_ in warm_up)
    assert workload.rounds[0].at_s == pytest.approx(seconds)
    large = asked(question([[4]], 1.0, ttft_s=0.2), captured)
    assert shares(large) == [1.0]  # 0.77 s on empty caches


def test_a_fleet_whose_caches_are_too_small_misses_where_the_queue_model_does_not() -> None:
    """The prompts of all conversations fit into four workers, and not into two."""
    captured = conversations()
    pool = replace(POOL, kv_tokens=420 * BLOCK)
    found = asked(question([[2], [4]], 1.0, ttft_s=0.3, pools=[pool]), captured)
    assert shares(found)[1] > 0.9
    assert shares(found)[0] < 0.6
    times = FittedStepTimes(pool.step_s, pool.prefill_step_s, pool.token_s, pool.kv_token_s)
    kind = ModelledEngine(times, pool.step_tokens, pool.max_sequences, pool.kv_tokens)
    shapes = [RequestShape(e.arrival - START, 4 * BLOCK, e.decision.tokens, 10) for e in captured]
    aimed = aims(shapes, [kind], [Promise("ttft", 0.9, 0.3)])
    assert fulfilment(shapes, [kind] * 2, aimed).shares[0] > 0.95


def test_classes_have_their_own_promises() -> None:
    captured = distinct(120, 2.0)
    mixed = [
        replace(each, decision=replace(each.decision, hints=replace(
            each.decision.hints, fair_class="batch" if number % 2 else None
        )))
        for number, each in enumerate(captured)
    ]  # fmt: skip
    asking = question([[2]], 2.0)
    loose = replace(asking.promises[0], seconds=60.0, request_class="batch")
    found = asked(replace(asking, promises=[asking.promises[0], loose]), mixed)
    kept = found.candidates[0].shares
    assert set(kept) == {PROMISE, "ttft batch:p90=60s"}
    assert kept["ttft batch:p90=60s"] == 1.0
    assert kept[PROMISE] < 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fleets": [[1, 2]]}, "not one number for each pool"),
        ({"fleets": [[0]]}, "does not have 1 to"),
        ({"fleets": [[1000]]}, "does not have 1 to"),
        ({"fleets": [[-1]]}, "does not have 1 to"),
        ({"fleets": []}, "0 fleets, not 1 to 16"),
        ({"pools": []}, "not one number for each pool"),
        ({"pools": [replace(POOL, token_s=float("nan"))]}, "has a step time or a cost"),
        ({"pools": [replace(POOL, step_tokens=0)]}, "step_tokens is 0, not above 0"),
        ({"level": float("nan")}, "level is nan"),
        ({"budget_s": 1e9}, "budget_s is 1e.09, not above 0 and at most 600"),
        ({"promises": [PromisedLatency(metric="x", quantile=0.9, seconds=1)]}, "metrics: x"),
    ],
)
def test_a_fleet_that_cannot_be_simulated_is_refused(
    changes: dict[str, object], reason: str
) -> None:
    asking = replace(question([[1]], 1.0), **changes)
    with pytest.raises(QuestionError, match=reason):
        asked(asking, distinct(60, 1.0))


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(QuestionError, match="10 requests of m have ended in this window"):
        asked(question([[1]], 1.0), distinct(10, 1.0))
    same = [replace(each, arrival=START) for each in distinct(FEWEST, 1.0)]
    with pytest.raises(QuestionError, match="arrived at once"):
        asked(question([[1]], 1.0), same)
