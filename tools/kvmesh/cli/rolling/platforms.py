"""The places in which the processes of a mesh run, as far as a roll needs them."""

import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import MessageDecoder, Replacement, ReplacementReport, encode
from kvmesh.planner.connectors.interface import ConnectorError
from kvmesh.planner.connectors.program import run_program

ACCEPT_S = 15.0
CALL_S = 60.0
GRACE_S = 120.0  # more than a process takes to stop
_reports = MessageDecoder(ReplacementReport)


class RollError(Exception):
    """The roll cannot go on; the message says why."""


class Platform(Protocol):
    """Replaces processes, and tells what has gone wrong."""

    last_first: bool

    async def prepare(self, to: str, replicas: int) -> None:
        """Check the wanted program or image, empty for the present one. Raises RollError."""

    async def replace(self, name: str) -> None:
        """Have a process replaced; raises RollError."""

    async def failure(self) -> str:
        """The reason why the last replacement has failed, or empty."""
        ...


class SupervisedProcesses:
    """Processes of `kvmesh up`, reached over the bus."""

    last_first = False

    def __init__(self, bus: Bus, by: str) -> None:
        self._bus = bus
        self._by = by
        self._program = ""
        self._order: Replacement | None = None
        self._ordered_at = 0.0
        self._accepted = False

    async def prepare(self, to: str, replicas: int) -> None:
        self._program = to
        if to and not Path(to).is_absolute():
            raise RollError(f"--to: {to} is no absolute path of an environment or its python")

    async def replace(self, name: str) -> None:
        order = Replacement(
            name=name,
            order=secrets.token_hex(8),
            program=self._program,
            by=self._by,
            time=time.time(),
        )
        subjects = self._bus.subjects
        await self._bus.bucket(subjects.plan_bucket).put(subjects.replacement_key, encode(order))
        self._order, self._ordered_at, self._accepted = order, time.monotonic(), False

    async def failure(self) -> str:
        if self._order is None:
            return ""
        subjects = self._bus.subjects
        try:
            entry = await self._bus.bucket(subjects.plan_bucket).get(subjects.replaced_key)
            report = _reports.decode(entry.value or b"")
        except (NotFound, msgspec.MsgspecError):
            report = ReplacementReport(name="", order="")
        if report.order == self._order.order:
            self._accepted = True
            return report.error
        if not self._accepted and time.monotonic() - self._ordered_at > ACCEPT_S:
            name = self._order.name
            return f"no kvmesh up of this mesh runs {name}: name its --statefulset or --compose"
        return ""


class ComposeContainers:
    """Containers of one service of a Compose file, whose host names are in their names."""

    last_first = False

    def __init__(self, file: str, service: str) -> None:
        self._compose = ("docker", "compose", "-f", file, "--profile", "*")
        self._service = service
        self._replicas = 1

    async def prepare(self, to: str, replicas: int) -> None:
        if to:
            raise RollError(
                "--to is not for Compose: build or pull the service's image, then roll; new"
                " containers are made of it"
            )
        self._replicas = replicas

    async def replace(self, name: str) -> None:
        output = await _run(*self._compose, "ps", "--format", "json", self._service)
        found = [row["ID"] for row in _rows(output) if str(row.get("ID", ""))[:12] in name]
        if len(found) != 1:
            raise RollError(f"{len(found)} containers of {self._service} belong to {name}")
        await _run("docker", "stop", found[0])
        await _run("docker", "rm", found[0])
        scale = f"--scale={self._service}={self._replicas}"
        await _run(*self._compose, "up", "-d", "--no-recreate", "--no-deps", scale, self._service)

    async def failure(self) -> str:
        return ""


class StatefulSetPods:
    """Pods of one StatefulSet, reached by `kubectl`; processes are named like their pods."""

    last_first = True

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._kubectl = ("kubectl", *(("--namespace", namespace) if namespace else ()))
        self._to = ""

    async def prepare(self, to: str, replicas: int) -> None:
        found = json.loads(await self._run("get", "statefulset", self._name, "-o", "json"))
        if found["spec"].get("updateStrategy", {}).get("type", "RollingUpdate") != "RollingUpdate":
            raise RollError(f"statefulset {self._name}: its updateStrategy is not RollingUpdate")
        self._to = to
        if not to:
            return
        containers = found["spec"]["template"]["spec"]["containers"]
        if containers[0]["image"] == to:
            return  # a roll that goes on
        # no pod changes before the partition reaches its number
        await self._patch(
            {
                **_partition(found["spec"]["replicas"]),
                "template": {
                    "spec": {"containers": [{"name": containers[0]["name"], "image": to}]}
                },
            }
        )

    async def replace(self, name: str) -> None:
        number = name.removeprefix(f"{self._name}-")
        if not number.isdecimal():
            raise RollError(f"{name} is no pod of statefulset {self._name}")
        if self._to:
            await self._patch(_partition(int(number)))
        else:
            await self._run("delete", "pod", name, "--wait=false")

    async def failure(self) -> str:
        return ""

    async def _patch(self, spec: dict[str, Any]) -> None:
        patch = json.dumps({"spec": spec})
        await self._run("patch", "statefulset", self._name, "--type=strategic", f"--patch={patch}")

    async def _run(self, *arguments: str) -> bytes:
        return await _run(*self._kubectl, *arguments)


def _partition(number: int) -> dict[str, Any]:
    return {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": number}}}


async def _run(*command: str) -> bytes:
    try:
        return await run_program(command, GRACE_S if command[1] == "stop" else CALL_S)
    except ConnectorError as error:
        raise RollError(str(error)) from error


def _rows(output: bytes) -> Sequence[dict[str, Any]]:
    """The containers that `docker compose ps` prints: one a line, or one list before 2.21."""
    try:
        if output.lstrip().startswith(b"["):
            return list(json.loads(output))
        return [json.loads(line) for line in output.splitlines() if line.strip()]
    except ValueError as error:
        raise RollError(f"docker compose ps printed unexpected JSON: {error}") from error


def caller() -> str:
    """The person and machine that run this command, for records."""
    return f"{os.environ.get('USER') or os.getuid()}@{os.uname().nodename}"
