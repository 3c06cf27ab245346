"""NVIDIA Dynamo as a side of a comparison: its frontend and mock workers on one machine.

It runs as its documentation recommends: the KV router in the frontend, the fast tokenizer with its
prefix cache, TCP for requests and ZeroMQ for events, or NATS for both. Its log has warnings only,
as a mesh writes no line per request either. `DYN_…` variables of this process come first.
"""

import contextlib
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from chat_load import MODEL
from kvmesh_fleet import WORKERS
from local_mesh import (
    NATS_THREADS,
    START_S,
    environ,
    free_port,
    nats_command,
    step_profile,
    stop_all,
    until_answers,
    wait_for_port,
)
from rows import FAST_MS

from kvmesh.demo import model_dir

Plane = Literal["tcp", "nats"]
TUNED = {
    "DYN_TOKENIZER": "fastokens",
    "DYN_TOKENIZER_CACHE": "1",
    "DYN_TOKENIZER_CACHE_BYTES": str(1 << 30),
    "DYN_LOG": "warn",
    "HF_HUB_OFFLINE": "1",
}


class DynamoFleet:
    """Running processes by name: `frontend`, `worker-0` … and `nats` if it uses one."""

    def __init__(self, folder: Path, venv: Path, plane: Plane, workers: int = WORKERS) -> None:
        self._workers = workers
        self.started_s = 0.0
        self._folder = folder
        self._python = str(venv.absolute() / "bin/python")
        self._plane = plane
        self._port, self._nats_port = free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def start(self, step_ms: float) -> None:
        """Start all processes; returns once each worker serves. Raises RuntimeError."""
        began = time.monotonic()
        planes = ["--request-plane", "tcp", "--event-plane", "zmq"]
        if self._plane == "nats":
            planes = ["--request-plane", "nats", "--event-plane", "nats"]
            self._spawn("nats", nats_command(self._folder, self._nats_port))
            wait_for_port(self._nats_port)
        common = ["--discovery-backend", "file", *planes]
        frontend = ["dynamo.frontend", "--http-port", str(self._port), "--router-mode", "kv"]
        self._spawn("frontend", [self._python, "-m", *frontend, *common])
        model = ["--model-path", str(model_dir()), "--model-name", MODEL]
        profile = ["--planner-profile-data", str(step_profile(self._folder, step_ms))]
        for index in range(self._workers):
            worker = [self._python, "-m", "dynamo.mocker", *model, *profile, *common]
            self._spawn(f"worker-{index}", worker)
        self.started_s = until_answers(self.url, self._processes, self._log) - began
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                instances = msgspec.json.decode(answer.read())["instances"]
            if sum(each["endpoint"] == "generate" for each in instances) == self._workers:
                return
            time.sleep(0.1)
        raise RuntimeError(f"not all workers serve: {instances}")

    def _spawn(self, name: str, command: list[str]) -> None:
        chosen = {name: value for name, value in os.environ.items() if name.startswith("DYN_")}
        own = {
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "NATS_SERVER": f"nats://127.0.0.1:{self._nats_port}",
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command, env=environ() | TUNED | NATS_THREADS | chosen | own, stdout=log, stderr=log
            )

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        stop_all(process for name, process in self._processes.items() if name != "nats")
        stop_all(process for name, process in self._processes.items() if name == "nats")


class DynamoSide:
    """An installation of Dynamo in a virtual environment."""

    def __init__(self, venv: Path, plane: Plane) -> None:
        self.name = f"Dynamo, {plane.upper()}"
        self._venv = venv
        self._plane = plane

    @contextlib.contextmanager
    def running(self, step_ms: float) -> Iterator[DynamoFleet]:
        with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
            fleet = DynamoFleet(Path(folder), self._venv, self._plane)
            try:
                fleet.start(step_ms)
                yield fleet
            finally:
                fleet.stop()

    def started(self) -> contextlib.AbstractContextManager[DynamoFleet]:
        return self.running(FAST_MS)
