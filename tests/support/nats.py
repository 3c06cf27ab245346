"""A real NATS server for tests: JetStream, an ephemeral port, a private store directory."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from support.evidence import Evidence, log_files
from support.wait import PATIENCE_S

SERVER = Path(os.environ.get("NATS_SERVER", Path(sys.executable).with_name("nats-server")))
# Another layout of reply subjects, behind a flag since nats-server 2.14
NEWER_REPLIES = "feature_flags { js_ack_fc_v2: true }"
ROOM = "1TB"  # meshes that share a server reserve more than the disk of a small machine has
RELOADED = "Reloaded server configuration"  # in the server's log


def understands(settings: str) -> bool:
    """True if this version of the server knows these settings."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(settings)
        file.flush()
        return subprocess.run([SERVER, "-t", "-c", file.name], capture_output=True).returncode == 0


_ports = random.SystemRandom()
_returned: set[int] = set()


def free_port() -> int:
    """A port not returned before, below Linux's range of ephemeral ports.

    Each process of pytest-xdist ("gw0", "gw1", …) has ports of its own.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = _ports.randrange(10_000 + process % 8, 32_768, 8)
        if port not in _returned and _is_free(port):
            _returned.add(port)
            return port


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    while True:
        first = free_port()
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_stopped(task: Path) -> bool:
    """True of a thread that a signal has stopped, or that has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


class NatsServer:
    """One server process; `restart` retains its port and store, `wipe` empties the store."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.binary = SERVER
        self.port = free_port()
        self.max_payload = "8MB"
        self.jetstream: str | None = ""  # further settings of JetStream; None: without it
        self.settings = ""  # further settings
        self.environ: Mapping[str, str] | None = None  # None: that of this process
        self.evidence = Evidence(partial(log_files, store))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def config(self) -> str:
        """The text of the server's configuration file."""
        lines = [f"listen: 127.0.0.1:{self.port}", f"max_payload: {self.max_payload}"]
        if self.jetstream is not None:
            room = "" if "max_file_store" in self.jetstream else f"max_file_store: {ROOM}"
            store = f'store_dir: "{self.store / "js"}"'
            lines.append(f"jetstream {{ {store}\n{room}\n{self.jetstream} }}")
        return "\n".join([*lines, self.settings, ""])

    def start(self) -> None:
        config = self.store / "nats.conf"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(self.config())
        with (self.store / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.binary, "-c", config], env=self.environ, stdout=log, stderr=log
            )
        self._wait_for_port()

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise RuntimeError("nats-server did not start: " + (self.store / "nats.log").read_text())

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_S)
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal; return after SIGSTOP once no thread runs on."""
        os.kill(self.pid, number)
        tasks = Path(f"/proc/{self.pid}/task")
        deadline = time.monotonic() + PATIENCE_S
        while number == signal.SIGSTOP and not all(map(_is_stopped, tasks.iterdir())):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def reload(self) -> None:
        """Have the server read its configuration again; return once it has.

        Meanwhile it rejects credentials.
        """
        (self.store / "nats.conf").write_text(self.config())
        done = self.log().count(RELOADED)
        self.signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE_S
        while self.log().count(RELOADED) <= done:
            if time.monotonic() > deadline:
                raise RuntimeError("nats-server did not reload: " + self.log())
            time.sleep(0.01)

    def log(self) -> str:
        return (self.store / "nats.log").read_text()

    def stop(self) -> None:
        self.kill(signal.SIGTERM)

    def leave(self) -> None:
        """Stop in lame duck mode: the server tells its clients, and ends once they have left."""
        self.kill(signal.SIGUSR2)

    def restart(self) -> None:
        self.kill()
        self.start()

    def back_up(self, copy: Path) -> None:
        """Copy the store while the server is stopped, then start it again."""
        self.kill()
        shutil.copytree(self.store / "js", copy)
        self.start()

    def restore(self, copy: Path, stream: str = "") -> None:
        """Stop, and restore the store, or one stream, from a copy: later messages are lost."""
        self.kill()
        folder = Path("jetstream", "$G", "streams", stream) if stream else Path()
        shutil.rmtree(self.store / "js" / folder)
        shutil.copytree(copy / folder, self.store / "js" / folder)

    @contextmanager
    def at_another_address(self) -> Iterator[str]:
        """Run at another address while the block runs; yields its URL."""
        port, self.port = self.port, free_port()
        self.start()
        try:
            yield self.url
        finally:
            self.kill()
            self.port = port

    def wipe(self) -> None:
        self.kill()
        shutil.rmtree(self.store / "js", ignore_errors=True)
        self.start()
