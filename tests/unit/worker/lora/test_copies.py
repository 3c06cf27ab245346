"""Copies of adapters in a store, with an exchange that stands for other nodes."""

import asyncio
import shutil
from pathlib import Path

import pytest
from support.adapter_folder import write_adapter

from kvmesh.bus.messages import adapter_identity
from kvmesh.weights.errors import StoreFull, WeightsLost
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.lora import copies
from kvmesh.worker.lora.copies import AdapterCopies
from kvmesh.worker.lora.folder import AdapterError, AdapterFolder, read_adapter


class Node:
    """A node's store and the copies of its worker; `peers` are those that it takes from."""

    def __init__(self, directory: Path, *peers: "Node", max_bytes: int = 1 << 20) -> None:
        self.directory = directory
        self.peers = peers
        self.max_bytes = max_bytes
        self.served: set[str] = set()
        self.loaded: set[str] = set()
        self.fetches = 0
        self.refused = 0
        self.offered_late = asyncio.Event()
        self.copies = AdapterCopies(self, self.loaded.__contains__, self.on_offered)

    async def on_offered(self) -> None:
        self.offered_late.set()

    def store(self) -> WeightStore:
        return WeightStore(self.directory, self.max_bytes)

    async def fetch(self, digest: str, timeout_s: float) -> StoredCopy:
        self.fetches += 1
        self.served.add(digest)
        await asyncio.sleep(0)
        for peer in self.peers:
            if digest in peer.served and (found := peer.store().open(digest)) is not None:
                scratch = self.store().scratch(found.manifest.size)
                shutil.copytree(found.folder, scratch, dirs_exist_ok=True)
                manifest = found.manifest
                found.close()
                return self.store().adopt(manifest, scratch)
        raise WeightsLost("nobody has it")

    async def offer(self, copy: StoredCopy) -> None:
        if self.refused:
            self.refused -= 1
            raise WeightsLost("JetStream does not reply")
        self.served.add(copy.manifest.digest)

    def withdraw(self, digest: str) -> None:
        self.served.discard(digest)

    async def offers(self, name: str, folder: Path) -> str:
        """Offer an adapter's folder; returns its identity."""
        found = read_adapter(folder)
        identity = adapter_identity(name, found.digest)
        await self.copies.offer(identity, found)
        return identity

    async def takes(self, identity: str, digest: str, within_s: float = 10.0) -> AdapterFolder:
        deadline = asyncio.get_running_loop().time() + within_s
        return await self.copies.take(identity, digest, 0, deadline)


@pytest.fixture
def source(tmp_path: Path) -> Node:
    return Node(tmp_path / "source")


async def test_an_adapter_arrives_with_its_identity_and_without_notes(
    source: Node, tmp_path: Path
) -> None:
    notes = "/home/somebody/base"
    noted = write_adapter(tmp_path / "poet", base_model_name_or_path=notes)
    identity = await source.offers("poet", noted)
    (files,) = source.copies.files
    assert (files.adapter, files.load_s) == (identity, 0.0)
    target = Node(tmp_path / "target", source)
    folder = await target.takes(identity, files.digest)
    assert adapter_identity("poet", folder.digest) == identity
    assert folder.path.is_relative_to(target.directory)
    assert "somebody" not in (folder.path / "adapter_config.json").read_text()
    assert target.copies.files == [files]
    plain = Node(tmp_path / "plain")
    await plain.offers("poet", write_adapter(tmp_path / "plain-folder"))
    assert plain.copies.files == [files], "equal adapters are one copy, whatever their notes"


async def test_many_who_want_one_adapter_fetch_it_once(source: Node, tmp_path: Path) -> None:
    identity = await source.offers("poet", write_adapter(tmp_path / "poet"))
    (files,) = source.copies.files
    target = Node(tmp_path / "target", source)
    taken = await asyncio.gather(*(target.takes(identity, files.digest) for _ in range(4)))
    assert len({folder.path for folder in taken}) == 1
    assert target.fetches == 1


async def test_a_copy_that_was_written_to_is_fetched_again(source: Node, tmp_path: Path) -> None:
    identity = await source.offers("poet", write_adapter(tmp_path / "poet"))
    (files,) = source.copies.files
    target = Node(tmp_path / "target", source)
    folder = await target.takes(identity, files.digest)
    assert await target.takes(identity, files.digest) == folder
    assert target.fetches == 1
    write_adapter(folder.path, 7)
    again = await target.takes(identity, files.digest)
    assert (again.digest, target.fetches) == (folder.digest, 2)
    assert target.served == {files.digest}


async def test_what_is_not_the_adapter_is_refused_and_not_offered(
    source: Node, tmp_path: Path
) -> None:
    await source.offers("poet", write_adapter(tmp_path / "poet"))
    (files,) = source.copies.files
    target = Node(tmp_path / "target", source)
    other = adapter_identity("poet", "0" * 16)
    with pytest.raises(AdapterError, match=f"the copy of {other} holds poet@"):
        await target.takes(other, files.digest)
    with pytest.raises(AdapterError, match="nobody has it"):
        await target.takes(other, "f" * 64)
    assert (target.copies.files, target.served) == ([], set())
    assert target.store().list() == []


async def test_a_late_copy_is_given_up(source: Node, tmp_path: Path) -> None:
    identity = await source.offers("poet", write_adapter(tmp_path / "poet"))
    (files,) = source.copies.files
    target = Node(tmp_path / "target", source)
    with pytest.raises(AdapterError, match="did not arrive in time"):
        await target.takes(identity, files.digest, within_s=-1.0)
    assert target.served == set()


async def test_pickles_and_full_stores_leave_the_adapter_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_adapter(tmp_path / "poet")
    full = Node(tmp_path / "full", max_bytes=10)
    await full.offers("poet", folder)
    assert full.copies.files == []
    assert "exceed weights.max_bytes" in caplog.text
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    node = Node(tmp_path / "node")
    await node.offers("poet", folder)
    assert node.copies.files == []
    assert "only safetensors files travel" in caplog.text
    with pytest.raises(StoreFull):
        full.store().scratch(11)


async def test_what_nobody_could_be_told_of_is_offered_later(
    source: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(copies, "FIRST_DELAY_S", 0.01)
    source.refused = 3
    path = write_adapter(tmp_path / "poet")
    source.loaded.add(identity := adapter_identity("poet", read_adapter(path).digest))
    await source.offers("poet", path)
    assert source.copies.files == []
    shutil.rmtree(path)
    await source.offered_late.wait()
    assert [files.adapter for files in source.copies.files] == [identity]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"adapter {identity} is not offered to other workers yet: JetStream does not reply"
    ]
    await source.copies.close()


async def test_an_adapter_that_is_unloaded_meanwhile_is_not_offered(
    source: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "FIRST_DELAY_S", 0.01)
    source.refused = 1
    await source.offers("poet", write_adapter(tmp_path / "poet"))
    await asyncio.gather(*(t for t in asyncio.all_tasks() if t.get_name() == "offer adapter"))
    assert (source.copies.files, source.served) == ([], set())


async def test_two_names_of_one_content_are_withdrawn_one_by_one(
    source: Node, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "poet")
    for name in ("poet", "bard"):
        await source.offers(name, folder)
    (digest,) = source.served
    assert source.copies.withdraw("poet").startswith("poet@")
    assert source.served == {digest}
    assert source.copies.withdraw("poet") == ""
    source.copies.withdraw("bard")
    assert source.served == set()
    assert source.store().list() == []


async def test_an_older_content_is_offered_no_more_unless_it_is_loaded(
    source: Node, tmp_path: Path
) -> None:
    identities = [
        await source.offers("poet", write_adapter(tmp_path / "poet", content))
        for content in (1, 2, 3)
    ]
    source.loaded.add(identities[0])
    source.copies.supersede(identities[2])
    assert [files.adapter for files in source.copies.files] == [identities[0], identities[2]]


async def test_the_oldest_that_is_not_loaded_leaves_if_there_are_too_many(
    source: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MAX_COPIES", 2)
    names = ("one", "two", "three")
    found = []
    for content, name in enumerate(names, 1):
        found.append(await source.offers(name, write_adapter(tmp_path / name, content)))
        source.loaded.add(found[0])
    assert [files.adapter for files in source.copies.files] == [found[0], found[2]]
