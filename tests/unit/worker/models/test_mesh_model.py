"""Models of the mesh in a worker's settings."""

from pathlib import Path

import pytest

from kvmesh.settings import load
from kvmesh.settings.schema import Settings
from kvmesh.weights.models.catalog import ModelEntry
from kvmesh.worker.models import mesh_model
from kvmesh.worker.models.mesh_model import mesh_reference

ENTRY = ModelEntry("m", "a" * 64, "b" * 64, 2000, 2, 0.0, complete=True, weights_bytes=1000)


def settings(**values: object) -> Settings:
    env = {f"KVMESH_{key}": str(value) for key, value in values.items()}
    return load(None, env, {})


def test_a_folder_is_no_model_of_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert mesh_reference(settings().worker) is None
    for text in ("m", str(tmp_path / "m"), "/missing", "./missing", "missing/"):
        found = mesh_reference(settings(WORKER_MODEL=text).worker)
        assert (found is None) == (text in ("m", str(tmp_path / "m"), "/missing"))


def test_a_name_may_have_a_digest() -> None:
    found = mesh_reference(settings(WORKER_MODEL="org/m@0123456789ab").worker)
    assert found == ("org/m", "0123456789ab")


def test_weights_stream_into_memory_that_has_room(tmp_path: Path) -> None:
    shared = {"WEIGHTS_SHARE": "true", "WEIGHTS_DIRECTORY": tmp_path / "store"}
    engines = {"mock": False, "torch": True, "vllm": True, "openai": False}
    for engine, streamed in engines.items():
        chosen = settings(WORKER_ENGINE=engine, **shared)
        assert mesh_model._streamed(chosen, ENTRY) == streamed
    full = settings(WORKER_ENGINE="torch", WEIGHTS_MAX_BYTES=999, **shared)
    assert not mesh_model._streamed(full, ENTRY)
    assert not mesh_model._streamed(settings(WORKER_ENGINE="torch"), ENTRY)
