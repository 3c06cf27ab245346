"""Environments: equal for equal facts, and named by the domain's key."""

import os
from pathlib import Path

import pytest

from kvmesh.settings import Settings
from kvmesh.settings.schema import VllmSettings, WorkerSettings
from kvmesh.worker.compiled.environment import CompileEnvironment, engine_environment

KEY, OTHER = b"k" * 32, b"o" * 32
ARCHIVE = "ab" * 32


def settings(*args: str, **worker: object) -> Settings:
    fields = {"engine": "vllm", **worker}
    return Settings(vllm=VllmSettings(args=list(args)), worker=WorkerSettings(**fields))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_an_environment_is_the_same_twice(folder: Path) -> None:
    one, other = (engine_environment(settings("seed=1"), folder) for _ in range(2))
    assert one.digest == other.digest
    assert one.label(KEY) == other.label(KEY)


def test_each_fact_counts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [engine_environment(settings(), folder).digest]
    digests.append(engine_environment(settings("dtype=float16"), folder).digest)
    digests.append(engine_environment(settings(block_size=32), folder).digest)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    digests.append(engine_environment(settings(), tmp_path / "other").digest)
    (folder / "config.json").write_text('{"layers": 2}')
    digests.append(engine_environment(settings(), folder).digest)
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    digests.append(engine_environment(settings(), folder).digest)
    installed = tmp_path / "site"
    (installed / "vllm-9.9.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(installed))
    digests.append(engine_environment(settings(), folder).digest)
    assert len(set(digests)) == len(digests)


def test_gpus_and_their_driver_count(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    tool = commands / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    found = []
    for script in ("echo 'H100, 9.0, 570.1'", "echo 'H100, 9.0, 580.2'", "exit 9"):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        found.append(engine_environment(settings(), folder).facts["gpus"])
    assert found[0] == ["H100, 9.0, 570.1", *found[2]]
    assert found[1] == ["H100, 9.0, 580.2", *found[2]]


def test_arguments_in_a_file_count(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "args.toml"
    file.write_text("seed = 1")
    given = Settings(vllm=VllmSettings(args_file=file), worker=WorkerSettings(engine="vllm"))
    before = engine_environment(given, folder).digest
    file.write_text("seed = 2")
    assert engine_environment(given, folder).digest != before


def test_only_holders_of_the_key_name_an_environment_alike() -> None:
    one, other = CompileEnvironment({"a": 1}), CompileEnvironment({"a": 2})
    names = {e.label(key) for e in (one, other) for key in (KEY, OTHER)}
    proofs = {e.mac(key, ARCHIVE) for e in (one, other) for key in (KEY, OTHER)}
    assert len(names | proofs | {one.digest, other.digest}) == 10
    assert one.mac(KEY, ARCHIVE) != one.mac(KEY, "cd" * 32)
