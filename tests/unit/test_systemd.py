"""The template unit, as systemd reads it."""

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvmesh@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
@pytest.mark.parametrize("instance", ["router", "worker.gpu-a-0"])
def test_systemd_accepts_the_unit(instance: str, tmp_path: Path) -> None:
    unit = tmp_path / f"kvmesh@{instance}.service"
    unit.write_text(UNIT.read_text())
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    assert [line for line in result.stderr.splitlines() if "kvmesh@" in line] == []


@pytest.mark.parametrize(
    ("instance", "service"), [("router", "router"), ("worker.gpu-a-0", "worker")]
)
def test_the_service_is_what_precedes_the_dot(instance: str, service: str) -> None:
    line = next(each for each in UNIT.read_text().splitlines() if each.startswith("ExecStart="))
    script = line.partition("-c ")[2].strip("'").replace("%%", "\0").replace("%i", instance)
    script = (
        script.replace("\0", "%").replace("$$", "$").replace("exec /opt/kvmesh/bin/kvmesh", "echo")
    )
    result = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == service
