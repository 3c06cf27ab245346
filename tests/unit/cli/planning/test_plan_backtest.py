"""`kvmesh plan backtest` on workloads, and the arrivals that it counts."""

import json
from pathlib import Path

import msgspec
import pytest

from kvmesh.bus.messages import Candidate, Decision, Hints, Outcome, PrefetchTerms
from kvmesh.cli.main import run
from kvmesh.cli.planning.timeline import ServiceTime, from_captured, from_workload, series
from kvmesh.workload.capture import CapturedRound
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

SERVICE = ServiceTime(ttft_s=1.0, itl_s=0.1)


def captured(request: str, arrival: float, prefetch: PrefetchTerms | None = None) -> CapturedRound:
    chosen = Candidate(
        instance="w-1", worker="w", rank=0, overlap=[], prefill=0, decode=0, requests=0, cost=0
    )
    decision = Decision(
        request=request,
        model="m",
        time=arrival,
        router="r",
        policy="kv",
        chosen=chosen,
        candidates=[],
        tokens=100,
        sequence_hashes=b"",
        max_tokens=10,
        hints=Hints(),
        prefetch=prefetch,
    )
    outcome = Outcome(
        request=request,
        instance="w-1",
        time=arrival + 2,
        cached_tokens=0,
        output_tokens=7,
        ttft_s=0.1,
        total_s=2.0,
        finish="stop",
    )
    return CapturedRound(decision=decision, outcome=outcome, arrival=arrival, end=arrival + 2)


def workload(*rounds: Round) -> Workload:
    tree = Tree()
    sessions = [Session(name=str(i)) for i in range(1 + max(r.session for r in rounds))]
    return Workload(tree=tree, sessions=sessions, rounds=list(rounds))


def round_(session: int, at_s: float, after: tuple[int, ...] = ()) -> Round:
    return Round(
        session=session,
        branch=0,
        output_branch=0,
        input_tokens=50,
        output_tokens=11,
        at_s=at_s,
        after=after,
    )


def test_all_predictors_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    names = "kalman,constant,seasonal"
    arguments = ["--interval", "2", "--startup", "6", "--predictors", names, "--json", str(file)]
    assert run(["plan", "backtest", "demo", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "demo: 423 requests" in shown
    assert all(name in shown for name in names.split(","))
    figures = json.loads(file.read_text())
    assert [each["name"] for each in figures["arrivals"]["predictors"]] == names.split(",")
    assert figures["arrivals"]["best"] in names.split(",")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--interval", "0"], "not a number of seconds above 0: '0'"),
        (["demo", "--startup", "soon"], "not a number of seconds above 0: 'soon'"),
        (["demo", "--predictors", "oracle"], "kvmesh plan: unknown predictor oracle"),
        (["demo", "--interval", "600"], "are too few to score predictions"),
        (["nowhere"], "no such file or shipped profile"),
        (["demo", "--json", "/"], "/ is a directory"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = run(["plan", "backtest", *arguments])
    except SystemExit as ending:
        status = ending.code
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_rounds_start_after_the_service_of_those_they_wait_for() -> None:
    rounds = round_(0, 5.0), round_(0, 3.0, (0,)), round_(0, 1.0, (1,))
    assert from_workload(workload(*rounds), SERVICE) == pytest.approx([5.0, 10.0, 13.0])


def test_an_aborted_round_takes_the_time_of_its_tokens() -> None:
    aborted = msgspec.structs.replace(round_(0, 0.0), abort_after=1)
    following = round_(0, 0.0, (0,))
    assert from_workload(workload(aborted, following), SERVICE) == [0.0, 1.0]


def test_requests_are_counted_by_interval() -> None:
    arrivals = [1.0, 2.0, 12.0, 35.0]
    assert series(arrivals, 10.0) == [2.0, 1.0, 0.0]
    assert series(arrivals, 100.0) == []


def test_captured_prefetches_are_no_requests() -> None:
    found = [captured("1", 11.0), captured("2", 10.0), captured("3", 12.0, PrefetchTerms())]
    assert from_captured(found) == [10.0, 11.0]


def test_no_requests_have_no_series() -> None:
    assert series([], 10.0) == []
