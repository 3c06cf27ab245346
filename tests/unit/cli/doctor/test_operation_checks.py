"""Checks of promises, disks and open servers, over facts made up; faults say what to do."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvmesh.bus.messages import ScalingDecision
from kvmesh.cli.doctor.checks import ACTIONS, CHECKS, diagnose
from kvmesh.cli.doctor.facts import DiskSpace, Facts
from kvmesh.cli.status.findings import Finding

PLAN = ScalingDecision(
    planner="p",
    model="m",
    time=0.0,
    pools={},
    signals={},
    kept={"ttft p95=1s": 0.9},
    reason="",
    changed=False,
)


def of(check: str, **fields: Any) -> list[Finding]:
    found = diagnose(Facts("m", **{"server": "127.0.0.1:4222", **fields}))
    return [finding for finding in found if finding.check == check]


def test_a_promise_that_nobody_can_keep_is_a_fault() -> None:
    assert of("promises") == []
    (kept,) = of("promises", plans=[PLAN])
    assert kept.severity == "ok"
    (fault,) = of("promises", plans=[replace(PLAN, unreachable=["ttft p99=1ms"])])
    assert (fault.severity, fault.subject) == ("fault", "m")
    assert "ttft p99=1ms" in fault.text
    assert "kvmesh plan set" in fault.action


@pytest.mark.parametrize(("free", "faults"), [(50 << 30, 0), (9 << 30, 1), (0, 1)])
def test_a_disk_that_is_nearly_full_is_a_fault(free: int, faults: int) -> None:
    disk = DiskSpace("nats", "/state", free, 100 << 30, "NATS refuses messages")
    found = of("disks", disks=[disk])
    assert sum(finding.severity == "fault" for finding in found) == faults


@pytest.mark.parametrize(
    ("server", "severity"),
    [("127.0.0.1:4222", "ok"), ("[::1]:4222", "ok"), ("10.0.0.4:4222", "fault"), ("h:1", "fault")],
)
def test_a_server_of_the_network_needs_credentials(server: str, severity: str) -> None:
    (finding,) = of("access", server=server, anonymous=True)
    assert finding.severity == severity
    assert of("access", server=server, anonymous=False) == []


def test_a_fault_of_every_check_says_what_to_do() -> None:
    assert set(ACTIONS) <= set(CHECKS)
    (missing,) = of("streams", streams={}, leaderless={"x": "y"}, absent=["kvm-m-kv"])[:1]
    assert missing.action == ACTIONS["streams"]
