"""The weights process of a real worker: what it offers, and what its death means."""

import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.api_server import ApiServer
from support.mesh import Mesh, scrape
from support.nats import NatsServer
from support.wait import eventually
from support.weights import Agents, make_weights, weights_process

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Instance, MessageDecoder
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.demo import model_dir
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.frames import WeightsTaken

CARDS = MessageDecoder(Instance)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    shutil.copytree(model_dir(), folder, ignore=shutil.ignore_patterns("*.py"))
    return make_weights(folder, size=1_000_000)


@pytest.fixture
def mesh(
    nats_server: NatsServer,
    bus: Bus,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Mesh]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    env = {
        "KVMESH_WEIGHTS_SHARE": "true",
        "KVMESH_WEIGHTS_DIRECTORY": str(tmp_path / "store"),
        "KVMESH_WORKER_MODEL": str(model),
    }
    mesh = Mesh(nats_server.url, tmp_path, env, bus.options.namespace)
    yield mesh
    mesh.stop()


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    """An inference server, which a sidecar connects to the mesh."""
    made = ApiServer(tmp_path, "vllm")
    await made.start()
    yield made
    await made.close()


async def digest_on_card(bus: Bus) -> str:
    found = await read_bucket(bus, bus.subjects.instances_bucket, "worker.>")
    cards = [CARDS.decode(data) for data in found.values()]
    return next((card.model.weights for card in cards if card.model is not None), "")


async def test_a_sidecar_offers_the_files_of_its_folder(
    mesh: Mesh, bus: Bus, agents: Agents, model: Path, server: ApiServer
) -> None:
    mesh.start(
        "worker",
        "sidecar",
        KVMESH_WORKER_ENGINE="openai",
        KVMESH_REMOTE_URL=server.url,
        KVMESH_REMOTE_KV_EVENTS=server.publisher.endpoint,
        KVMESH_REMOTE_KV_REPLAY=server.publisher.replay,
    )
    await eventually(lambda: digest_on_card(bus), what="the sidecar's card has the digest")
    target = await agents.start("target")
    taken = await eventually(lambda: target.event(WeightsTaken))
    assert taken is not None
    assert taken.digest == checkpoint_manifest(model).digest


async def test_a_worker_offers_its_files_and_outlives_its_weights_process(
    mesh: Mesh, bus: Bus, agents: Agents, model: Path
) -> None:
    mesh.start("worker", "w-0")
    manifest = checkpoint_manifest(model)
    await eventually(lambda: digest_on_card(bus), what="the card has the digest")
    assert await digest_on_card(bus) == manifest.digest
    target = await agents.start("target")
    taken = await eventually(lambda: target.event(WeightsTaken))
    assert taken is not None
    assert sum(taken.sources.values()) == manifest.size
    sample = 'kvmesh_worker_weights_sent_bytes_total{model="m",worker="w-0"}'

    def sent() -> bool:
        return scrape(mesh.worker_ports["w-0"])[sample] >= manifest.size

    await eventually(sent, what="the worker counts what was sent")
    stored = 'kvmesh_worker_weights_stored_bytes{model="m",worker="w-0"}'
    assert scrape(mesh.worker_ports["w-0"])[stored] == 0, "it serves the files of its folder"
    worker = mesh.processes["w-0"].pid
    former = await eventually(lambda: weights_process(worker))
    os.kill(former, signal.SIGKILL)
    await target.close()
    again = await agents.start("again")
    await eventually(lambda: again.event(WeightsTaken), what="another process offers the files")
    assert "has ended with status -9" in mesh.logs()
    child = weights_process(worker)
    assert child
    mesh.kill("w-0")
    await eventually(lambda: not Path(f"/proc/{child}").exists(), what="it ends with its worker")
