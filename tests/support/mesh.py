"""A whole mesh for tests: real processes of the command line on one NATS server."""

import asyncio
import os
import secrets
import signal
import subprocess
import urllib.request
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvmesh.bus.client import BusOptions
from kvmesh.bus.streams.configuration import StreamLimits
from support import forks
from support.evidence import Evidence, log_files
from support.forks import Process
from support.nats import free_port
from support.wait import PATIENCE_S, eventually


def is_healthy(url: str) -> bool:
    """True if the frontend at `url` is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def scrape(port: int) -> dict[str, float]:
    """The metrics at a port: sample with its labels → value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def stream_env(limits: StreamLimits) -> dict[str, str]:
    """Environment variables that give processes the stream limits of a test."""
    return {
        "KVMESH_STREAMS_LEASE_S": str(limits.lease_s),
        "KVMESH_STREAMS_KV_BYTES": str(limits.kv_bytes),
        "KVMESH_STREAMS_ROUTE_BYTES": str(limits.route_bytes),
        "KVMESH_STREAMS_SEQ_BYTES": str(limits.seq_bytes),
    }


@dataclass
class Mesh:
    """Processes by name. `env` holds KVMESH_… variables for all of them.

    With API keys, the frontend exposes its metrics only at `metrics_port`.
    """

    nats_url: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    namespace: str = field(default_factory=lambda: f"t{secrets.token_hex(4)}")
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    processes: dict[str, Process] = field(default_factory=dict)
    worker_ports: dict[str, int] = field(default_factory=dict)
    commands: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evidence = Evidence(partial(log_files, self.folder))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> BusOptions:
        return BusOptions(url=self.nats_url, namespace=self.namespace)

    async def command(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a `kvmesh` subcommand on this mesh."""
        names = {"KVMESH_NATS_URL": self.nats_url, "KVMESH_NATS_NAMESPACE": self.namespace}
        env = {**os.environ, **names, **self.env, "COLUMNS": "200", **env}
        return await asyncio.to_thread(forks.run, arguments, env, PATIENCE_S)

    def start(self, role: str, name: str, **env: str) -> None:
        """Start one service process; extra keywords are environment variables for it alone."""
        self.commands[name] = (role, env)
        settings = self.settings(role, name)
        if role == "worker":
            env = {"KVMESH_WORKER_METRICS_PORT": str(free_port()), **env}
            self.worker_ports[name] = int(env["KVMESH_WORKER_METRICS_PORT"])
        with (self.folder / f"{name}.log").open("ab") as log:
            everything = {**os.environ, **settings, **env}
            self.processes[name] = forks.start([role], everything, log, log)

    def settings(self, role: str, name: str) -> dict[str, str]:
        """The environment variables of a process, without those for it alone."""
        settings = {
            "KVMESH_NATS_URL": self.nats_url,
            "KVMESH_NATS_NAMESPACE": self.namespace,
            "KVMESH_STREAMS_LEASE_S": "10",  # long enough for a busy machine to renew it
            "KVMESH_FRONTEND_PORT": str(self.port),
            # the server reserves it for each mesh, and keeps those of earlier tests
            "KVMESH_FRONTEND_STORED_ANSWERS_BYTES": str(64 << 20),
            f"KVMESH_{role}_NAME".upper(): name,
        }
        if name == "frontend-0":
            settings["KVMESH_FRONTEND_METRICS_PORT"] = str(self.metrics_port)
        return {**settings, **self.env}

    def start_all(self, workers: int = 2) -> None:
        self.start("indexer", "indexer-0")
        self.start("router", "router-0")
        for index in range(workers):
            self.start("worker", f"worker-{index}")
        self.start("frontend", "frontend-0")

    async def ready(self, timeout: float = 120.0) -> None:
        """Wait until the frontend reports ready and `frontend-0` exposes its metrics."""
        await eventually(self._healthy, timeout=timeout, what="the mesh is ready")

    def _healthy(self) -> bool:
        try:
            shown = "frontend-0" not in self.processes or self.metrics()
            return bool(shown and is_healthy(self.url))
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """The metrics of `frontend-0`: sample with its labels → value."""
        return scrape(self.metrics_port)

    def worker_metrics(self) -> dict[str, float]:
        """The metrics of all workers that listen: sample with its labels → value."""
        samples: dict[str, float] = {}
        for name in [name for name in self.worker_ports if name in self.processes]:
            try:
                found = scrape(self.worker_ports[name])
            except OSError as error:
                if not isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                    raise
                continue
            samples |= {k: v for k, v in found.items() if k.startswith("kvmesh_worker_")}
        return samples

    def metric(self, name: str) -> float:
        """The sum of a metric of the frontend or of the workers over all its labels."""
        worker = name.startswith("kvmesh_worker_")
        samples = self.worker_metrics() if worker else self.metrics()
        return sum(v for k, v in samples.items() if k.partition("{")[0] == name)

    def live_workers(self) -> int:
        """Number of workers that the frontend sees."""
        return int(self.metric("kvmesh_frontend_live_workers"))

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(PATIENCE_S)

    def restart(self, name: str) -> None:
        """Restart a killed process, as a supervisor would."""
        role, env = self.commands[name]
        self.start(role, name, **env)

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{text}" for name, text in log_files(self.folder).items())

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE_S)
        self.processes.clear()
