"""The weights process of a vLLM server without a worker."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.settings import SettingsError
from kvmesh.weights import client
from kvmesh.weights.answer import wait_for_answer
from kvmesh.weights.frames import WeightsJob
from kvmesh.weights.locks import FileLock
from kvmesh.worker.engines.vllm.weights import server_weights
from kvmesh.worker.engines.vllm.weights.server_weights import ServersProcess, server_options


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder, and a weights process that ends at once."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(client, "COMMAND", (sys.executable, "-c", "pass"))
    monkeypatch.setattr(server_weights, "_started", {})
    monkeypatch.delenv("KVMESH_WORKER_NAME", raising=False)
    yield tmp_path
    for started in server_weights._started.values():
        started.close()


def config(folder: Path) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(model=str(folder)), instance_id="abcde")


def test_without_variables_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVMESH_"):
            monkeypatch.delenv(name)
    assert server_options(config(tmp_path)) is None


def test_a_model_that_is_no_folder_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_WEIGHTS_KEEP", "true")
    assert server_options(config(Path("org/model"))) is None


def test_wrong_variables_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_WEIGHTS_KEEP", "perhaps")
    with pytest.raises(SettingsError):
        server_options(config(tmp_path))


def test_a_process_that_dies_leaves_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_WEIGHTS_KEEP", "true")
    monkeypatch.setenv("KVMESH_WEIGHTS_DIRECTORY", "/somewhere")
    monkeypatch.setenv("KVMESH_WORKER_REVISION", "v1")
    jobs: list[WeightsJob] = []

    def noted(job: WeightsJob, lock: FileLock) -> ServersProcess:
        jobs.append(job)
        return ServersProcess(job, lock)

    monkeypatch.setattr(server_weights, "ServersProcess", noted)
    options = server_options(config(tmp_path))
    assert [job.revision for job in jobs] == ["v1"]
    assert options is not None
    assert (options.keep, options.directory, options.folder) == (True, "/somewhere", str(tmp_path))
    assert "died" in wait_for_answer(options.access.answer_file, 30).disk


def test_one_process_of_the_server_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_WEIGHTS_KEEP", "true")
    base = tmp_path / f"kvmesh-vllm-{os.getuid()}-abcde"
    base.mkdir(0o700)
    with FileLock(base / "lock") as lock:
        assert lock.take()  # by another rank
        options = server_options(config(tmp_path))
    assert options is not None
    assert options.access.answer_file.parent == base
    assert not server_weights._started
