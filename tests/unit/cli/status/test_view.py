"""The tables of `kvmesh status`."""

import time

import pytest

from kvmesh.bus.messages import (
    FailedStart,
    Instance,
    NodeStore,
    Phase,
    RankSpeed,
    Role,
    Starting,
    StartSource,
)
from kvmesh.cli.status.report import (
    FailedStartReport,
    IdleModelReport,
    InstanceReport,
    MeshReport,
    StartingReport,
)
from kvmesh.cli.status.view import show_tables


def kvbm(name: str, key: str = "", **layouts: list[str]) -> InstanceReport:
    store = NodeStore(directory="/d", tier_bytes=[1 << 30, 0, 0], layouts=layouts, key=key)
    card = Instance(instance=name, role=Role.KVBM, name=name, version="0", started=0.0, store=store)
    return InstanceReport(card=card, age_s=1.0, load=[])


def shown(capsys: pytest.CaptureFixture[str], *members: InstanceReport) -> str:
    show_tables(
        MeshReport(
            nats="", server="", namespace="", time=0.0, instances=[*members], streams=[], buckets=[]
        )
    )
    return capsys.readouterr().out


def test_nodes_without_a_common_layout_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    alike = [kvbm("k-0", m=["float32"], n=["bfloat16"]), kvbm("k-1", m=["float32", "uint8"])]
    assert "do not share" not in shown(capsys, *alike)
    text = shown(capsys, *alike, kvbm("k-2", m=["uint8"], n=["float32"]))
    lines = text.partition("do not share all blocks")[2].splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["m", "k-0", "float32"],
        ["m", "k-1", "float32"],
        ["m", "k-1", "uint8"],
        ["m", "k-2", "uint8"],
        ["n", "k-0", "bfloat16"],
        ["n", "k-2", "float32"],
    ]


def test_nodes_whose_keys_differ_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    alike = [kvbm("k-0", "aa11"), kvbm("k-1", "aa11"), kvbm("alone")]
    assert "different keys" not in shown(capsys, *alike)
    text = shown(capsys, *alike, kvbm("k-2", "bb22"))
    lines = text.partition("with different keys share no blocks")[2].splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["k-0", "aa11"],
        ["k-1", "aa11"],
        ["k-2", "bb22"],
    ]


def test_models_without_workers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "idle model" not in shown(capsys)
    idle = [IdleModelReport(name="m", planner="planner-1", age_s=180.0)]
    report = MeshReport(
        nats="", server="", namespace="", time=0.0, instances=[], streams=[], buckets=[]
    )
    report.idle_models = idle
    show_tables(report)
    lines = capsys.readouterr().out.partition("idle model")[2].splitlines()
    assert lines[1].split() == ["m", "3m", "planner-1"]


def test_the_speed_of_a_worker_stands_beside_its_peers(capsys: pytest.CaptureFixture[str]) -> None:
    card = Instance(instance="w-1", role=Role.WORKER, name="w", version="0", started=0.0)
    ranks = [
        RankSpeed(model="m", instance="w-1", rank=0, speed=1.04),
        RankSpeed(model="m", instance="w-1", rank=1, speed=0.41, since=60.0),
    ]
    text = shown(capsys, InstanceReport(card=card, age_s=1.0, load=[], speed=ranks))
    since = time.strftime("%H:%M", time.localtime(60.0))
    assert f"1.0×; 0.4× since {since}" in text


def test_the_planner_that_leads_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    cards = [
        Instance(instance=f"p-{n}", role=Role.PLANNER, name=f"p-{n}", version="0", started=0.0)
        for n in range(2)
    ]
    members = [InstanceReport(card=c, age_s=1.0, load=[], leads=c is cards[0]) for c in cards]
    lines = [line.split() for line in shown(capsys, *members).splitlines()]
    states = {line[0]: line[3] for line in lines if line and line[0].startswith("p-")}
    assert states == {"p-0": "leads", "p-1": "ready"}


def test_failed_starts_stand_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    start = FailedStart(
        instance="w-1",
        model="m",
        engine="vllm",
        phase="weights",
        started=0.0,
        failed=42.0,
        error="no [bold]memory\x1b[2J",
    )
    report = MeshReport(
        nats="", server="", namespace="", time=0.0, instances=[], streams=[], buckets=[]
    )
    report.failed_starts = [FailedStartReport(start=start, age_s=90.0)]
    show_tables(report)
    text = capsys.readouterr().out
    assert "w-1, 1m ago, after 42 s, in weights of vllm: no [bold]memory\\x1b[2J" in text


def test_starts_stand_with_their_phases(capsys: pytest.CaptureFixture[str]) -> None:
    phases = [Phase("process", 0.1), Phase("weights", 2.0), Phase("of a later version", 1.0)]
    card = Instance(
        instance="w-1",
        role=Role.WORKER,
        name="w",
        version="0",
        started=0.0,
        startup_s=3.2,
        phases=phases,
        sources=[
            StartSource("weights", "disk", 1 << 20),
            StartSource("weights", "workers", 1 << 30),
        ],
    )
    worker = Starting(
        instance="v-1",
        model="m",
        engine="torch",
        phase="imports",
        since=9.5,
        started=0.0,
        phases=[Phase("imports", 1.0)],
    )
    report = MeshReport(
        nats="", server="", namespace="", time=0.0, instances=[], streams=[], buckets=[]
    )
    report.instances = [InstanceReport(card=card, age_s=1.0, load=[])]
    show_tables(report)
    assert "in seconds" not in capsys.readouterr().out, "only on request"
    report.starting = [StartingReport(worker=worker, age_s=10.0, phase_s=0.5)]
    show_tables(report)
    text = capsys.readouterr().out
    assert "starting: imports" in text
    lines = text.partition("start, in seconds")[2].splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["imports", "total"],
        ["v-1", "1.5…", "10.0"],
        [],
    ]
    show_tables(report, all_starts=True)
    lines = capsys.readouterr().out.partition("start, in seconds")[2].splitlines()
    assert lines[0].rstrip().endswith("  weights from")
    assert "of a later version" in lines[0]
    assert [line.split() for line in lines[1:3]] == [
        ["v-1", "1.5…", "10.0"],
        ["w-1", "0.1", "2.0", "1.0", "3.2", *["workers", "1.0", "GiB,", "disk", "1.0", "MiB"]],
    ]
