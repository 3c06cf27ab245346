"""`kvmesh up` as a user runs it: one process, its output, and the processes under it."""

import http.client
import json
import os
import signal
import subprocess
import threading
from pathlib import Path

from kvmesh.bus.client import BusOptions
from support import forks
from support.evidence import Evidence
from support.forks import Process
from support.nats import free_port, free_ports
from support.wait import PATIENCE_S, eventually

ROLES = ("FRONTEND", "ROUTER", "INDEXER", "WORKER", "KVBM", "PLANNER")
NAMES = [f"KVMESH_{role}_NAME=" for role in ROLES]


class Up:
    """A running `kvmesh up` on its own ports, with its state below `folder`.

    Its processes but the frontend serve metrics on `metrics` consecutive ports. It has a dashboard
    only if asked to.
    """

    def __init__(
        self, folder: Path, *arguments: str, metrics: int = 0, dashboard: bool = False
    ) -> None:
        self.port = free_port()
        self.metrics_port = free_ports(metrics) if metrics else 0
        self.nats_port = free_port()
        self.dashboard_port = free_port() if dashboard else 0
        self.folder = folder
        self.lines: list[str] = []
        self.evidence = Evidence(lambda: {"kvmesh up": self.output})
        self._arguments = arguments
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.nats_port}"

    @property
    def token_file(self) -> Path:
        return self.folder / "state" / "nats.token"

    @property
    def options(self) -> BusOptions:
        return BusOptions(url=self.nats_url, token=self.token_file.read_text().strip())

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def start(self) -> None:
        arguments = [
            *("up", "--port", str(self.port), "--nats-port", str(self.nats_port)),
            *("--state-dir", str(self.folder / "state")),
            *("--metrics-port", str(self.metrics_port)),
            *self._dashboard(),
            *("--ready-timeout-s", "120", *self._arguments),
        ]
        reader, writer = os.pipe()
        with open(writer, "wb") as output:
            env = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
            self._process = forks.start(arguments, env, output, output, self.folder)
        threading.Thread(target=self._read, args=(reader,), daemon=True).start()

    def _dashboard(self) -> tuple[str, ...]:
        if not self.dashboard_port:
            return ("--no-dashboard",)
        return ("--dashboard-port", str(self.dashboard_port))

    def _read(self, reader: int) -> None:
        with open(reader) as output:
            self.lines.extend(line.rstrip("\n") for line in iter(output.readline, ""))

    async def ready(self, timeout: float = 120.0) -> None:
        """Wait for the example command, the last line of a successful start."""
        await eventually(lambda: "curl -N" in self.output or self.status is not None, timeout)
        assert self.status is None, self.output

    @property
    def status(self) -> int | None:
        """The exit status after its end."""
        assert self._process is not None
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self, timeout: float = PATIENCE_S) -> int:
        """Wait for the end; returns the exit status."""
        await eventually(lambda: self.status is not None, timeout, "kvmesh up has not ended")
        assert self.status is not None
        return self.status

    def command(
        self, *arguments: str, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a `kvmesh` subcommand on this mesh to its end."""
        mesh = ("--nats", self.nats_url, "--nats-token-file", str(self.token_file))
        return forks.run([*arguments, *mesh], os.environ, timeout)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(PATIENCE_S)

    def children(self) -> dict[str, int]:
        """Its direct children: name to pid."""
        return {name: pid for pid in self._pids() if (name := _name(pid))}

    def unnamed(self) -> list[int]:
        """The pids of the direct children that are no process of the mesh."""
        return [pid for pid in self._pids() if not _name(pid)]

    def _pids(self) -> list[int]:
        pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in pids]

    def complete(self, max_tokens: int = 8, prompt: str = "Hello") -> list[str]:
        """Stream a chat completion; returns the data of its events. Raises OSError if refused."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        body = {
            "model": "kvmesh-demo",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": True,
        }
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status == 200, text
        finally:
            connection.close()
        return [line[6:] for line in text.splitlines() if line.startswith("data: ")]

    def serves(self) -> bool:
        """True if a completion succeeds completely."""
        try:
            return self.complete()[-1] == "[DONE]"
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"not served: {error!r}") from error


def _name(pid: int) -> str:
    """The name of a supervised process; "" while it starts or after its end."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return ""
    if b"nats-server" in command:
        return "nats"
    names = (v.removeprefix(n) for v in environ for n in NAMES if v.startswith(n))
    return next(names, "") if b"kvmesh.cli.main" in command else ""


def alive(pid: int) -> bool:
    """True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
