"""Copies of weights in a node's memory, used by several processes."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.weights import CHUNK, make_weights

from kvmesh.weights import stored_copy
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.errors import StoreError, StoreFull, WeightsLost
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy

MAX = 100 << 20


def manifest_of(folder: Path, size: int = 200_000) -> Manifest:
    return checkpoint_manifest(make_weights(folder, size=size), chunk_bytes=CHUNK)


def fill(copy: StoredCopy, source: Path) -> None:
    for index, file in enumerate(copy.manifest.files):
        copy.file(index, writable=True)[:] = (source / file.name).read_bytes()
    for chunk in range(len(copy.manifest.chunks)):
        copy.mark(chunk)


def test_a_copy_is_shared_until_its_last_user_ends(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    assert store.open(manifest.digest) is None
    copy = store.create(manifest)
    assert not copy.complete
    other = WeightStore(tmp_path / "store", MAX).open(manifest.digest)
    assert other is not None
    fill(copy, tmp_path / "model")
    assert other.complete
    other.wait(range(len(manifest.chunks)), 0)
    for index, file in enumerate(manifest.files):
        content = (tmp_path / "model" / file.name).read_bytes()
        assert (other.folder / file.name).read_bytes() == content
        for tensor in manifest.tensors:
            if tensor.file == index:
                end = tensor.offset + tensor.size
                assert bytes(other.tensor(tensor)) == content[tensor.offset : end]
    assert other.tensor(manifest.tensors[0]).readonly
    copy.close()
    assert [m.digest for m in store.list()] == [manifest.digest]
    assert not store.evict(manifest.digest)
    other.close()
    assert store.list() == []
    assert store.open(manifest.digest) is None


def test_a_kept_copy_stays_for_the_next_process(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    copy = store.create(manifest)
    fill(copy, tmp_path / "model")
    copy.set_keep()
    copy.close()
    WeightStore(tmp_path / "store", MAX).sweep()
    again = store.open(manifest.digest)
    assert again is not None
    assert again.complete
    again.close()
    assert store.evict(manifest.digest)
    assert not store.evict(manifest.digest)


def test_views_of_a_closed_copy_stay_readable(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "model")
    copy = WeightStore(tmp_path / "store", MAX).create(manifest)
    fill(copy, tmp_path / "model")
    tensor = copy.tensor(manifest.tensors[0])
    before = bytes(tensor)
    copy.close()
    assert bytes(tensor) == before


def test_the_least_recently_used_copy_makes_room(tmp_path: Path) -> None:
    manifests = [manifest_of(tmp_path / str(n), 100_000 + 10_000 * n) for n in range(3)]
    store = WeightStore(tmp_path / "store", int(manifests[0].size * 2.5))
    for manifest in manifests[:2]:
        copy = store.create(manifest)
        copy.set_keep()
        copy.close()
    for age, manifest in enumerate((manifests[1], manifests[0])):
        os.utime(tmp_path / "store" / manifest.digest / "use.lock", (age, age))
    used = store.create(manifests[2])
    assert [m.digest for m in store.list()] == [manifests[0].digest, manifests[2].digest]
    blocking = store.open(manifests[0].digest)
    with pytest.raises(StoreFull, match="do not fit"):
        store.create(manifests[1])
    assert blocking is not None
    blocking.close()
    used.close()
    with pytest.raises(StoreFull, match="max_bytes"):
        WeightStore(tmp_path / "store", 1000).create(manifests[1])


def test_copies_in_use_leave_no_room_for_others(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", int(manifest.size * 1.5))
    assert store.fits(manifest.digest, manifest.size)
    assert not store.fits("other", 2 * manifest.size)
    copy = store.create(manifest)
    copy.set_keep()
    assert store.fits(manifest.digest, manifest.size)
    assert not store.fits("other", manifest.size)
    copy.close()
    assert store.fits("other", manifest.size)


def test_a_full_disk_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    copy = store.create(manifest)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(StoreFull, match="No space"):
            copy.write(0, memoryview(b"abc"))
    copy.write(0, memoryview(b"abc"))
    assert copy.file(0)[:4] == b"abc\0"
    copy.close()
    monkeypatch.setattr(WeightStore, "_free", lambda _: manifest.size - 1)
    with pytest.raises(StoreFull, match="do not fit"):
        store.create(manifest)
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["lock"]


def test_of_two_users_that_end_at_once_one_removes_the_copy(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    for _ in range(20):
        users = [store.create(manifest) for _ in range(2)]
        threads = [threading.Thread(target=user.close) for user in users]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.list() == []


def test_memory_that_a_copy_is_going_to_take_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, other = manifest_of(tmp_path / "model"), manifest_of(tmp_path / "other", 150_000)
    store = WeightStore(tmp_path / "store", MAX)
    left = os.statvfs_result((1, 1, 0, 0, manifest.size + other.size // 2, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: left)
    copy = store.create(manifest)
    with pytest.raises(StoreFull, match="do not fit"):
        store.create(other)
    for chunk in range(len(manifest.chunks)):
        copy.write(chunk, memoryview(bytes(manifest.chunks[chunk].size)))
    store.create(other).close()
    copy.close()


def test_a_copy_that_vanishes_meanwhile_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    glob = Path.glob

    def with_another(folder: Path, pattern: str) -> Iterator[Path]:
        yield from glob(folder, pattern)
        yield folder / "0" / "files" / "gone"

    monkeypatch.setattr(Path, "glob", with_another)
    assert store.used() == 0
    monkeypatch.undo()
    store.create(manifest).close()


USE = """
import sys, time
from pathlib import Path
from kvmesh.weights.store import WeightStore
store = WeightStore(Path(sys.argv[1]), 1 << 30)
copy = store.open(sys.argv[2])
copy.fetch()
store.scratch(10)
print("open", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    copy = store.create(manifest)
    arguments = (str(tmp_path / "store"), manifest.digest)
    user = subprocess.Popen([sys.executable, "-c", USE, *arguments], stdout=subprocess.PIPE)
    assert user.stdout is not None
    user.stdout.readline()
    user.stdout.close()
    assert not copy.fetch()
    assert copy.fetched
    copy.close()
    store.sweep()
    assert len(store.list()) == 1
    assert len(list((tmp_path / "store").glob(".scratch-*"))) == 1
    user.kill()
    user.wait()
    again = store.open(manifest.digest)
    assert again is not None
    assert not again.fetched
    assert again.fetch()
    again.end_fetch()
    again._use.close()  # as if it were killed
    store.sweep()
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["lock"]


def test_a_reader_waits_for_its_chunks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    copy = store.create(manifest)
    assert copy.fetch()
    reader = store.open(manifest.digest)
    assert reader is not None

    def arrive() -> None:
        copy.mark(3)
        copy.mark(4)

    arriving = threading.Timer(0.1, arrive)
    arriving.start()
    reader.wait([3, 4], 10)
    arriving.join()
    with pytest.raises(WeightsLost, match="no chunk has arrived"):
        reader.wait([3, 5], 0.1)
    copy.end_fetch()
    monkeypatch.setattr(stored_copy, "ORPHANED_S", 0.1)
    with pytest.raises(WeightsLost, match="no process fetches"):
        reader.wait([3, 5], 30)
    reader.close()
    copy.close()


def test_a_folder_of_the_store_becomes_a_copy(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", MAX)
    for _ in range(2):
        folder = make_weights(store.scratch(2_000_000))
        manifest = checkpoint_manifest(folder, chunk_bytes=CHUNK, form="engine", engine="torch")
        copy = store.adopt(manifest, folder)
        assert copy.complete
        assert not folder.exists()
        assert (copy.folder / manifest.files[0].name).stat().st_size == manifest.files[0].size
    assert [m.form for m in store.list()] == ["engine"]
    hidden = [p.name for p in (tmp_path / "store").iterdir() if not p.name.isalnum()]
    assert hidden == []


def test_an_unsafe_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="700"):
        WeightStore(tmp_path / "open", MAX)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(StoreError, match="not a directory"):
        WeightStore(tmp_path / "link", MAX)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        WeightStore(tmp_path / "file", MAX)


def test_a_damaged_copy_is_refused(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path / "model")
    store = WeightStore(tmp_path / "store", MAX)
    copy = store.create(manifest)
    copy.set_keep()
    copy.close()
    folder = tmp_path / "store" / manifest.digest
    (folder / "have").write_bytes(b"\1")
    with pytest.raises(StoreError, match="damaged"):
        store.open(manifest.digest)
    (folder / "manifest").write_bytes(b"\1")
    with pytest.raises(StoreError, match="malformed"):
        store.open(manifest.digest)
    assert store.list() == []
    new = store.create(manifest)
    assert not new.complete
    new.close()
