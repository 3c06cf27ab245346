"""Fetches of a copy from scripted sources."""

import asyncio
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from support.weights import CHUNK, make_weights

from kvmesh.bus.messages import WeightOffer
from kvmesh.transfer import TransferError
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.errors import CheckpointError, StoreFull, WeightsLost, WrongDigest
from kvmesh.weights.process import fetching
from kvmesh.weights.process.fetching import WeightFetch
from kvmesh.weights.process.readers import DiskReader
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.weights.stream import FetchOptions


class ScriptedReader:
    """Reads from a folder; for the chunks in `hanging` it waits until it is cancelled.

    It then scribbles into its target, as a late thread would.
    """

    direct = True

    def __init__(self, copy: StoredCopy, folder: Path, hanging: range = range(0)) -> None:
        self._contents = [(folder / f.name).read_bytes() for f in copy.manifest.files]
        self._copy = copy
        self._hanging = hanging
        self.cancelled = 0
        self.error: Exception | None = None
        self.closed = False

    async def read(self, chunk: int, target: memoryview) -> None:
        if self.error is not None:
            raise self.error
        if chunk in self._hanging:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                target[:] = bytes(len(target))
                raise
        file, offset, size = self._copy.manifest.chunks[chunk]
        await asyncio.sleep(0)
        target[:] = self._contents[file][offset : offset + size]

    async def have(self) -> bytes:
        return b"\1" * len(self._copy.manifest.chunks)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_weights(tmp_path / "model")


@pytest.fixture
def copy(tmp_path: Path, folder: Path) -> StoredCopy:
    manifest = checkpoint_manifest(folder, chunk_bytes=CHUNK)
    copy = WeightStore(tmp_path / "store", 100 << 20).create(manifest)
    assert copy.fetch()
    return copy


async def nobody(enough: Callable[[], bool]) -> None:
    """A search that finds nothing."""


def fetch_of(copy: StoredCopy, **readers: ScriptedReader) -> WeightFetch:
    fetch = WeightFetch(copy, FetchOptions(floor_s=0.2, first_s=0.3, rest_s=0.05), "me", nobody)
    for name, reader in readers.items():
        assert fetch._plan.join(name, fetching._now(), complete=True)
        fetch._readers[name] = reader
    return fetch


def assert_same(copy: StoredCopy, folder: Path) -> None:
    assert copy.complete
    for index, file in enumerate(copy.manifest.files):
        assert copy.file(index)[:] == (folder / file.name).read_bytes()


async def test_every_byte_arrives(copy: StoredCopy, folder: Path) -> None:
    reader = ScriptedReader(copy, folder)
    fetch = fetch_of(copy, one=reader)
    await fetch.run(5)
    assert_same(copy, folder)
    assert fetch.taken == {"one": copy.manifest.size}
    assert reader.closed


async def test_late_bytes_never_replace_verified_ones(copy: StoredCopy, folder: Path) -> None:
    count = len(copy.manifest.chunks)
    slow = ScriptedReader(copy, folder, range(count))
    fetch = fetch_of(copy, slow=slow, good=ScriptedReader(copy, folder))
    await fetch.run(10)
    assert_same(copy, folder)
    assert slow.cancelled
    assert fetch.taken == {"good": copy.manifest.size}


async def test_a_source_with_wrong_bytes_is_asked_no_more(copy: StoredCopy, folder: Path) -> None:
    liar = ScriptedReader(copy, folder)
    liar.error = WrongDigest("wrong")
    fetch = fetch_of(copy, liar=liar, good=ScriptedReader(copy, folder))
    await fetch.run(5)
    assert_same(copy, folder)
    assert fetch.peers == 1
    assert liar.closed
    assert fetch.failed["corrupt"] >= 1


@pytest.mark.parametrize("code", ["lost", "revoked", "busy", "timeout"])
async def test_without_a_source_the_fetch_ends(copy: StoredCopy, folder: Path, code: str) -> None:
    broken = ScriptedReader(copy, folder)
    broken.error = TransferError(code, "peer", "gone")  # type: ignore[arg-type]
    with pytest.raises(WeightsLost, match=r"no chunk has arrived for 0\.5 s"):
        await fetch_of(copy, broken=broken).run(0.5)
    assert not any(copy.have[:])


async def test_a_full_memory_ends_the_fetch(
    copy: StoredCopy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(chunk: int, data: memoryview) -> None:
        raise StoreFull("No space left on device")

    monkeypatch.setattr(copy, "write", refuse)
    with pytest.raises(StoreFull, match="No space"):
        await fetch_of(copy, good=ScriptedReader(copy, folder)).run(10)
    assert not any(copy.have[:])


async def test_a_buffer_is_free_only_after_its_write(
    copy: StoredCopy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def write(chunk: int, data: memoryview) -> None:
        writing.set()
        assert go_on.wait(10)

    monkeypatch.setattr(copy, "write", write)
    fetch = fetch_of(copy)
    task = asyncio.create_task(fetch._write(0, fetch._staging.take()))
    await asyncio.to_thread(writing.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not fetch._staging._free
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(fetch._staging._free) == 1


async def test_a_cancelled_read_of_a_disk_does_not_count_against_nixl(
    copy: StoredCopy, folder: Path
) -> None:
    disk = ScriptedReader(copy, folder, range(len(copy.manifest.chunks)))
    disk.direct = False
    fetch = fetch_of(copy)
    for chunk in range(6):
        task = asyncio.create_task(fetch._read("disk", disk, chunk, inf))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert disk.cancelled == 6
    assert not fetch._staging._lost
    assert not fetch._staging._free


@pytest.mark.parametrize("name", ["disk", "store"])
async def test_a_worker_cannot_pass_for_another_kind_of_source(
    copy: StoredCopy, folder: Path, name: str
) -> None:
    fetch = fetch_of(copy)
    own = ScriptedReader(copy, folder)
    (fetch.add_disk if name == "disk" else fetch.add_store)(own)
    fetch.offer(WeightOffer(name, copy.manifest.digest, [], b"", complete=True, node="n"))
    assert fetch._readers == {name: own}


async def test_a_source_that_does_not_list_its_chunks_is_left_alone(
    copy: StoredCopy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = ScriptedReader(copy, folder)
    monkeypatch.setattr(mute, "have", asyncio.Event().wait)
    options = FetchOptions(floor_s=0.1, ceiling_s=0.1)
    fetch = WeightFetch(copy, options, "me", nobody)
    assert fetch._plan.join("mute", fetching._now(), complete=False)
    fetch._polls["mute"] = task = asyncio.create_task(fetch._poll("mute", mute))
    await task
    assert fetch._plan.sources["mute"].failures == 1


async def test_a_disk_with_other_files_is_no_source(copy: StoredCopy, folder: Path) -> None:
    reader = DiskReader(folder, copy.manifest)
    target = bytearray(CHUNK)
    await reader.read(1, memoryview(target))
    file, offset, size = copy.manifest.chunks[1]
    content = (folder / copy.manifest.files[file].name).read_bytes()
    assert target == content[offset : offset + size]
    damaged = folder / copy.manifest.files[file].name
    damaged.write_bytes(bytes(len(content)))
    with pytest.raises(WrongDigest):
        await reader.read(1, memoryview(target))
    reader.close()
    damaged.write_bytes(content[1:])
    with pytest.raises(CheckpointError, match="bytes"):
        DiskReader(folder, copy.manifest)
    damaged.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        DiskReader(folder, copy.manifest)
