"""The compile cache of a worker: from its disk, from others, and offered to them."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmesh.bus.messages import CompiledOffer, Instance, Role, StartSource
from kvmesh.settings.schema import WeightsSettings
from kvmesh.weights.errors import WeightsLost
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.compiled.cache import VARIABLES, CompileCache
from kvmesh.worker.compiled.environment import CompileEnvironment

KEY = b"k" * 32
ENVIRONMENT = CompileEnvironment({"python": "3.11"})
KERNEL = "torch_compile_cache/aot/kernel.so"


class Node:
    """A node with its own disk and store, on a mesh of nodes in one process."""

    def __init__(self, folder: Path, peers: "list[Node]", key: bytes = KEY) -> None:
        self.settings = WeightsSettings(
            directory=folder / "store", cache_directory=folder / "compiled", max_bytes=1 << 26
        )
        self.peers, self.key = peers, key
        self.offered: dict[str, StoredCopy] = {}
        self.card: CompiledOffer | None = None
        self.fetches: list[str] = []

    def cache(self, environment: CompileEnvironment = ENVIRONMENT) -> CompileCache:
        return CompileCache(self.settings, "vllm", environment, self.cards, self, self.key)

    async def cards(self) -> list[Instance]:
        return [
            Instance(
                instance=f"w{number}",
                role=Role.WORKER,
                name=f"w{number}",
                version="",
                started=number,
                compiled=peer.card,
            )
            for number, peer in enumerate(self.peers)
        ]

    async def offer(self, copy: StoredCopy) -> None:
        held = WeightStore(self.settings.directory, 1 << 26).open(copy.manifest.digest)
        assert held is not None
        self.offered[copy.manifest.digest] = held

    async def fetch(self, digest: str, timeout_s: float) -> StoredCopy:
        self.fetches.append(digest)
        for peer in self.peers:
            if digest in peer.offered:
                return self._copied(peer.offered[digest])
        raise WeightsLost(f"no source in {timeout_s:g} s")

    def _copied(self, source: StoredCopy) -> StoredCopy:
        copy = WeightStore(self.settings.directory, 1 << 26).create(source.manifest)
        for chunk in range(len(source.manifest.chunks)):
            copy.mark(chunk)
        copy.file(0, writable=True)[:] = source.file(0)[:]
        return copy


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    nodes: list[Node] = []
    nodes += [Node(tmp_path / name, nodes) for name in "abc"]
    return nodes


def compile_into_root(content: bytes = b"code", name: str = KERNEL) -> Path:
    """Write a file as an engine does that compiles."""
    file = Path(os.environ["VLLM_CACHE_ROOT"], name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def kernel() -> bytes | None:
    """The code that the engine finds."""
    file = Path(os.environ["VLLM_CACHE_ROOT"], KERNEL)
    return file.read_bytes() if file.exists() else None


async def run(node: Node, *new: str) -> CompileCache:
    """One start: the engine compiles the files `new`, and the cache is offered."""
    cache = node.cache()
    await cache.open()
    for name in new:
        compile_into_root(name=name)
    cache.engine_runs()
    node.card = await cache.offer()
    return cache


async def test_the_second_start_finds_the_code_on_its_disk(nodes: list[Node]) -> None:
    node = nodes[0]
    first = await run(node, KERNEL)
    assert first.source == StartSource("code", "compiled")
    await first.close()
    assert not [name for name in VARIABLES if name in os.environ]
    node.card = None
    cache = node.cache()
    await cache.open()
    assert kernel() == b"code"
    assert not cache.fetched
    assert cache.source == StartSource("code", "disk", len(b"code"))
    await cache.close()


async def test_code_comes_from_another_worker_and_is_offered_again(nodes: list[Node]) -> None:
    first = await run(nodes[0], KERNEL)
    await first.close()
    second = await run(nodes[1])
    assert nodes[0].card is not None
    assert second.fetched == nodes[0].card.archive
    assert second.source == StartSource("code", "workers", len(b"code"))
    assert kernel() == b"code"
    assert nodes[1].card == nodes[0].card
    await second.close()
    nodes[0].card = None
    third = await run(nodes[2])
    assert third.fetched == second.fetched
    await third.close()


async def test_code_that_was_missing_makes_a_new_archive(nodes: list[Node]) -> None:
    await (await run(nodes[0], KERNEL)).close()
    second = await run(nodes[1], "torch_compile_cache/aot/other.so")
    assert nodes[1].card is not None
    assert nodes[0].card is not None
    assert nodes[1].card.archive != nodes[0].card.archive
    assert nodes[1].card.environment == nodes[0].card.environment
    await second.close()


async def test_other_environments_and_domains_get_nothing(
    nodes: list[Node], tmp_path: Path
) -> None:
    await (await run(nodes[0], KERNEL)).close()
    other = nodes[1].cache(CompileEnvironment({"python": "3.12"}))
    await other.open()
    assert not nodes[1].fetches
    assert not other.fetched
    await other.close()
    stranger = Node(tmp_path / "stranger", nodes, b"s" * 32)
    cache = stranger.cache()
    await cache.open()
    assert not stranger.fetches
    await cache.close()


async def test_a_card_without_the_domains_proof_is_ignored(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    await (await run(nodes[0], KERNEL)).close()
    assert nodes[0].card is not None
    nodes[0].card = replace(nodes[0].card, mac="0" * 64)
    cache = await run(nodes[1])
    assert not nodes[1].fetches
    assert "not of this domain" in caplog.text
    await cache.close()


async def test_a_source_that_is_gone_costs_a_compilation(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    await (await run(nodes[0], KERNEL)).close()
    nodes[0].offered.clear()
    cache = await run(nodes[1], KERNEL)
    assert len(nodes[1].fetches) == 1
    assert not cache.fetched
    assert "no source in" in caplog.text
    await cache.close()


async def test_damaged_code_is_not_unpacked(
    nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    first = await run(nodes[0], KERNEL)
    await first.close()
    for copy in nodes[0].offered.values():
        copy.file(0, writable=True)[600:700] = b"x" * 100
    cache = await run(nodes[1])
    assert not cache.fetched
    assert kernel() is None
    assert "damaged" in caplog.text
    await cache.close()


async def test_code_with_which_the_engine_fails_is_not_taken_again(nodes: list[Node]) -> None:
    await (await run(nodes[0], KERNEL)).close()
    cache = nodes[1].cache()
    await cache.open()
    assert cache.fetched
    await cache.close(failed=True)
    again = nodes[1].cache()
    await again.open()
    assert not again.fetched
    assert len(nodes[1].fetches) == 1
    await again.close()


async def test_without_a_key_no_code_travels(nodes: list[Node], tmp_path: Path) -> None:
    keyless = Node(tmp_path / "keyless", nodes, b"")
    cache = await run(keyless, KERNEL)
    assert keyless.card is None
    assert not keyless.offered
    await cache.close()


async def test_folders_of_the_user_are_left_alone(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "mine"))
    cache = await run(nodes[0], KERNEL)
    assert nodes[0].card is None
    assert "TRITON_CACHE_DIR" not in os.environ
    await cache.close()
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "mine")


async def test_a_disk_that_cannot_be_used_costs_a_compilation(
    nodes: list[Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    nodes[0].settings = replace(nodes[0].settings, cache_directory=tmp_path / "file")
    cache = nodes[0].cache()
    await cache.open()
    assert await cache.offer() is None
    assert "starts without a compile cache" in caplog.text
    await cache.close()
