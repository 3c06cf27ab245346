"""Findings of `kvmesh doctor`."""

from kvmesh.bus.messages import IndexCheck, Instance, Role
from kvmesh.cli.doctor.checks import diagnose
from kvmesh.cli.doctor.facts import Facts
from kvmesh.cli.status.findings import of_checks
from kvmesh.cli.status.index_checks import RankCheck
from kvmesh.cli.status.report import (
    InstanceReport,
    InstanceWarning,
    MeshReport,
    ReaderReport,
    StreamReport,
)


def member(role: Role, version: str = "1", eligible: bool = True) -> InstanceReport:
    card = Instance(instance=f"{role}-1", role=role, name=role, version=version, started=0.0)
    return InstanceReport(card=card, age_s=1.0, load=[], eligible=eligible)


def report(*members: InstanceReport) -> MeshReport:
    return MeshReport(
        nats="", server="", namespace="", time=0.0, instances=[*members], streams=[], buckets=[]
    )


ALL = [member(role) for role in (Role.FRONTEND, Role.ROUTER, Role.INDEXER, Role.WORKER)]


CHECKED = ("processes", "warnings", "versions", "readers")


def texts(found: MeshReport) -> set[str]:
    findings = diagnose(Facts("m", report=found))
    return {f"{f.severity} {f.subject}: {f.text}" for f in findings if f.check in CHECKED}


def test_a_sound_mesh_has_no_faults() -> None:
    assert {line.split()[0] for line in texts(report(*ALL))} == {"ok"}


def test_a_missing_role_is_a_fault() -> None:
    found = texts(report(*ALL[:2], member(Role.INDEXER, eligible=False), ALL[3]))
    assert "fault indexer: none is ready" in found
    assert "note indexer-1: not ready" in found


def test_warnings_versions_and_slow_readers_are_found() -> None:
    mesh = report(*ALL, member(Role.KVBM, version="2"))
    mesh.warnings = [InstanceWarning(instance="worker-1", text="odd")]
    reader = ReaderReport(name="c", owner="indexer-1", lag=20_000)
    mesh.streams = [StreamReport(name="kv", messages=1, bytes=1, first=1, last=1, readers=[reader])]
    found = texts(mesh)
    assert "fault worker-1: odd" in found
    versions = "1 (frontend, indexer, router and 1 more), 2 (kvbm)"
    assert f"note versions: processes of several versions: {versions}" in found
    assert "fault indexer-1: 20,000 messages of kv behind" in found


def test_comparisons_are_summed_up_and_differences_listed() -> None:
    checks = [
        IndexCheck(result="equal", held=5, indexed=5),
        IndexCheck(result="equal", held=7, indexed=7),
        IndexCheck(result="differs", held=5, indexed=6, missing=1, extra=2),
        IndexCheck(result="differs", held=5, indexed=6),
        IndexCheck(result="moved"),
        IndexCheck(result="unknown"),
        IndexCheck(result="failed", reason="no reply"),
    ]
    found = of_checks(
        RankCheck(indexer="i", instance="w", rank=n, check=check) for n, check in enumerate(checks)
    )
    lines = [f"{f.severity} {f.subject}: {f.text}" for f in found]
    assert lines == [
        "fault i, rank 2 of w: the index lacks 1 of the worker's 5 blocks and has 2 that are gone;"
        " it is dumped anew",
        "fault i, rank 3 of w: the index has 6 blocks, the worker 5; it is dumped anew",
        "note i, rank 4 of w: not compared: its blocks changed too fast, try again",
        "note i, rank 5 of w: the index waits for a dump of the rank",
        "note i, rank 6 of w: not compared: no reply",
        "ok index: equal to the workers in 2 comparisons of ranks, 12 blocks",
    ]


def test_an_indexer_that_does_not_reply_is_one_fault() -> None:
    silent = IndexCheck(result="failed", reason="no reply within 25 s")
    found = of_checks(
        RankCheck(indexer="i", instance="w", rank=n, check=silent, replied=False) for n in range(3)
    )
    lines = [f"{f.severity} {f.subject}: {f.text}" for f in found]
    assert lines == ["fault i: not compared: no reply within 25 s"]
