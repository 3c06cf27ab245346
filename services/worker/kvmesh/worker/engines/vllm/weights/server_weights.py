"""Weights for a vLLM server that no worker of ours has started, from the environment.

The first of the server's processes on a node that loads a model starts the weights process, which
ends with it.
"""

import atexit
import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kvmesh.settings import Settings, load
from kvmesh.weights.answer import WeightsAnswer, write_answer
from kvmesh.weights.client import LoadersProcess, access
from kvmesh.weights.frames import WeightsJob
from kvmesh.weights.locks import FileLock
from kvmesh.weights.models.reference import name_of_folder
from kvmesh.worker.engines.vllm.weights.options import LoaderOptions, loader_options
from kvmesh.worker.model_folder import weights_revision

log = logging.getLogger(__name__)
PREFIX = "KVMESH_"
WATCH_S = 0.2
_started: dict[Path, "ServersProcess"] = {}  # by the folder of the answer


class ServersProcess:
    """The weights process of a server, and the lock that says so."""

    def __init__(self, job: WeightsJob, lock: FileLock) -> None:
        """Raises OSError."""
        self._answer_file = Path(job.answer_file)
        self._answer_file.unlink(missing_ok=True)
        self._lock = lock
        self._process = LoadersProcess(job)
        atexit.register(self.close)
        threading.Thread(target=self._watch, name="weights process", daemon=True).start()

    def engine_runs(self) -> None:
        """Let the process offer the weights."""
        self._process.engine_runs()

    def close(self) -> None:
        """End the process."""
        self._process.close()
        shutil.rmtree(self._answer_file.parent, ignore_errors=True)

    def _watch(self) -> None:
        """Answer for a process that has died."""
        while self._process.alive and not self._answer_file.exists():
            time.sleep(WATCH_S)
        if not self._answer_file.exists():
            try:
                write_answer(self._answer_file, WeightsAnswer(disk="the weights process has died"))
            except OSError as error:
                log.warning("cannot write %s: %s", self._answer_file, error.strerror)


def server_options(config: Any) -> LoaderOptions | None:
    """Options of the server's own weights process; None, and a line in the log, without one.

    Raises SettingsError for variables that are wrong.
    """
    folder = Path(config.model_config.model)
    env = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    if not env:
        log.info("the weights come from %s: there are no %s* variables", folder, PREFIX)
        return None
    if not folder.is_dir():
        log.warning("the weights of %s come from no other server: it is no folder", folder)
        return None
    settings = load(None, os.environ, {})
    base = Path(tempfile.gettempdir()) / f"kvmesh-vllm-{os.getuid()}-{config.instance_id}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        if base.lstat().st_uid != os.getuid():
            raise PermissionError(f"{base} belongs to another user")
        if base not in _started:
            lock = FileLock(base / "lock")
            if lock.take():
                job = _job(settings, env, config.instance_id, folder, base / "answer")
                _started[base] = ServersProcess(job, lock)
            else:
                lock.close()
    except OSError as error:
        log.warning("the weights come from %s: no weights process starts: %s", folder, error)
        return None
    weights = settings.weights
    longest_s = max(weights.patience_s, weights.wait_s)
    found = access(base / "answer", weights.directory, weights.max_bytes, weights.keep, longest_s)
    return loader_options(folder, found)


def server_runs() -> None:
    """Tell a weights process of this process that the weights are loaded."""
    for started in _started.values():
        started.engine_runs()


def _job(
    settings: Settings, env: dict[str, str], identity: str, folder: Path, answer_file: Path
) -> WeightsJob:
    worker = settings.worker
    return WeightsJob(
        env=env,
        name=worker.name or f"vllm-{identity}",
        instance=f"vllm-{identity}",
        model=worker.served_name or name_of_folder(folder),
        folder=str(folder),
        revision=weights_revision(worker, folder),
        node=worker.node or os.uname().nodename,
        answer_file=str(answer_file),
    )
