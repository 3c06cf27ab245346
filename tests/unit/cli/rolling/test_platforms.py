"""Compose and Kubernetes as a roll calls them, by programs that record how they are called."""

import json
import os
from pathlib import Path

import pytest

from kvmesh.cli.rolling.platforms import (
    ComposeContainers,
    Platform,
    RollError,
    StatefulSetPods,
)

STATEFULSET = {
    "spec": {
        "replicas": 3,
        "template": {"spec": {"containers": [{"name": "worker", "image": "kvmesh:1"}]}},
    }
}


class Program:
    """A program of the search path that prints what the test says."""

    def __init__(self, folder: Path, name: str, output: str) -> None:
        self._calls = folder / "calls"
        (folder / "output").write_text(output)
        script = folder / name
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {self._calls}\n'
            f'case "$*" in *" ps "*|*" get "*|"get "*) cat {folder}/output;; esac\n'
        )
        script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


async def test_a_pod_is_deleted_for_a_roll_to_the_same_image(path: Path) -> None:
    kubectl = Program(path, "kubectl", json.dumps(STATEFULSET))
    pods: Platform = StatefulSetPods("worker", "mesh")
    assert pods.last_first
    await pods.prepare("", 3)
    await pods.replace("worker-2")
    assert kubectl.calls == [
        "--namespace mesh get statefulset worker -o json",
        "--namespace mesh delete pod worker-2 --wait=false",
    ]


async def test_the_partition_admits_one_pod_at_a_time_to_another_image(path: Path) -> None:
    kubectl = Program(path, "kubectl", json.dumps(STATEFULSET))
    pods = StatefulSetPods("worker", "")
    await pods.prepare("kvmesh:2", 3)
    await pods.replace("worker-2")
    _, first, second = (json.loads(c.partition("--patch=")[2] or "{}") for c in kubectl.calls)
    assert first["spec"]["updateStrategy"]["rollingUpdate"] == {"partition": 3}
    containers = first["spec"]["template"]["spec"]["containers"]
    assert containers == [{"name": "worker", "image": "kvmesh:2"}]
    assert second["spec"]["updateStrategy"]["rollingUpdate"] == {"partition": 2}
    assert "template" not in second["spec"]
    with pytest.raises(RollError, match="router-0 is no pod of statefulset worker"):
        await pods.replace("router-0")


async def test_a_statefulset_that_waits_for_deletions_is_refused(path: Path) -> None:
    spec = {**STATEFULSET["spec"], "updateStrategy": {"type": "OnDelete"}}
    Program(path, "kubectl", json.dumps({"spec": spec}))
    with pytest.raises(RollError, match="updateStrategy is not RollingUpdate"):
        await StatefulSetPods("worker", "").prepare("", 3)


@pytest.mark.parametrize("form", ["lines", "list"])
async def test_a_container_is_made_anew_of_the_present_image(path: Path, form: str) -> None:
    rows = [{"ID": "0123456789ab"}, {"ID": "ba9876543210"}]
    lines = "\n".join(map(json.dumps, rows))
    docker = Program(path, "docker", lines if form == "lines" else json.dumps(rows))
    containers = ComposeContainers("compose.yaml", "worker")
    await containers.prepare("", 2)
    await containers.replace("worker-ba9876543210-1")
    compose = "compose -f compose.yaml --profile *"
    assert docker.calls == [
        f"{compose} ps --format json worker",
        "stop ba9876543210",
        "rm ba9876543210",
        f"{compose} up -d --no-recreate --no-deps --scale=worker=2 worker",
    ]
    with pytest.raises(RollError, match="0 containers of worker belong to worker-9"):
        await containers.replace("worker-9")
    with pytest.raises(RollError, match="build or pull"):
        await containers.prepare("kvmesh:2", 2)


async def test_a_missing_program_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RollError, match="kubectl"):
        await StatefulSetPods("worker", "").prepare("", 1)
