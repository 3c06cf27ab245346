"""Counts of the statistics that vLLM records after each step."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from kvmesh.worker.engines.vllm import scheduler_stats as stats

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


class Rank:
    """One rank with a manual clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stats = stats.RankStats()
        self.now = 100.0
        patch.setattr(stats, "time", SimpleNamespace(monotonic=lambda: self.now))

    def step(self, seconds: float, running: int, waiting: int = 0) -> None:
        self.now += seconds
        counts = {"num_running_reqs": running, "num_waiting_reqs": waiting}
        more = {"num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.0, "kv_connector_stats": None}
        self.stats.record(SimpleNamespace(**counts, **more), None)


def test_the_first_step_of_an_idle_rank_is_timed_from_its_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    for name in ("a", "b"):
        rank.stats.begin()
        rank.step(2.0, running=1)
        rank.step(0.5, running=0)
        rank.stats.forget(name)
        rank.now += 60.0
    assert (rank.stats.counters.steps, rank.stats.counters.busy_s) == (4, 5.0)


def test_steps_without_running_requests_count_as_signs_of_life_but_not_as_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    rank.stats.begin()
    rank.step(0.001, running=0, waiting=1)
    before = rank.stats.counters.steps
    for _ in range(3000):
        rank.step(0.01, running=0, waiting=1)
    assert 10 < rank.stats.counters.steps - before <= 30
    assert rank.stats.counters.busy_s < 0.01


@pytest.mark.parametrize(("managed", "ranks"), [([2, 3], [2, 3]), ([0], [0]), (None, [0, 1, 2, 3])])
def test_a_vllm_runs_the_ranks_that_its_client_manages(
    managed: list[int] | None, ranks: list[int]
) -> None:
    core = SimpleNamespace(**({} if managed is None else {"engine_ranks_managed": managed}))
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=4))
    llm = SimpleNamespace(engine_core=core, vllm_config=config)
    assert stats.managed_ranks(llm) == ranks
