"""A real NATS server for tests: JetStream, an ephemeral port, a private store directory."""

import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from support.evidence import Evidence, log_files
from support.wait import PATIENCE_S

SERVER = Path(sys.executable).with_name("nats-server")


_ports = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """A port given once, below those that Linux gives to outgoing connections."""
    while True:
        port = _ports.randrange(10_000, 32_768)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class NatsServer:
    """One server process; `restart` keeps its port and store, `wipe` empties the store."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.port = free_port()
        self.evidence = Evidence(partial(log_files, store))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def config(self) -> Path:
        """The server's configuration, written."""
        config = self.store / "nats.conf"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\nmax_payload: 8MB\n"
            f'jetstream {{ store_dir: "{self.store / "js"}" }}\n'
        )
        return config

    def start(self) -> None:
        config = self.config()
        with (self.store / "nats.log").open("ab") as log:
            self._process = subprocess.Popen([SERVER, "-c", config], stdout=log, stderr=log)
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

    def stop(self) -> None:
        self.kill(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def wipe(self) -> None:
        self.kill()
        shutil.rmtree(self.store / "js", ignore_errors=True)
        self.start()
