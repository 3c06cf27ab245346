"""The return predictor: learned idle times, censoring, ends of sessions, bounds."""

import numpy as np
import pytest

from kvmesh.planner.prediction.hazards import BINS, EDGES, HazardTable, Survival, bin_of
from kvmesh.planner.prediction.returns import ReturnPredictor


def taught(gaps: np.ndarray, finish: str = "stop", prefix: str = "past") -> ReturnPredictor:
    """A predictor that has seen each gap once, in a session of its own that then ended."""
    predictor = ReturnPredictor()
    teach(predictor, gaps, finish, prefix)
    return predictor


def teach(
    predictor: ReturnPredictor, gaps: np.ndarray, finish: str, prefix: str, until: float = 0.0
) -> None:
    """The sessions run one after the other before the time `until`."""
    now = until - float(gaps.sum()) - 2 * len(gaps)
    for index, gap in enumerate(gaps.tolist()):
        session = f"{prefix}{index}"
        predictor.started(session, now)
        predictor.finished(session, now + 0.5, finish)
        predictor.started(session, now + 0.5 + gap)
        predictor.finished(session, now + 1 + gap, finish, final=True)
        now += gap + 2


def chance(predictor: ReturnPredictor, horizon_s: float, finish: str = "stop") -> float:
    """The chance of a session that has just become idle."""
    predictor.finished("probe", 0.0, finish, tokens=1000)
    return predictor.expected(0.0, horizon_s).count


@pytest.mark.parametrize("horizon_s", [3.0, 10.0, 30.0])
def test_a_known_distribution_is_recovered(horizon_s: float) -> None:
    gaps = np.random.default_rng(0).exponential(10, 3000)
    truth = 1 - np.exp(-horizon_s / 10)
    assert chance(taught(gaps), horizon_s) == pytest.approx(truth, abs=0.05)


def test_the_chance_counts_from_the_present_idle_time() -> None:
    gaps = np.concatenate([np.full(500, 2.0), np.full(500, 60.0)])
    predictor = taught(gaps)
    predictor.finished("probe", 0.0, "stop")
    assert predictor.expected(0.0, 5.0).count == pytest.approx(0.5, abs=0.05)
    assert predictor.expected(10.0, 5.0).count == pytest.approx(0.0, abs=0.05)
    assert predictor.expected(10.0, 80.0).count == pytest.approx(1.0, abs=0.05)


def test_the_kinds_of_finish_are_learned_apart() -> None:
    predictor = ReturnPredictor()
    teach(predictor, np.full(400, 100.0), "stop", "person", until=-2000.0)
    teach(predictor, np.full(400, 1.0), "tool_calls", "tool")
    predictor.finished("a", 0.0, "tool_calls")
    assert predictor.expected(0.0, 5.0).count > 0.9
    predictor.finished("b", 0.0, "stop")
    assert predictor.expected(0.0, 5.0).count < 1.1


def test_sessions_keep_their_pace() -> None:
    """Half of the sessions return after 1 s, half after 100 s, all with the same finish."""
    predictor, now = ReturnPredictor(), 0.0
    ready = {f"{kind}{i}": 0.0 for i in range(20) for kind in ("fast", "slow")}
    for _ in range(1500):
        session = min(ready, key=ready.__getitem__)
        now = ready[session]
        predictor.started(session, now)
        predictor.finished(session, now, "stop")
        ready[session] = now + (1.0 if session.startswith("fast") else 100.0)
    later = now + 1000
    for session in ready:
        predictor.finished(session, later, "stop", final=True)
    predictor.started("fast0", later)
    predictor.finished("fast0", later, "stop")
    unknown = predictor.expected(later, 5.0).count
    for pause in (1.0, 1.0):
        later += pause
        predictor.started("fast0", later)
        predictor.finished("fast0", later, "stop")
    assert unknown < 0.9
    assert predictor.expected(later, 5.0).count > 0.95


def test_sessions_that_have_not_returned_lower_the_chance() -> None:
    """Of 400 sessions, half return after 5 s; the others are idle still."""
    predictor = ReturnPredictor()
    for index in range(400):
        predictor.started(f"s{index}", float(index))
        predictor.finished(f"s{index}", float(index), "stop")
    for index in range(0, 400, 2):
        predictor.started(f"s{index}", 400.0 + index)
        predictor.finished(f"s{index}", 400.0 + index, "stop", final=True)
    predictor.expected(2000.0, 60.0)
    before = predictor.expected(2000.0, 1000.0).count
    predictor.finished("probe", 2000.0, "stop")
    gained = predictor.expected(2000.0, 1000.0).count - before
    assert gained == pytest.approx(0.5, abs=0.1)


def test_a_final_session_does_not_return() -> None:
    predictor = taught(np.full(200, 2.0))
    predictor.finished("probe", 0.0, "stop", final=True)
    assert predictor.expected(0.0, 100.0).count == 0
    assert len(predictor) == 0


def test_a_running_session_does_not_return() -> None:
    predictor = taught(np.full(200, 2.0))
    predictor.started("probe", 0.0)
    predictor.started("probe", 0.1)
    predictor.finished("probe", 0.2, "stop")
    assert predictor.expected(0.2, 100.0).count == 0, "its other request runs still"
    predictor.finished("probe", 0.3, "stop")
    assert predictor.expected(0.3, 100.0).count > 0.9


def test_a_lost_end_is_forgiven() -> None:
    predictor = taught(np.full(200, 2.0))
    predictor.started("probe", 0.0)
    predictor.started("probe", 5000.0)
    predictor.finished("probe", 5001.0, "stop")
    assert predictor.idle == 1


def test_variance_and_tokens_follow_the_chances() -> None:
    predictor = taught(np.random.default_rng(0).exponential(10, 2000))
    for index in range(10):
        predictor.finished(f"s{index}", 0.0, "stop", tokens=500)
    expected = predictor.expected(0.0, 7.0)
    share = expected.count / 10
    assert expected.variance == pytest.approx(10 * share * (1 - share))
    assert expected.tokens == pytest.approx(500 * expected.count)


def test_without_any_idle_session_nothing_is_expected() -> None:
    expected = ReturnPredictor().expected(5.0, 60.0)
    assert (expected.count, expected.variance, expected.tokens) == (0, 0, 0)


def test_an_earlier_time_counts_as_the_latest() -> None:
    predictor = taught(np.full(200, 2.0))
    predictor.finished("probe", 1.0, "stop")
    assert predictor.expected(-100.0, 5.0).count == predictor.expected(1.0, 5.0).count


def test_the_number_of_sessions_is_bounded() -> None:
    predictor = ReturnPredictor(max_sessions=50)
    for index in range(500):
        predictor.started(f"s{index}", float(index))
        predictor.finished(f"s{index}", float(index), "stop")
    assert len(predictor) == 50
    assert predictor.idle == 50
    predictor.expected(500.0, 60.0)
    assert len(predictor._due) <= 2 * 50 + 1024


def test_the_queue_of_due_times_is_bounded() -> None:
    predictor = ReturnPredictor()
    for index in range(5000):
        predictor.started("s", index * 0.01)
        predictor.finished("s", index * 0.01, "stop")
    assert len(predictor._due) <= 2 + 1024


def test_sessions_that_no_longer_return_are_forgotten() -> None:
    """Each session returns once after 2 s, then never, and none is marked final."""
    predictor = ReturnPredictor()
    for index in range(3000):
        now = index * 60.0
        predictor.started(f"s{index}", now)
        predictor.finished(f"s{index}", now, "stop")
        predictor.started(f"s{index}", now + 2)
        predictor.finished(f"s{index}", now + 2, "stop")
        predictor.expected(now + 2, 60.0)
    assert predictor.expected(now + 60, 60.0).count < 1
    assert predictor.idle < 200, "more than a thousand sessions have become idle within a day"


def test_equal_events_give_equal_expectations() -> None:
    gaps = np.random.default_rng(0).lognormal(2, 1, 500)
    assert chance(taught(gaps), 20.0) == chance(taught(gaps), 20.0)


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_sessions"):
        ReturnPredictor(max_sessions=0)


def test_each_edge_begins_its_bin() -> None:
    assert [bin_of(float(edge)) for edge in EDGES] == list(range(BINS + 1))
    assert bin_of(1e9) == BINS


def test_old_observations_lose_their_weight() -> None:
    table = HazardTable()
    for _ in range(100_000):
        table.returned(5)
    for _ in range(30_000):
        table.passed([5])
        table.returned(6)
    assert table.hazards()[5] < 0.01
    survival = Survival(table.hazards())
    assert survival.at(6) / survival.at(5) > 0.9
