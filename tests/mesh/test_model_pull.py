"""Models of the mesh on their way to a machine: pulls, and workers that serve them."""

import asyncio
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.mesh import Mesh
from support.nats import NatsServer
from support.tiny import tiny_model
from support.wait import PATIENCE_S, eventually
from support.weights import CHUNK, Agents, make_weights, stored_copy

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Instance, MessageDecoder
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.demo import model_dir
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.errors import ModelStoreError, WeightsLost
from kvmesh.weights.frames import WeightsTaken
from kvmesh.weights.models.cache import ModelCache
from kvmesh.weights.models.folder import folder_content
from kvmesh.weights.models.pull import ModelPull, PullReport, other_folder
from kvmesh.weights.models.push import ModelPush, PushReport
from kvmesh.weights.models.store import ModelStore
from kvmesh.weights.process.search import offered

LIMITS = StreamLimits(models_bytes=64 << 20)
START_S = 180.0  # of torch on a busy machine
CARDS = MessageDecoder(Instance)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    shutil.copytree(model_dir(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return make_weights(folder, size=500_000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ModelCache(None, 64 << 20)


@pytest.fixture
def mesh(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> Iterator[Mesh]:
    env = {
        "KVMESH_WEIGHTS_DIRECTORY": str(tmp_path / "store"),
        "KVMESH_STREAMS_MODELS_BYTES": str(64 << 20),
    }
    mesh = Mesh(nats_server.url, tmp_path, env, bus.options.namespace)
    yield mesh
    mesh.stop()


async def push(bus: Bus, folder: Path, name: str = "m") -> PushReport:
    content = folder_content(folder, name, chunk_bytes=CHUNK)
    return await ModelPush(bus, folder, content, name).run(LIMITS)


async def pull(bus: Bus, pushed: PushReport, folder: Path) -> PullReport:
    entry = pushed.entry
    manifest = await ModelStore(bus).manifest(entry.digest)
    return await ModelPull(bus, entry, manifest, 4).everything(other_folder(folder))


def same(one: Path, other: Path) -> bool:
    """True if two folders have the same files."""
    names = [{path.name for path in each.iterdir()} for each in (one, other)]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names[0]
    )


async def test_a_pulled_folder_is_the_pushed_one(bus: Bus, model: Path, tmp_path: Path) -> None:
    pushed, folder = await push(bus, model), tmp_path / "pulled"
    report = await pull(bus, pushed, folder)
    assert same(model, folder)
    assert dict(report.sources) == {"store": pushed.entry.size}
    again = await pull(bus, pushed, folder)
    assert not again.sources
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelStoreError, match="is another file"):
        await pull(bus, pushed, folder)
    (folder / "config.json").unlink()
    weights = next(folder.glob("*.safetensors"))
    weights.unlink()
    third = await pull(bus, pushed, folder)
    assert same(model, folder)
    lost = weights.stat().st_size + (folder / "config.json").stat().st_size
    assert dict(third.sources) == {"store": lost}


async def test_weights_come_from_workers_that_have_them(
    bus: Bus, model: Path, tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine stalls the worker, whose process is niced
    monkeypatch.setattr("kvmesh.weights.stream.source._STALLED_S", PATIENCE_S)
    pushed = await push(bus, model)
    manifest = checkpoint_manifest(model, chunk_bytes=CHUNK)
    stored_copy(agents.directory("a"), model, manifest)
    agent = await agents.start("a", digest=manifest.digest)
    await eventually(lambda: agent.digest, what="the worker offers its copy")
    report = await pull(bus, pushed, tmp_path / "pulled")
    assert report.sources[agent.job.instance] == manifest.size
    assert report.sources["store"] == pushed.entry.size - manifest.size


PULLER = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from kvmesh.bus.client import Bus, BusOptions
    from kvmesh.weights.models import pull as pulling
    from kvmesh.weights.models.catalog import find_model
    from kvmesh.weights.models.pull import ModelPull, other_folder
    from kvmesh.weights.models.reference import parse_reference
    from kvmesh.weights.models.store import ModelStore

    pulling.LOOK_S = 0.001

    async def main(url, namespace, folder):
        bus = await Bus.connect(BusOptions(url=url, namespace=namespace), "puller")
        entry = await find_model(bus, parse_reference("m"))
        pull = ModelPull(bus, entry, await ModelStore(bus).manifest(entry.digest), 4)
        def progress(done, total):
            if done * 3 > total:
                os.kill(os.getpid(), signal.SIGKILL)
        pull.report.progress = progress
        await pull.everything(other_folder(Path(folder)))

    asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_pull_goes_on_where_a_killed_one_was_and_trusts_no_chunk(
    bus: Bus, model: Path, tmp_path: Path
) -> None:
    pushed, folder = await push(bus, model), tmp_path / "pulled"
    arguments = [bus.options.url, bus.options.namespace, str(folder)]
    command = [sys.executable, "-c", textwrap.dedent(PULLER), *arguments]
    done = await asyncio.to_thread(subprocess.run, command, check=False)
    assert done.returncode == -signal.SIGKILL
    staged = next((folder / ".kvmesh-pull" / "weights").glob("*/files"))
    first = min(staged.glob("*.safetensors"))
    with first.open("r+b") as file:  # as after a loss of power
        file.write(b"\0" * 8)
    report = await pull(bus, pushed, folder)
    assert same(model, folder)
    assert 0 < report.sources["store"] < pushed.entry.weights_bytes


async def test_two_pulls_at_once_fetch_once(
    bus: Bus, model: Path, tmp_path: Path, cache: ModelCache
) -> None:
    pushed = await push(bus, model)
    entry, manifest = pushed.entry, await ModelStore(bus).manifest(pushed.entry.digest)

    async def pulled() -> PullReport:
        place = cache.use(entry.name, entry.digest, entry.size)
        try:
            return await ModelPull(bus, entry, manifest, 4).everything(place)
        finally:
            place.close()

    reports = await asyncio.gather(pulled(), pulled())
    assert sorted(sum(r.sources.values()) for r in reports) == [0, entry.size]
    [model_here] = cache.list()
    assert model_here.reference == entry.reference
    assert cache.evict(entry.digest)
    assert cache.list() == []


async def test_altered_bytes_in_the_store_are_refused(
    bus: Bus, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.weights.models.pull.PATIENCE_S", 0.5)
    pushed = await push(bus, model)
    store = ModelStore(bus)
    manifest = await store.manifest(pushed.entry.digest)
    index = next(n for n, f in enumerate(manifest.files) if f.name.endswith(".safetensors"))
    number = manifest.file_chunks(index)[1]
    size, name = manifest.chunks[number].size, manifest.chunk_digest(number).hex()
    await store.objects.put(
        name, size, lambda _at, count: bytes(count), await store.objects.find(name)
    )
    with pytest.raises(WeightsLost):
        await pull(bus, pushed, tmp_path / "pulled")
    assert not list((tmp_path / "pulled").glob("*.safetensors"))


async def test_an_agent_takes_a_pinned_model_from_the_store_and_the_next_from_it(
    bus: Bus, model: Path, agents: Agents
) -> None:
    entry = (await push(bus, model)).entry
    first = await agents.start("first", pinned=entry.weights)
    taken = await eventually(lambda: first.event(WeightsTaken), what="the first has the weights")
    assert taken is not None
    assert taken.sources == {"store": entry.weights_bytes}
    assert first.digest == entry.weights
    await eventually(lambda: offered(bus, entry.weights), what="the first offers them")
    second = await agents.start("second", pinned=entry.weights)
    taken = await eventually(lambda: second.event(WeightsTaken), what="the second has them")
    assert taken is not None
    assert taken.sources.keys() <= {first.job.instance, "store"}
    assert taken.sources[first.job.instance] > 0, "the store has what a niced process is late with"


async def test_a_torch_worker_streams_a_model_of_the_mesh(
    mesh: Mesh, bus: Bus, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    entry = (await push(bus, tiny_model(), "tiny")).entry
    engine = {"KVMESH_WORKER_ENGINE": "torch", "KVMESH_WEIGHTS_SHARE": "true"}
    mesh.start("worker", "w-0", KVMESH_WORKER_MODEL="tiny", **engine)
    found = await eventually(lambda: card(bus, "w-0"), START_S, what="the worker serves")
    assert found is not None
    assert found.model is not None
    assert (found.model.revision, found.model.weights) == (entry.digest, entry.weights)
    assert "(store " in mesh.logs()
    files = next((tmp_path / "cache" / "kvmesh" / "models").glob("*/files"))
    assert not list(files.glob("*.safetensors"))


async def card(bus: Bus, name: str) -> Instance | None:
    found = await read_bucket(bus, bus.subjects.instances_bucket, "worker.>")
    return next((c for c in map(CARDS.decode, found.values()) if c.name == name), None)


async def test_a_worker_serves_a_model_of_the_mesh_and_its_card_names_the_digest(
    mesh: Mesh, bus: Bus, model: Path
) -> None:
    done = await mesh.command("model", "push", str(model), "team/m")
    assert done.returncode == 0, done.stderr
    listed = msgspec.json.decode((await mesh.command("model", "list", "--json")).stdout)
    [entry] = listed
    assert (entry["name"], entry["complete"], entry["workers"]) == ("team/m", True, [])
    mesh.start("worker", "w-0", KVMESH_WORKER_MODEL=f"team/m@{entry['digest'][:12]}")
    found = await eventually(lambda: card(bus, "w-0"), what="the worker serves")
    assert found is not None
    assert found.model is not None
    assert (found.model.name, found.model.revision) == ("team/m", entry["digest"])
    listed = msgspec.json.decode((await mesh.command("model", "list", "--json")).stdout)
    assert listed[0]["workers"] == ["w-0"]
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    await mesh.command("model", "push", str(model), "team/m")
    both = await mesh.command("model", "evict", "team/m")
    assert both.returncode == 1
    assert "team/m may be team/m@" in both.stderr
    newest = msgspec.json.decode((await mesh.command("model", "list", "--json")).stdout)[-1]
    assert newest["workers"] == []
    mesh.start("worker", "w-1", KVMESH_WORKER_MODEL="team/m")
    second = await eventually(lambda: card(bus, "w-1"), what="another worker serves")
    assert second is not None
    assert second.model is not None
    assert second.model.revision == entry["digest"]  # that of the first, not the newest
    other = await mesh.command("model", "evict", f"team/m@{newest['digest'][:12]}")
    assert "evicted" in other.stdout
    used = await mesh.command("model", "evict", "team/m", "--local")
    assert "a process uses team/m@" in used.stderr
    gone = await mesh.command("model", "evict", "team/m")
    assert "evicted team/m@" in gone.stdout
    assert "no models" in (await mesh.command("model", "list")).stdout
    missing = await mesh.command("worker", KVMESH_WORKER_MODEL="team/m")
    assert missing.returncode == 1
    assert "the mesh has no model team/m" in missing.stderr


@pytest.fixture
def snapshot(model: Path) -> Path:
    """The model as a Hugging Face cache has it, with a named template."""
    folder = model.parent / "models--org--tiny" / "snapshots" / "0123abcd"
    folder.parent.mkdir(parents=True)
    model.rename(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    return folder


@pytest.fixture
def bare(model: Path) -> Path:
    """The model without weights."""
    for path in model.glob("*.safetensors*"):
        path.unlink()
    return model


async def test_a_snapshot_of_a_cache_keeps_its_name_and_templates(
    mesh: Mesh, bus: Bus, snapshot: Path, tmp_path: Path
) -> None:
    done = await mesh.command("model", "push", str(snapshot))
    assert done.stdout.startswith("pushed org/tiny@"), done.stderr
    assert (await mesh.command("model", "list")).stdout.startswith("org/tiny@")
    pulled = await mesh.command("model", "pull", "org/tiny", str(tmp_path / "pulled"))
    assert pulled.returncode == 0, pulled.stderr
    template = tmp_path / "pulled" / "additional_chat_templates" / "tool_use.jinja"
    assert template.read_text() == "t"
    mesh.start("worker", "w-0", KVMESH_WORKER_MODEL=str(snapshot))
    found = await eventually(lambda: card(bus, "w-0"), what="the worker serves")
    assert found is not None
    assert found.model is not None
    assert found.model.name == "org/tiny"


async def test_a_folder_without_weights_is_listed_as_such(mesh: Mesh, bare: Path) -> None:
    done = await mesh.command("model", "push", str(bare), "bare")
    assert "has no weights: only the engines mock and openai serve it" in done.stderr
    assert done.stdout.splitlines()[0].endswith("sent, without weights")
    assert "complete, without weights" in (await mesh.command("model", "list")).stdout
    (bare / "pytorch_model.bin").write_text("x")
    refused = await mesh.command("model", "push", str(bare), "bare")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "has weights only as pytorch_model.bin" in refused.stderr
