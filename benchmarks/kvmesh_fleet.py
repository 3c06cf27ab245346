"""A mesh of a checkout as a side of a comparison: separate processes, or all of `kvmesh up`."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from local_mesh import (
    Mesh,
    environ,
    free_port,
    kind_of,
    python_of,
    running_mesh,
    step_profile,
    stop_all,
    until_answers,
)
from rows import FAST_MS

WORKERS = 4


@dataclass(frozen=True)
class UpMesh:
    """A mesh under `kvmesh up`, with its supervisor."""

    url: str
    supervisor: int
    started_s: float

    @property
    def pids(self) -> dict[str, int]:
        """All processes by number, as they do not tell their roles."""
        return {f"process-{pid}": pid for pid in (self.supervisor, *children(self.supervisor))}


def children(parent: int) -> list[int]:
    """The processes that a live process or its children have started."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            found += [pid, *children(pid)]
    return found


class KvmeshSide:
    """A checkout with its `.venv`, None: this one; `settings` are environment variables."""

    def __init__(
        self, name: str, checkout: Path | None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._checkout = checkout
        self._settings = dict(settings or {})

    @contextlib.contextmanager
    def running(self, step_ms: float) -> Iterator[Mesh]:
        with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
            profile = str(step_profile(Path(folder), step_ms))
            kind = kind_of(self._checkout)
            settings = self._settings | {"KVMESH_MOCK_PROFILE": profile}
            with running_mesh(WORKERS, 1.0, 1, kind, **settings) as mesh:
                yield mesh

    @contextlib.contextmanager
    def started(self) -> Iterator[UpMesh]:
        with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as name:
            folder, port = Path(name), free_port()
            options = self._settings | {
                "KVMESH_UP_WORKERS": str(WORKERS),
                "KVMESH_UP_DASHBOARD": "false",
                "KVMESH_UP_STATE_DIR": str(folder / "state"),
                "KVMESH_UP_NATS_PORT": "0",
                "KVMESH_FRONTEND_PORT": str(port),
                "KVMESH_MOCK_PROFILE": str(step_profile(folder, FAST_MS)),
            }
            command = [python_of(self._checkout), "-m", "kvmesh.cli.main", "up"]
            log = folder / "up.log"
            began = time.monotonic()
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, env=environ() | options, cwd=folder, stdout=output, stderr=output
                )
            try:
                url = f"http://127.0.0.1:{port}"
                answered = until_answers(url, {"kvmesh up": process}, lambda _: log.read_text())
                yield UpMesh(url, process.pid, answered - began)
            finally:
                stop_all([process])
