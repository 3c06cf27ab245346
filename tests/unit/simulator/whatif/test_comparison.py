"""Captured requests compared: as measured, and simulated under two configurations."""

import pytest
from support.ended_requests import distinct, ended
from support.planned_model import START

from kvmesh.bus.messages import Capacity, Instance, ModelCard, Role
from kvmesh.router.errors import RouterConfigError
from kvmesh.settings.schema import MockSettings, RouterSettings
from kvmesh.simulator.whatif.comparison import (
    CHOSEN,
    PRESENT,
    Alternative,
    LiveConfiguration,
    compare,
)
from kvmesh.simulator.whatif.runs import measured_run
from kvmesh.workload.capture import CapturedRound, CaptureError


def live(workers: int = 2, blocks: int = 4096) -> LiveConfiguration:
    card = ModelCard(name="m", context=100_000, block_size=16, files="")
    cards = [
        Instance(
            instance=f"w-{number}-x",
            role=Role.WORKER,
            name=f"w-{number}",
            version="1",
            started=0.0,
            model=card,
            capacity=Capacity(blocks=blocks, max_sequences=64, max_batched_tokens=2048),
        )
        for number in range(workers)
    ]
    return LiveConfiguration(workers=cards, router=RouterSettings(seed=1), mock=MockSettings())


def sessions(count: int = 4, turns: int = 10) -> list[CapturedRound]:
    """Sessions whose prompts grow by 16 blocks a turn."""
    found = []
    for turn in range(turns):
        for number in range(count):
            blocks = range(1000 * (number + 1), 1000 * (number + 1) + 16 * (turn + 1))
            at = START + 4 * turn + number / 10
            name = f"r-{turn}-{number}"
            found.append(ended(name, at, blocks, 8, 0, f"s-{number}"))
    return found


def test_the_same_requests_run_under_both_policies() -> None:
    seen: list[tuple[str, int, int]] = []
    captured = sessions()
    found = compare(
        captured, live(), Alternative(policy="round-robin"), lambda *each: seen.append(each)
    )
    assert [r.policy for r in (found.measured, found.present, found.chosen)] == [
        "kv", "kv", "round-robin",
    ]  # fmt: skip
    assert {r.requests for r in (found.measured, found.present, found.chosen)} == {40}
    assert found.present.failed == found.chosen.failed == 0
    assert found.present.cached_share > 0.5
    assert len(found.present.workers) == len(found.chosen.workers) == 2
    assert found.present_fleet == found.chosen_fleet == "2 × 4,096 blocks"
    assert (found.first, found.last) == (captured[0].arrival, captured[-1].arrival)
    assert seen[0] == (PRESENT, 0, 40)
    assert seen[-1] == (CHOSEN, 40, 40)
    curve = found.present.ttft_curve
    assert curve == sorted(curve)
    assert curve[-1][1] == 1.0


def test_another_fleet_changes_only_the_chosen_run() -> None:
    found = compare(sessions(), live(), Alternative(workers=3, blocks=99))
    assert found.present_fleet == "2 × 4,096 blocks"
    assert found.chosen_fleet == "3 × 99 blocks"
    assert len(found.chosen.workers) == 3
    assert found.chosen.policy == "kv"


def test_measurements_are_those_of_the_outcomes() -> None:
    captured = distinct(30, 2.0)
    run = measured_run(captured)
    outcomes = [each.outcome for each in captured]
    assert run.requests == 30
    assert run.ttft_s is not None
    assert run.ttft_s.max == max(o.ttft_s or 0.0 for o in outcomes)
    assert sum(worker.requests for worker in run.workers) == 30
    assert run.imbalance >= 1.0
    assert measured_run([]).requests == 0


def test_live_ranks_that_served_nothing_count_for_the_balance() -> None:
    captured = distinct(30, 2.0)
    run = measured_run(captured, ["idle", "idle#1"])
    assert run.serving == len(run.workers) - 2
    assert run.imbalance == pytest.approx(
        measured_run(captured).imbalance * len(run.workers) / run.serving
    )


def test_mistakes_are_named() -> None:
    with pytest.raises(CaptureError, match="no finished requests"):
        compare([], live(), Alternative())
    with pytest.raises(RouterConfigError, match="best"):
        compare(sessions(), live(), Alternative(policy="best"))
