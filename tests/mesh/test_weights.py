"""Weights processes that take weights from each other, on a real NATS server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.wait import eventually
from support.weights import CHUNK, Agent, Agents, make_weights, stored_copy

from kvmesh.bus.client import Bus
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.weights.agent.manifests import ManifestStore
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.frames import WeightsTaken
from kvmesh.weights.manifest import Manifest


@pytest_asyncio.fixture
async def agents(
    bus: Bus, limits: StreamLimits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agents]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    agents = Agents(bus, limits, tmp_path)
    yield agents
    await agents.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_weights(tmp_path / "model", size=1_000_000)


@pytest_asyncio.fixture
async def manifest(bus: Bus, model: Path) -> Manifest:
    """The manifest of the model in small chunks, known to the mesh."""
    manifest = checkpoint_manifest(model, model="m", chunk_bytes=CHUNK)
    await ManifestStore(bus).put(manifest)
    return manifest


async def source(
    agents: Agents, name: str, model: Path, manifest: Manifest, flip: bool = False, **settings: int
) -> Agent:
    """A process that offers a complete copy in its memory."""
    stored_copy(agents.directory(name), model, manifest, flip)
    agent = await agents.start(name, digest=manifest.digest, **settings)
    await eventually(lambda: agent.digest, what=f"{name} offers its copy")
    return agent


def has_copy(agent: Agent, manifest: Manifest, model: Path) -> bool:
    """True if an agent's store holds exactly the model's files."""
    copy = agent.store().open(manifest.digest)
    if copy is None or not copy.complete:
        return False
    same = [
        (copy.folder / f.name).read_bytes() == (model / f.name).read_bytes() for f in manifest.files
    ]
    copy.close()
    return all(same)


async def test_the_second_worker_takes_the_files_of_the_first(agents: Agents, model: Path) -> None:
    first = await agents.start("first", model)
    answer = await eventually(lambda: first.answer)
    assert "tells the digest" in answer.disk
    first.process.engine_runs()
    await eventually(lambda: first.digest)
    await first.join()
    second = await agents.start("second")
    answer = await eventually(lambda: second.answer)
    assert (answer.digest, answer.disk) == (first.digest, "")
    taken = await eventually(lambda: second.event(WeightsTaken))
    assert set(taken.sources) == {first.job.instance}
    manifest = checkpoint_manifest(model)
    assert has_copy(second, manifest, model)
    assert second.digest == first.digest
    await eventually(lambda: first.counts.sent >= manifest.size)
    await eventually(lambda: second.counts.taken == {"peer": manifest.size, "disk": 0})
