"""Real planner processes on a test's mesh, and what they show."""

import json
import re
import signal
import urllib.error
import urllib.request
from typing import Any

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import ScalingDecision
from kvmesh.cli.arguments import moment
from kvmesh.cli.planning.history import read_decisions
from support.forks import Process
from support.mesh import Mesh
from support.nats import free_port
from support.wait import PATIENCE_S, eventually

_SAMPLE = re.compile(r"^(kvmesh_\w+(?:{.*})?) (\S+)$", re.MULTILINE)
QUICK = {
    "KVMESH_PLANNER_INTERVAL_S": "0.2",
    "KVMESH_PLANNER_POOLS": "east:min=1,max=6",
    "KVMESH_PLANNER_CONNECTOR": "bucket",
    "KVMESH_PLANNER_CONNECTOR_TIMEOUT_S": "20",
}


class Planners:
    """Planners of the pool `east` by name; they decide several times a second."""

    def __init__(self, mesh: Mesh, bus: Bus) -> None:
        self.mesh = mesh
        self.bus = bus
        self._ports: dict[str, int] = {}

    async def start(self, name: str = "planner-0", **env: str) -> None:
        """Start one and wait until it is ready; keywords are environment variables."""
        self.launch(name, **env)
        await eventually(lambda: self.health(name)["status"] == "ok", what=f"{name} is ready")

    def launch(self, name: str = "planner-0", **env: str) -> Process:
        """Start one, which may fail."""
        self._ports[name] = free_port()
        port = {"KVMESH_PLANNER_METRICS_PORT": str(self._ports[name])}
        self.mesh.start("planner", name, **{**QUICK, **port, **env})
        return self.mesh.processes[name]

    def get(self, name: str, path: str) -> str:
        """A page of its endpoint; raises AssertionError while there is none."""
        url = f"http://127.0.0.1:{self._ports[name]}{path}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as answer:  # /health of one that starts
            with answer:
                return answer.read().decode()
        except OSError as error:
            raise AssertionError(f"{url}: {error}") from error

    def health(self, name: str = "planner-0") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get(name, "/health"))
        return found

    def warnings(self, name: str = "planner-0") -> str:
        return "\n".join(self.health(name).get("warnings", []))

    def metrics(self, name: str = "planner-0") -> dict[str, float]:
        """Its metrics: sample with its labels → value."""
        found = _SAMPLE.findall(self.get(name, "/metrics"))
        return {sample: float(value) for sample, value in found}

    def leads(self, name: str = "planner-0") -> bool:
        return self.metrics(name)["kvmesh_planner_leader"] == 1

    def decided(self, name: str = "planner-0") -> float:
        """The number of its decisions."""
        samples = self.metrics(name).items()
        return sum(value for sample, value in samples if "planner_decisions_total" in sample)

    async def decides(self, times: int = 2, name: str = "planner-0") -> None:
        """Wait for further decisions."""
        target = self.decided(name) + times
        await eventually(lambda: self.decided(name) >= target, what=f"{name} decides")

    def freeze(self, name: str) -> None:
        self.mesh.processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.mesh.processes[name].send_signal(signal.SIGCONT)

    def log(self, name: str = "planner-0") -> str:
        return (self.mesh.folder / f"{name}.log").read_text()

    async def decisions(self) -> list[ScalingDecision]:
        """The recorded decisions of the last hours, oldest first."""
        return await read_decisions(self.bus, moment("2h"), None)


async def command(mesh: Mesh, *arguments: str, **env: str) -> tuple[int, str]:
    """Run a `kvmesh` subcommand on a mesh; returns its exit status and output."""
    done = await mesh.command(*arguments, **env)
    return done.returncode, done.stdout + done.stderr
