"""Whole models in the mesh's store, on a real NATS server: push, eviction, and their races."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.nats import NatsServer
from support.wait import eventually
from support.weights import CHUNK, make_weights

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import Conflict, NotFound
from kvmesh.bus.storage import object_bucket
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.storage.stored_object import StoredObject
from kvmesh.bus.streams.configuration import StreamLimits, ensure_model_store
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.errors import ManifestError, ModelStoreError
from kvmesh.weights.models import evict as eviction
from kvmesh.weights.models.catalog import ModelCatalog, ModelEntry
from kvmesh.weights.models.evict import collect, evict
from kvmesh.weights.models.folder import folder_content
from kvmesh.weights.models.former import remove_former_manifests
from kvmesh.weights.models.push import ModelPush, PushReport
from kvmesh.weights.models.reference import parse_reference
from kvmesh.weights.models.store import ModelStore, chunk_names
from kvmesh.weights.process.manifests import ManifestStore

LIMITS = StreamLimits(models_bytes=64 << 20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_weights(tmp_path / "model", size=300_000)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


async def push(bus: Bus, folder: Path, name: str = "m") -> PushReport:
    content = folder_content(folder, name, chunk_bytes=CHUNK)
    return await ModelPush(bus, folder, content, name).run(LIMITS)


async def is_whole(bus: Bus, entry: ModelEntry, folder: Path) -> bool:
    """True if the store has every byte of a folder."""
    store = ModelStore(bus)
    manifest = await store.manifest(entry.digest)
    for number, (index, offset, size) in enumerate(manifest.chunks):
        target = bytearray(size)
        await store.chunk(manifest.chunk_digest(number), memoryview(target))
        data = (folder / manifest.files[index].name).read_bytes()
        if data[offset : offset + size] != target:
            return False
    return True


async def objects(bus: Bus) -> set[str]:
    return set(await ModelStore(bus).objects.complete())


async def test_a_pushed_model_is_whole_and_a_second_push_sends_nothing(
    bus: Bus, model: Path
) -> None:
    report = await push(bus, model)
    assert report.kept == 0
    assert report.sent > 20
    [entry] = await ModelCatalog(bus).entries()
    assert (entry.name, entry.complete, entry.digest) == ("m", True, report.entry.digest)
    assert entry.weights == checkpoint_manifest(model, chunk_bytes=CHUNK).digest
    assert (await ManifestStore(bus).get(entry.weights)).digest == entry.weights
    assert await is_whole(bus, entry, model)
    again = await push(bus, model)
    assert (again.sent, again.kept) == (0, report.sent)


async def test_revisions_share_chunks_and_an_eviction_leaves_those_of_others(
    bus: Bus, model: Path
) -> None:
    first = (await push(bus, model)).entry
    (model / "config.json").write_text('{"model_type": "other"}')
    second = await push(bus, model)
    assert second.sent == 1
    catalog = ModelCatalog(bus)
    assert (await catalog.newest(parse_reference("m"))).digest == second.entry.digest
    assert (await catalog.newest(parse_reference(first.reference))).digest == first.digest
    report = await evict(bus, first)
    assert report.objects == 2  # its manifest, and its config.json
    assert await is_whole(bus, second.entry, model)
    with pytest.raises(ModelStoreError, match="but not m@"):
        await catalog.newest(parse_reference(first.reference))
    await evict(bus, second.entry)
    assert await objects(bus) == set()
    assert (await ModelStore(bus).objects.usage())[0] == 0


async def test_a_full_store_refuses_a_model_and_keeps_the_others(
    bus: Bus, model: Path, tmp_path: Path
) -> None:
    small = StreamLimits(models_bytes=4 << 20)
    content = folder_content(model, "m", chunk_bytes=CHUNK)
    entry = (await ModelPush(bus, model, content, "m").run(small)).entry
    other = make_weights(tmp_path / "other", files=1, size=500_000)
    content = folder_content(other, "other", chunk_bytes=CHUNK)
    with pytest.raises(ModelStoreError, match="do not fit into the model store"):
        await ModelPush(bus, other, content, "other").run(small)
    assert [e.name for e in await ModelCatalog(bus).entries()] == ["m"]
    blind = ModelPush(bus, other, content, "other")
    blind._require_room = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    with pytest.raises(ModelStoreError, match="the model store is full"):
        await blind.run(small)
    assert await is_whole(bus, entry, model)
    [_, unfinished] = await ModelCatalog(bus).entries()
    assert not unfinished.complete
    with pytest.raises(ModelStoreError, match="incomplete"):
        await ModelCatalog(bus).newest(parse_reference("other"))
    await evict(bus, unfinished)
    assert await is_whole(bus, entry, model)


PUSHER = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from kvmesh.bus.client import Bus, BusOptions
    from kvmesh.bus.streams.configuration import StreamLimits
    from kvmesh.weights.models.folder import folder_content
    from kvmesh.weights.models.push import ModelPush

    async def main(url, namespace, folder, number):
        bus = await Bus.connect(BusOptions(url=url, namespace=namespace), "pusher")
        content = folder_content(Path(folder), "m", chunk_bytes=64 << 10)
        push = ModelPush(bus, Path(folder), content, "m")
        def progress(done, total):
            if done * 2 > total:
                os.kill(os.getpid(), int(number))
        push.report.progress = progress
        await push.run(StreamLimits(models_bytes=64 << 20))
        await bus.close()

    asyncio.run(main(*sys.argv[1:]))
"""


def pusher(bus: Bus, folder: Path, number: int) -> "subprocess.Popen[bytes]":
    """A process that pushes half of a model, then sends itself a signal."""
    code = textwrap.dedent(PUSHER)
    arguments = [bus.options.url, bus.options.namespace, str(folder), str(number)]
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


async def test_a_push_goes_on_where_a_killed_one_was(
    bus: Bus, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = pusher(bus, model, signal.SIGKILL)
    assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
    [entry] = await ModelCatalog(bus).entries()
    assert not entry.complete
    await collect(bus)  # takes nothing from a push that has not ended
    report = await push(bus, model)
    assert report.kept > 5
    assert report.sent > 5
    assert await is_whole(bus, entry, model)
    monkeypatch.setattr(object_bucket, "ABANDONED_S", -1.0)
    await evict(bus, report.entry)
    assert (await ModelStore(bus).objects.usage())[0] == 0  # also what the killed one had not ended


async def test_a_frozen_push_notices_the_eviction_of_its_model(bus: Bus, model: Path) -> None:
    process = pusher(bus, model, signal.SIGSTOP)
    await eventually(
        lambda: b"T (stopped)" in Path(f"/proc/{process.pid}/status").read_bytes(),
        what="the push stands still",
    )
    [entry] = await ModelCatalog(bus).entries()
    await evict(bus, entry)
    assert await objects(bus) == set()
    os.kill(process.pid, signal.SIGCONT)
    stopped = b"T (stopped)"

    def ended() -> bool:
        if process.poll() is None and stopped in Path(f"/proc/{process.pid}/status").read_bytes():
            os.kill(process.pid, signal.SIGCONT)
        return process.poll() is not None

    await eventually(ended, what="the push ends")
    assert process.returncode == 1
    assert await ModelCatalog(bus).entries() == []


async def test_an_eviction_that_stood_still_takes_nothing_from_a_push(
    bus: Bus, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = (await push(bus, model)).entry
    listed, goes_on = asyncio.Event(), asyncio.Event()
    manifests = eviction._manifests

    async def frozen(store: ModelStore, entries: list[ModelEntry]) -> object:
        found = await manifests(store, entries)
        listed.set()
        await goes_on.wait()
        return found

    monkeypatch.setattr(eviction, "_manifests", frozen)
    evicting = asyncio.create_task(evict(bus, entry))
    await listed.wait()
    report = await push(bus, model)
    assert report.kept > 0
    goes_on.set()
    assert (await evicting).objects == 0
    assert await is_whole(bus, report.entry, model)


async def test_pushes_and_evictions_at_once_leave_a_whole_model(bus: Bus, model: Path) -> None:
    await ensure_model_store(bus, LIMITS)

    async def pushed() -> None:
        for _ in range(3):
            try:
                await push(bus, model)
            except ModelStoreError as error:
                assert "evicted" in str(error) or "other processes" in str(error)  # noqa: PT017

    async def evicted() -> None:
        for _ in range(3):
            for entry in await ModelCatalog(bus).entries():
                await evict(bus, entry)

    await asyncio.gather(pushed(), pushed(), evicted())
    report = await push(bus, model)
    assert await is_whole(bus, report.entry, model)
    await evict(bus, report.entry)
    assert await objects(bus) == set()


async def test_a_push_outlives_a_restart_of_nats(
    bus: Bus, nats_server: NatsServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, count = ObjectBucket.put, 0

    async def put_around_restart(*arguments: Any) -> StoredObject:
        nonlocal count
        count += 1
        if count == 12:
            await asyncio.to_thread(nats_server.restart)
        return await put(*arguments)

    monkeypatch.setattr(ObjectBucket, "put", put_around_restart)
    monkeypatch.setattr(object_bucket, "API_S", 2.0)
    report = await push(bus, model)
    assert count > 12
    assert await is_whole(bus, report.entry, model)


async def test_a_damaged_chunk_is_sent_again(bus: Bus, model: Path) -> None:
    report = await push(bus, model)
    store = ModelStore(bus)
    name = chunk_names(await store.manifest(report.entry.digest))[0]
    damaged = await store.objects.find(name)
    await bus.js.purge_stream(
        f"OBJ_{bus.subjects.model_store_bucket}",
        subject=f"$O.{bus.subjects.model_store_bucket}.C.{damaged.nuid}",
    )
    again = await push(bus, model)
    assert again.sent == 1
    assert await is_whole(bus, report.entry, model)


async def test_an_object_is_replaced_and_removed_only_in_the_known_version(bus: Bus) -> None:
    await ensure_model_store(bus, LIMITS)
    bucket = ModelStore(bus).objects
    data = os.urandom(1_300_000)
    obj = await bucket.put("a", len(data), lambda at, n: data[at : at + n])
    with pytest.raises(Conflict):
        await bucket.put("a", 1, lambda at, n: b"x")
    newer = await bucket.touch(obj)
    assert not await bucket.remove(obj)
    with pytest.raises((Conflict, NotFound)):
        await bucket.touch(obj)
    found = bytearray(len(data))
    await bucket.read(newer, memoryview(found))
    assert found == data
    standard = await bus.js.object_store(bus.subjects.model_store_bucket)
    assert (await standard.get("a")).data == data
    assert await bucket.remove(newer)
    with pytest.raises(NotFound):
        await bucket.find("a")


async def test_manifests_of_former_weights_are_removed(bus: Bus, model: Path) -> None:
    manifests = ManifestStore(bus)
    former = checkpoint_manifest(model, chunk_bytes=32 << 10)
    await manifests.put(former)
    entry = (await push(bus, model)).entry
    assert await remove_former_manifests(bus) == 0  # within the grace
    assert await remove_former_manifests(bus, grace_s=-1.0) == 1
    with pytest.raises(ManifestError):
        await manifests.get(former.digest)
    await manifests.get(entry.weights)
