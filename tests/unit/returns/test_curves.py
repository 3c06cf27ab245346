"""Curves of return: rates without bias, back-off to coarser classes, bounds."""

from itertools import pairwise
from random import Random

import pytest

from kvmesh._native import LifeTable
from kvmesh.returns.classes import (
    MAX_NAME,
    MAX_NAMES,
    MAX_OWNERS,
    OTHER,
    UNUSED_S,
    ClassKey,
    ClassNames,
    TurnHistory,
    class_keys,
)
from kvmesh.returns.curves import LATE_S, MAX_CLASSES, Awaited, ReturnCurves
from kvmesh.returns.rates import age_bin

ALL = ClassKey()
TOOL = ClassKey(("tool",))
HUMAN = ClassKey(("human",))


def learn(curves: ReturnCurves, keys: list[ClassKey], rate: float, count: int, rng: Random) -> None:
    """Prompts that return at a constant rate; they start one a second."""
    ends: list[tuple[float, Awaited]] = []
    start = curves.advance(0.0)
    for number in range(count):
        tables = curves.tables(keys)
        now = start + number
        while ends and ends[0][0] <= now:
            at, awaited = ends.pop(0)
            curves.returned(awaited, at)
        awaited = curves.start(tables, curves.rates(tables), now)
        ends.append((now + rng.expovariate(rate), awaited))
        ends.sort(key=lambda end: end[0])
    for at, awaited in ends:
        curves.returned(awaited, at)


def test_a_constant_rate_is_learned() -> None:
    curves = ReturnCurves()
    learn(curves, [ALL], 0.05, 5000, Random(1))
    rates = curves.rates(curves.tables([ALL]))
    for age in (1.5, 3, 6, 12, 24):
        assert rates[age_bin(age)] == pytest.approx(0.05, rel=0.3)


def test_prompts_that_still_wait_count_so_that_rates_have_no_bias() -> None:
    curves = ReturnCurves()
    tables = curves.tables([ALL])
    waiting = [curves.start(tables, curves.rates(tables), 0.0) for _ in range(1000)]
    curves.advance(40.0)
    for awaited in waiting[:10]:
        curves.returned(awaited, 40.0)
    rate = curves.rates(tables)[age_bin(40.0)]
    assert rate == pytest.approx(10 / (1000 * 8), rel=0.2)  # the bin begins at 32 s


def test_a_wait_in_a_queue_is_no_part_of_the_pause() -> None:
    """Else pauses look longer the more the mesh is overloaded."""
    curves, waited = ReturnCurves(), ReturnCurves()
    for each, wait_s in ((curves, 0.0), (waited, 50.0)):
        for number in range(400):
            tables, start = each.tables([ALL]), 200.0 * number
            awaited = each.start(tables, each.rates(tables), start)
            end = start + (3.0 if number % 2 else 20.0)
            each.advance(end)
            each.returned(awaited, end + wait_s, wait_s)
        each.advance(200.0 * 400 + 1000.0)
    [expected] = curves.summaries()
    [found] = waited.summaries()
    assert found.rates == pytest.approx(expected.rates, rel=0.01)
    for one, other in zip(waited.calibrations, curves.calibrations, strict=True):
        assert one.observed == other.observed == 400


def test_without_evidence_rates_fall_by_half_from_bin_to_bin() -> None:
    curves = ReturnCurves()
    rates = curves.rates(curves.tables([ALL]))
    assert [after / before for before, after in pairwise(rates)] == [0.5] * 15


def test_a_class_without_evidence_has_the_rates_of_the_coarser_one() -> None:
    curves, rng = ReturnCurves(), Random(2)
    learn(curves, [ALL, TOOL], 0.2, 1000, rng)
    learn(curves, [ALL, HUMAN], 0.01, 1000, rng)
    tool = curves.rates(curves.tables([ALL, TOOL]))[age_bin(6.0)]
    human = curves.rates(curves.tables([ALL, HUMAN]))[age_bin(6.0)]
    new = curves.rates(curves.tables([ALL, TOOL, ClassKey(("tool", "Bash"))]))[age_bin(6.0)]
    assert tool == pytest.approx(0.2, rel=0.3)
    assert human == pytest.approx(0.01, rel=0.5)
    assert new == pytest.approx(tool)


def test_old_evidence_fades() -> None:
    curves = ReturnCurves()
    learn(curves, [ALL], 0.5, 500, Random(3))
    curves.advance(40 * LifeTable.HALF_LIFE_S)
    learn(curves, [ALL], 0.05, 500, Random(3))
    assert curves.rates(curves.tables([ALL]))[age_bin(1.5)] == pytest.approx(0.05, rel=0.5)


def test_expected_and_observed_returns_agree_once_learned() -> None:
    curves = ReturnCurves()
    learn(curves, [ALL], 0.01, 3000, Random(4))
    for calibration in curves.calibrations:
        assert calibration.observed > 1000
        assert calibration.expected == pytest.approx(calibration.observed, rel=0.15)


def test_returns_are_compared_once_all_prompts_of_an_age_are_older() -> None:
    curves = ReturnCurves()
    tables = curves.tables([ALL])
    first, *_ = [curves.start(tables, curves.rates(tables), 0.0) for _ in range(3)]
    curves.returned(first, 5.0)
    assert [each.observed for each in curves.calibrations] == [0, 0]
    curves.advance(64.0 + LATE_S)
    assert [each.observed for each in curves.calibrations] == [1, 0]
    curves.advance(512.0 + LATE_S)
    assert [each.observed for each in curves.calibrations] == [1, 1]


def test_summaries_name_what_sessions_wait_for() -> None:
    curves = ReturnCurves()
    keys = class_keys(("tool", "Bash"), "coder", TurnHistory(3, 500, 100, 2.0))
    learn(curves, keys, 0.1, 100, Random(5))
    found = {summary.waits: summary for summary in curves.summaries()}
    assert set(found) == {(), ("tool",), ("tool", "Bash")}
    bash = found["tool", "Bash"]
    assert bash.prompts == pytest.approx(100, rel=0.05)
    assert bash.returned == pytest.approx(100, rel=0.05)
    assert bash.expected == pytest.approx(100, rel=0.2)
    assert bash.rates[age_bin(6.0)] == pytest.approx(0.1, rel=0.4)


def test_the_classes_are_bounded() -> None:
    curves = ReturnCurves()
    for number in range(MAX_CLASSES + 100):
        curves.tables([ALL, ClassKey((str(number),))])
    assert len(curves) == MAX_CLASSES


def test_a_prompt_outlives_its_class() -> None:
    curves = ReturnCurves()
    tables = curves.tables([ALL, ClassKey(("rare",))])
    awaited = curves.start(tables, curves.rates(tables), 0.0)
    for number in range(MAX_CLASSES):
        curves.tables([ALL, ClassKey((str(number),))])
    assert [table.closed for table in awaited.tables] == [False, True]
    assert curves.rates(awaited.tables) == curves.rates(awaited.tables[:1])
    curves.advance(100.0)
    curves.returned(awaited, 101.0)
    assert tables[0].returned == 1.0
    assert not awaited.tables


def test_an_owner_brings_a_bounded_number_of_names() -> None:
    names = ClassNames()
    assert names.known("mallory", "x" * 1000, 0.0) == "x" * MAX_NAME
    for number in range(MAX_NAMES - 1):
        assert names.known("mallory", f"tool {number}", 1.0) == f"tool {number}"
    assert names.known("mallory", "one more", 2.0) == OTHER
    assert names.known("mallory", "tool 1", 2.0) == "tool 1"
    assert names.known("mallory", "human", 2.0) == "human"
    assert names.known("alice", "one more", 2.0) == "one more"
    for number in range(2 * MAX_OWNERS):
        names.known(f"owner {number}", "Bash", 3.0)
    assert len(names) == MAX_OWNERS


def test_a_name_long_unused_gives_its_place_to_another() -> None:
    names = ClassNames()
    for number in range(MAX_NAMES):
        names.known("alice", f"tool {number}", float(number))
    names.known("alice", "tool 0", 500.0)
    assert names.known("alice", "new", UNUSED_S) == OTHER
    assert names.known("alice", "new", UNUSED_S + 1.0) == "new"  # instead of "tool 1"
    assert names.known("alice", "tool 1", UNUSED_S + 1.5) == OTHER
    assert names.known("alice", "tool 0", UNUSED_S + 2.0) == "tool 0"


def test_classes_go_from_coarse_to_fine() -> None:
    keys = class_keys(("tool", "Bash"), "coder", TurnHistory(20, 900, 250, None))
    assert keys[:3] == [ALL, TOOL, ClassKey(("tool", "Bash"))]
    assert [len(key.history) for key in keys[3:]] == [0, 2, 2, 3, 4]
    assert all(key.agent == "coder" for key in keys[3:])
