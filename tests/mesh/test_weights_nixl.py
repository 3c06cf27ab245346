"""Weights processes that read each other's memory through NIXL."""

import importlib.util
import signal
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.wait import eventually
from support.weights import CHUNK, Agent, Agents, make_weights, stored_copy

from kvmesh.bus.client import Bus
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.frames import WeightsTaken
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.process.manifests import ManifestStore

HAS_NIXL = importlib.util.find_spec("nixl") is not None
pytestmark = pytest.mark.skipif(not HAS_NIXL, reason="needs the extra: pip install '.[nixl]'")
NIXL = {"KVMESH_TRANSFER_VIA": "nixl"}
RATE = 4_000_000  # bytes/s, so that a transfer takes a while


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_weights(tmp_path / "model", size=1_000_000)


@pytest_asyncio.fixture
async def manifest(bus: Bus, model: Path) -> Manifest:
    manifest = checkpoint_manifest(model, model="m", chunk_bytes=CHUNK)
    await ManifestStore(bus).put(manifest)
    return manifest


async def sources(agents: Agents, model: Path, manifest: Manifest, count: int) -> list[Agent]:
    """Processes that offer a complete copy in their memory, slowly."""
    found = []
    for number in range(count):
        stored_copy(agents.directory(f"s{number}"), model, manifest)
        found.append(
            await agents.start(
                f"s{number}", digest=manifest.digest, env=NIXL, upload_bytes_per_s=RATE
            )
        )
    for agent in found:
        await eventually(partial(_digest, agent), what=f"{agent.job.name} offers its copy")
    await found[0].join()
    return found


def _digest(agent: Agent) -> str:
    return agent.digest


async def taken_by(agent: Agent) -> WeightsTaken:
    taken = await eventually(lambda: agent.event(WeightsTaken), what="a copy is complete")
    assert taken is not None
    return taken


def assert_same(agent: Agent, manifest: Manifest, model: Path) -> None:
    copy = agent.store().open(manifest.digest)
    assert copy is not None
    assert copy.complete
    for file in manifest.files:
        assert (copy.folder / file.name).read_bytes() == (model / file.name).read_bytes()
    copy.close()


async def test_weights_come_through_nixl(agents: Agents, model: Path, manifest: Manifest) -> None:
    await sources(agents, model, manifest, 1)
    target = await agents.start("target", env=NIXL)
    taken = await taken_by(target)
    assert taken.direct == manifest.size
    plain = await agents.start("plain", env={"KVMESH_TRANSFER_VIA": "tcp"})
    assert (await taken_by(plain)).direct == 0
    for agent in (target, plain):
        assert_same(agent, manifest, model)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_that_ends_in_a_transfer_is_left(
    agents: Agents, model: Path, manifest: Manifest, number: signal.Signals
) -> None:
    first, second = await sources(agents, model, manifest, 2)
    target = await agents.start("target", env=NIXL)
    await eventually(lambda: sum(target.counts.taken.values()) > manifest.size // 8)
    first.signal(number)
    taken = await taken_by(target)
    assert taken.direct > manifest.size // 2
    assert taken.sources[second.job.instance] > manifest.size // 2
    assert_same(target, manifest, model)


async def test_wrong_memory_is_refused(agents: Agents, model: Path, manifest: Manifest) -> None:
    stored_copy(agents.directory("liar"), model, manifest, flip=True)
    liar = await agents.start("liar", digest=manifest.digest, env=NIXL)
    await eventually(lambda: liar.digest)
    await liar.join()
    target = await agents.start("target", env=NIXL)
    await eventually(lambda: target.counts.failed.get("corrupt"))
    assert target.event(WeightsTaken) is None
    (honest,) = await sources(agents, model, manifest, 1)
    taken = await taken_by(target)
    assert taken.sources == {honest.job.instance: manifest.size}
    assert_same(target, manifest, model)
