"""Roots of compile caches: in use, recovered, refused and evicted."""

import os
from pathlib import Path

import pytest

from kvmesh.worker.compiled.archive import travelling_files
from kvmesh.worker.compiled.errors import CompileCacheError
from kvmesh.worker.compiled.roots import CompileCacheRoot, CompileCacheRoots

A, B, C = "a" * 64, "b" * 64, "c" * 64
SIZE = 100_000


@pytest.fixture
def roots(tmp_path: Path) -> CompileCacheRoots:
    return CompileCacheRoots(tmp_path / "compiled", SIZE * 5 // 2)


def compiled(root: CompileCacheRoot) -> Path:
    """Let an engine compile code of SIZE bytes into a root."""
    assert root.begin()
    file = root.files / "triton" / "kernel"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"k" * SIZE)
    root.succeed()
    return file


def test_a_root_is_warm_the_second_time(roots: CompileCacheRoots) -> None:
    root = roots.open(A, 0)
    assert root.alone
    assert not travelling_files(root.files)
    file = compiled(root)
    second = roots.open(A, 0)
    assert travelling_files(second.files)
    assert not second.alone
    second.close()
    root.close()
    again = roots.open(A, 0)
    again.recover()
    assert again.alone
    assert travelling_files(again.files)
    assert file.exists()


def test_a_cache_with_which_no_engine_started_is_refused(roots: CompileCacheRoots) -> None:
    root = roots.open(A, 0)
    (root.scratch() / "triton").mkdir(parents=True)
    (root.scratch().parent / "new" / "triton").mkdir(parents=True)
    (root.files.parent / "new" / "triton" / "kernel").write_bytes(b"wrong")
    root.fill("digest")
    assert travelling_files(root.files)
    assert root.begin()
    root.close()  # the worker was killed
    again = roots.open(A, 0)
    again.recover()
    assert not travelling_files(again.files)
    assert again.state.refused == ["digest"]
    again.close()


def test_one_process_fills_while_others_wait(roots: CompileCacheRoots) -> None:
    root = roots.open(A, 0)
    with pytest.raises(CompileCacheError, match="another process"):
        roots.open(A, 0)
    assert root.begin()
    other = roots.open(A, 0)
    assert not other.alone
    other.close()
    root.close()


def test_the_least_recently_used_are_evicted_but_not_those_in_use(
    roots: CompileCacheRoots,
) -> None:
    files = {}
    for number, name in enumerate((A, B, C)):
        root = roots.open(name, 0)
        files[name] = compiled(root)
        root.close()
        os.utime(files[name].parents[2] / "use.lock", (number + 1, number + 1))
    held = roots.open(A, 0)
    os.utime(files[A].parents[2] / "use.lock", (0, 0))
    assert held.begin()
    roots.evict()
    assert [files[name].exists() for name in (A, B, C)] == [True, False, True]
    held.close()


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CompileCacheError, match="may write"):
        CompileCacheRoots(tmp_path / "open", SIZE)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(CompileCacheError, match="not a directory"):
        CompileCacheRoots(tmp_path / "link", SIZE)


def test_an_unreadable_state_starts_anew(roots: CompileCacheRoots) -> None:
    root = roots.open(A, 0)
    file = compiled(root)
    root.close()
    (file.parents[2] / "state").write_bytes(b"{")
    again = roots.open(A, 0)
    again.recover()
    assert not travelling_files(again.files)
    again.close()
