"""Code that vLLM has compiled on one worker runs on another one without being compiled again."""

import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import CompiledOffer, Role
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.weights.checkpoint import weight_files

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
START_S = 400
LIMITS = StreamLimits(kv_bytes=256 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
COMPILED = (".so", ".cpp", ".py")  # what the CPU's compiler reads and writes


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A folder of its own, from which weights may be taken away."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


@pytest.fixture
def mesh(nats_server: NatsServer, model: Path, tmp_path: Path) -> Iterator[Mesh]:
    settings = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(model),
        "KVMESH_WORKER_BLOCK_SIZE": "32",
        "KVMESH_VLLM_ARGS": "num_gpu_blocks_override=64,max_model_len=512,max_num_seqs=4",
        "KVMESH_WEIGHTS_SHARE": "true",
        "KVMESH_WEIGHTS_COMPILE_CACHE": "true",
        "KVMESH_WEIGHTS_PATIENCE_S": "1",
        "KVMESH_WEIGHTS_CACHE_WAIT_S": "60",
        "KVMESH_WEIGHTS_DOMAIN_KEY": secrets.token_hex(32),
    }
    mesh = Mesh(nats_server.url, tmp_path, settings | stream_env(LIMITS))
    yield mesh
    mesh.stop()


def start(mesh: Mesh, name: str) -> Path:
    """Start a worker as on a node of its own; returns the folder of its compile caches."""
    folder = mesh.folder / name
    mesh.start(
        "worker",
        name,
        KVMESH_WEIGHTS_DIRECTORY=str(folder / "store"),
        KVMESH_WEIGHTS_CACHE_DIRECTORY=str(folder / "compiled"),
    )
    return folder / "compiled"


def compiled(folder: Path) -> set[str]:
    """The names of compiled files, which follow from their content."""
    return {f.name for f in folder.rglob("*") if f.is_file() and f.name.endswith(COMPILED)}


def take_away_weights(model: Path) -> None:
    """Move the weight files out of their folder; who has opened them keeps them."""
    for file in weight_files(model):
        file.rename(model.parent / file.name)


async def weights_on_card(bus: Bus) -> bool:
    cards = await read_cards(bus, Role.WORKER)
    return any(card.model is not None and card.model.weights for card in cards)


async def offers(bus: Bus, count: int) -> list[CompiledOffer]:
    """Wait until so many workers offer their code."""

    async def found() -> list[CompiledOffer]:
        try:
            offers = [card.compiled for card in await read_cards(bus, Role.WORKER)]
        except BusError:  # while two vLLMs compile, a server may be late
            return []
        made = [offer for offer in offers if offer is not None]
        return made if len(made) == count else []

    return await eventually(found, timeout=START_S, what=f"{count} workers offer their code")


async def test_the_second_worker_compiles_nothing_and_takes_its_weights_from_the_first(
    mesh: Mesh, model: Path
) -> None:
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    first = start(mesh, "first")
    (offer,) = await offers(bus, 1)
    kernels = compiled(first)
    assert any(name.endswith(".so") for name in kernels)
    await eventually(lambda: weights_on_card(bus), what="the first offers its weights")
    take_away_weights(model)
    second = start(mesh, "second")
    assert await offers(bus, 2) == [offer, offer]
    assert compiled(second) == kernels
    log = (mesh.folder / "second.log").read_text()
    assert "came from other workers" in log
    assert re.search(r"weights [0-9a-f]{12}: .* in .* s \(first-", log)
    await bus.close()
