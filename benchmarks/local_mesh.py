"""A whole mesh of separate processes, started for a measurement and stopped after it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from kvmesh.cli.supervisor.nats import server_threads

NATS_SERVER = Path(sys.executable).with_name("nats-server")
NATS_THREADS = {"GOMAXPROCS": str(server_threads(os.cpu_count() or 1))}  # as `kvmesh up` does
START_S, STOP_S = 30.0, 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int) -> None:
    """Return once a process listens there; raises RuntimeError after a timeout."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"nothing listens on port {port}")


def nats_command(folder: Path, port: int, limits: str = "") -> list[str]:
    """The command of a NATS server with JetStream that stores everything in `folder`."""
    config = folder / "nats.conf"
    config.write_text(
        f"listen: 127.0.0.1:{port}\nmax_payload: 8MB\n"
        f'jetstream {{ store_dir: "{folder / "js"}"{limits} }}\n'
    )
    return [str(NATS_SERVER), "-c", str(config)]


def environ() -> dict[str, str]:
    """This process's environment without the settings of a mesh."""
    return {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}


def refusal(url: str) -> str | None:
    """None if the demo model answers there, else why not."""
    body = {"messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        msgspec.json.encode({"model": "kvmesh-demo", **body}),
        {"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except (urllib.error.URLError, OSError) as error:
        return str(error)
    return None


def until_answers(
    url: str, processes: Mapping[str, subprocess.Popen[bytes]], log: Callable[[str], str]
) -> float:
    """The monotonic time of the first answer. Raises RuntimeError if there is none."""
    deadline = time.monotonic() + START_S
    while (answer := refusal(url)) is not None:
        for name, process in processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended at its start:\n{log(name)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} did not start to serve: {answer}")
        time.sleep(0.02)
    return time.monotonic()


def step_profile(folder: Path, step_ms: float) -> Path:
    """A file of step times for mock engines: a decode step of any size, and prompts at once."""
    tokens = np.array([1.0, 2.0**20])
    np.savez(
        folder / "steps.npz",
        prefill_isl=tokens,
        prefill_ttft_ms=np.array([0.001, 0.002]),
        decode_active_kv_tokens=tokens,
        decode_context_length=tokens,
        decode_itl=np.full((2, 2), step_ms),
    )
    return folder / "steps.npz"


def stop_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Stop processes together; kills those that take too long."""
    for process in (stopping := list(processes)):
        process.send_signal(signal.SIGTERM)
    for process in stopping:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Mesh:
    """Running processes by name (`nats`, `frontend`, `router`, `indexer`, `worker-0` …)."""

    def __init__(self, folder: Path, options: dict[str, str], frontends: int) -> None:
        self.folder = folder
        self.options = options
        self.nats_port = free_port()
        self.ports = [free_port() for _ in range(frontends)]
        self.started_s = 0.0
        self._health_ports: list[int] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.nats_port}"

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes.items()}

    def start(self, workers: int) -> None:
        started = time.monotonic()
        self.restart_nats()
        for name in ("router", "indexer"):
            self.add_service(name, name, {})
        for index in range(workers):
            port = free_port()
            self._health_ports.append(port)
            options = {"KVMESH_MOCK_SEED": str(index), "KVMESH_WORKER_METRICS_PORT": str(port)}
            self.add_service("worker", f"worker-{index}", options)
        for index, port in enumerate(self.ports):
            name = f"frontend-{index}" if index else "frontend"
            self.add_service("frontend", name, {"KVMESH_FRONTEND_PORT": str(port)})
        self._until_ready(started)

    def restart_nats(self) -> None:
        """Start the NATS server; one that ran before has ended and left its store."""
        self._spawn("nats", nats_command(self.folder, self.nats_port), NATS_THREADS)

    def add_service(self, role: str, name: str, options: dict[str, str]) -> None:
        """Start a process of a role beside the others."""
        options = {f"KVMESH_{role.upper()}_NAME": name, "KVMESH_NATS_URL": self.nats_url, **options}
        self._spawn(name, self.command(role), options)

    def command(self, role: str) -> list[str]:
        """The command of a process of a role."""
        return [sys.executable, "-m", "kvmesh.cli.main", role]

    def _spawn(self, name: str, command: list[str], options: dict[str, str]) -> None:
        environment = environ() | self.options | options
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.processes[name] = process

    def _until_ready(self, started: float) -> None:
        self.started_s = until_answers(self.url, self.processes, self.log) - started
        deadline = time.monotonic() + START_S
        while not all(self._healthy(port) for port in self._health_ports):
            if time.monotonic() > deadline:
                raise RuntimeError("not all workers became healthy")
            time.sleep(0.1)

    def _healthy(self, port: int) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        stop_all(process for name, process in self.processes.items() if name != "nats")
        stop_all(process for name, process in self.processes.items() if name == "nats")


def python_of(checkout: Path | None) -> str:
    """The interpreter of a checkout's `.venv`; None: of this one."""
    return str(checkout.absolute() / ".venv/bin/python") if checkout else sys.executable


def kind_of(checkout: Path | None) -> type[Mesh]:
    """A mesh whose services run from a checkout; None: from this one."""

    class Build(Mesh):
        def command(self, role: str) -> list[str]:
            return [python_of(checkout), *super().command(role)[1:]]

    return Build


@contextlib.contextmanager
def running_mesh(
    workers: int = 4,
    speedup: float = 1000.0,
    frontends: int = 1,
    kind: type[Mesh] = Mesh,
    **options: str,
) -> Iterator[Mesh]:
    """A serving mesh; `options` are additional environment variables. Raises RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        environment = {"KVMESH_MOCK_SPEEDUP": str(speedup), **options}
        mesh = kind(Path(folder), environment, frontends)
        try:
            mesh.start(workers)
            yield mesh
        finally:
            mesh.stop()
