"""Directory of a node: its locks, and the files of dead processes."""

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.blocks.arena import LivenessLock
from kvmesh.kvbm.tiers import node_directory
from kvmesh.kvbm.tiers.node_directory import (
    DirectoryError,
    NodeDirectory,
    default_directory,
    reclaim,
)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(node_directory, "MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def dead(memory: Path) -> Path:
    """The files of a kvbm and a worker that were killed."""
    path = default_directory("mesh", "dead")
    path.mkdir(mode=0o700)
    for name in ("kvbm.lock", "arena-12345678", "worker-w-0.lock"):
        (path / name).touch()
    return path


@pytest.fixture
def worker(dead: Path) -> Iterator[LivenessLock]:
    lock = LivenessLock(dead / "worker-w-1.lock")
    yield lock
    lock.close()


def test_a_created_directory_is_removed(memory: Path) -> None:
    made = NodeDirectory(memory / "a" / "b")
    assert [path.name for path in made.path.iterdir()] == ["kvbm.lock"]
    assert made.path.stat().st_mode & 0o777 == 0o700
    made.close()
    assert not made.path.exists()


def test_an_existing_directory_stays(memory: Path) -> None:
    there = memory / "there"
    there.mkdir()
    (there / "other.lock").touch()
    NodeDirectory(there).close()
    assert [path.name for path in there.iterdir()] == ["other.lock"]
    (there / "other.lock").unlink()
    NodeDirectory(there).close()
    assert there.is_dir()
    NodeDirectory(there, is_default=True).close()
    assert not there.exists()


def test_a_restart_removes_files_of_dead_processes(dead: Path) -> None:
    again = NodeDirectory(dead, is_default=True)
    assert again.recovered
    assert [path.name for path in dead.iterdir()] == ["kvbm.lock"]
    again.close()
    assert not dead.exists()


def test_a_living_worker_keeps_its_lock(dead: Path) -> None:
    worker = LivenessLock(dead / "worker-w-1.lock")
    again = NodeDirectory(dead, is_default=True)
    assert again.is_held("worker-w-1.lock")
    assert not again.is_held("worker-w-0.lock")
    again.close()
    assert [path.name for path in dead.iterdir()] == ["worker-w-1.lock"]
    worker.close()
    reclaim()
    assert not dead.exists()


def test_without_descriptors_a_worker_counts_as_alive(dead: Path, worker: LivenessLock) -> None:
    again = NodeDirectory(dead, is_default=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        held = again.is_held("worker-w-1.lock")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert held
    assert worker.path.exists()
    again.close()


def test_directories_of_dead_kvbms_are_reclaimed(memory: Path, dead: Path) -> None:
    alive = NodeDirectory(default_directory("mesh", "alive"), is_default=True)
    (alive.path / "arena-1").touch()
    foreign = memory / f"kvmesh-{os.getuid() + 1}-mesh-dead"
    foreign.mkdir()
    reclaim()
    assert not dead.exists()
    assert sorted(path.name for path in alive.path.iterdir()) == ["arena-1", "kvbm.lock"]
    assert foreign.is_dir()
    alive.close()


def test_the_arena_of_a_living_worker_is_not_reclaimed(dead: Path, worker: LivenessLock) -> None:
    reclaim()
    assert (dead / "arena-12345678").exists()


def test_foreign_files_are_not_removed(dead: Path) -> None:
    (dead / "notes").touch()
    reclaim()
    assert [path.name for path in dead.iterdir()] == ["notes"]


def test_only_one_kvbm_holds_a_directory(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_directory, "PATIENCE_S", 0.1)
    held = NodeDirectory(memory / "one")
    with pytest.raises(DirectoryError, match="another kvbm uses"):
        NodeDirectory(memory / "one")
    held.close()


def test_a_waiting_kvbm_locks_the_directory_after_its_removal(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_directory, "PATIENCE_S", 60.0)
    path = memory / "one"
    first = NodeDirectory(path)
    taken: list[NodeDirectory] = []
    second = threading.Thread(target=lambda: taken.append(NodeDirectory(path)))
    second.start()
    first.close()
    second.join()
    monkeypatch.setattr(node_directory, "PATIENCE_S", 0.1)
    with pytest.raises(DirectoryError):
        NodeDirectory(path)
    taken[0].close()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_impossible_directory_is_reported(memory: Path, name: str) -> None:
    (memory / "file").touch()
    with pytest.raises(DirectoryError, match=r"set kvbm\.directory"):
        NodeDirectory(memory / name)
