"""Weights processes that take weights from each other, on a real NATS server."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.wait import eventually
from support.weights import CHUNK, Agent, Agents, make_weights, stored_copy

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import MessageDecoder, WeightOffer, WeightQuery
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import TransferError, Transport
from kvmesh.transfer.channel import Descriptor, TransferReply, encode_message
from kvmesh.weights.answer import WeightsAnswer
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.client import MOST_UNREAD
from kvmesh.weights.frames import ServingReport, WeightsTaken
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.process.main import KV_S, LEAST_RATE
from kvmesh.weights.process.manifests import ManifestStore
from kvmesh.weights.process.offers import Offers
from kvmesh.weights.process.readers import SourceReader
from kvmesh.weights.process.staging import ChunkBuffers
from kvmesh.weights.store import WeightStore

NICED_S = 180.0  # for processes that yield to all others of a busy machine


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
    agents: Agents,
    name: str,
    model: Path,
    manifest: Manifest,
    flip: bool = False,
    **settings: Any,
) -> Agent:
    """A process that offers a complete copy in its memory."""
    stored_copy(agents.directory(name), model, manifest, flip)
    agent = await agents.start(name, digest=manifest.digest, **settings)
    await eventually(lambda: agent.digest, what=f"{name} offers its copy")
    return agent


async def answered(agent: Agent) -> WeightsAnswer:
    answer = await eventually(lambda: agent.answer, what=f"{agent.job.name} has answered")
    assert answer is not None
    return answer


async def sources_of(agent: Agent) -> dict[str, int]:
    """The bytes by source of a copy, once it is complete."""
    taken = await eventually(lambda: agent.event(WeightsTaken), NICED_S, what="a copy is complete")
    assert taken is not None
    return taken.sources


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
    assert "tells the digest" in (await answered(first)).disk
    first.process.engine_runs()
    await eventually(lambda: first.digest)
    await first.join()
    second = await agents.start("second")
    answer = await answered(second)
    assert (answer.digest, answer.disk) == (first.digest, "")
    assert set(await sources_of(second)) == {first.job.instance}
    manifest = checkpoint_manifest(model)
    assert has_copy(second, manifest, model)
    await eventually(lambda: second.digest == first.digest)
    await eventually(lambda: first.counts.sent >= manifest.size)
    await eventually(lambda: second.counts.taken == {"peer": manifest.size, "disk": 0})


async def test_workers_that_are_asleep_decide_where_none_serves(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    for digest in (manifest.digest, "0" * 64):  # the first is older
        agent = await source(agents, f"asleep-{digest[:4]}", model, manifest)
        await agent.join(digest=digest, asleep=True)
    target = await agents.start("target")
    await sources_of(target)
    assert has_copy(target, manifest, model)


async def test_a_worker_that_serves_decides_before_those_that_are_asleep(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    serving = await source(agents, "serving", model, manifest)
    asleep = await source(agents, "asleep", model, manifest)
    await asleep.join(digest="0" * 64, asleep=True)
    await serving.join()
    target = await agents.start("target")
    assert (await answered(target)).digest == manifest.digest


async def test_a_worker_of_a_revision_follows_no_card_of_another(
    agents: Agents, model: Path
) -> None:
    first = await agents.start("first", model, revision="v1")
    first.process.engine_runs()
    await eventually(lambda: first.digest)
    await first.join()
    bare: dict[str, Any] = {"wait_s": 0.5}
    other = await agents.start("other", revision="v2", **bare)
    assert "tells the digest" in (await answered(other)).disk
    same = await agents.start("same", revision="v1", **bare)
    assert (await answered(same)).digest == first.digest


async def test_a_kept_copy_brings_its_manifest_back(agents: Agents, bus: Bus, model: Path) -> None:
    manifest = checkpoint_manifest(model, model="m", chunk_bytes=CHUNK)
    stored_copy(agents.directory("a"), model, manifest)
    agent = await agents.start("a", digest=manifest.digest)
    await eventually(lambda: agent.digest, what="its card would name the digest")
    assert (await ManifestStore(bus).get(manifest.digest)).digest == manifest.digest


async def test_chunks_come_from_several_sources(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    rate: dict[str, Any] = {"upload_bytes_per_s": 4_000_000}
    sources = [await source(agents, f"s{n}", model, manifest, **rate) for n in range(3)]
    await sources[0].join()
    target = await agents.start("target")
    found = await sources_of(target)
    assert has_copy(target, manifest, model)
    assert sum(found.values()) == manifest.size
    assert set(found) == {s.job.instance for s in sources}


async def test_a_source_that_is_killed_is_left_in_mid_tensor(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    rate: dict[str, Any] = {"upload_bytes_per_s": 4_000_000}
    sources = [await source(agents, f"s{n}", model, manifest, **rate) for n in range(2)]
    await sources[0].join()
    target = await agents.start("target")
    await eventually(lambda: arrived(target, manifest) > len(manifest.chunks) // 8)
    sources[0].signal(signal.SIGKILL)
    found = await sources_of(target)
    assert has_copy(target, manifest, model)
    assert found[sources[1].job.instance] > manifest.size // 4
    assert sources[0].deaths


async def test_a_frozen_source_is_left(agents: Agents, model: Path, manifest: Manifest) -> None:
    rate: dict[str, Any] = {"upload_bytes_per_s": 4_000_000}
    sources = [await source(agents, f"s{n}", model, manifest, **rate) for n in range(2)]
    await sources[0].join()
    target = await agents.start("target")
    await eventually(lambda: sum(target.counts.taken.values()) > 0)
    sources[0].signal(signal.SIGSTOP)
    found = await sources_of(target)
    assert has_copy(target, manifest, model)
    assert found[sources[1].job.instance] > manifest.size // 4


async def test_wrong_bytes_are_refused(agents: Agents, model: Path, manifest: Manifest) -> None:
    liar = await source(agents, "liar", model, manifest, flip=True)
    await liar.join()
    target = await agents.start("target", wait_s=2)
    await answered(target)
    await eventually(lambda: not target.store().list(), what="the copy is given up")
    await eventually(lambda: target.counts.failed.get("corrupt"))
    assert target.counts.taken["peer"] == 0
    assert target.event(WeightsTaken) is None
    honest = await source(agents, "honest", model, manifest)
    again = await agents.start("again")
    assert await sources_of(again) == {honest.job.instance: manifest.size}
    assert has_copy(again, manifest, model)


async def test_a_stale_digest_is_asked_of_nobody(
    agents: Agents, model: Path, manifest: Manifest, bus: Bus
) -> None:
    stale = await source(agents, "stale", model, manifest)
    await stale.join("0" * 64)
    target = await agents.start("target", model)
    assert "there is no manifest" in (await answered(target)).disk
    assert stale.counts.sent == 0


async def test_a_worker_without_files_waits_for_a_manifest(
    agents: Agents, model: Path, bus: Bus
) -> None:
    manifest = checkpoint_manifest(model, model="m", chunk_bytes=CHUNK)
    first = await source(agents, "first", model, manifest)
    await bus.js.delete_object_store(bus.subjects.model_bucket)
    await first.join()
    hasty = await agents.start("hasty", wait_s=0.5)
    assert "there is no manifest" in (await answered(hasty)).disk
    target = await agents.start("target")
    await ensure_streams(bus, StreamLimits())
    await ManifestStore(bus).put(manifest)
    assert (await answered(target)).digest == manifest.digest


async def test_a_folder_with_other_weights_is_read_itself(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    """Its worker names KV blocks by the folder, and must not compute them with other weights."""
    first = await source(agents, "first", model, manifest)
    await first.join()
    tuned = make_weights(model.parent / "tuned", size=1_000_000)
    file = next(tuned.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[2000] ^= 1
    file.write_bytes(content)
    target = await agents.start("target", tuned)
    assert "has other weights" in (await answered(target)).disk
    larger = make_weights(model.parent / "larger", size=1_000_002)
    target = await agents.start("other", larger)
    assert "has other weights" in (await answered(target)).disk
    assert first.counts.sent == 0


async def test_transfers_of_kv_come_before_weights(
    agents: Agents, tmp_path: Path, bus: Bus
) -> None:
    small = make_weights(tmp_path / "small", size=300_000)
    manifest = checkpoint_manifest(small, model="m", chunk_bytes=CHUNK)
    await ManifestStore(bus).put(manifest)
    only = await source(agents, "only", small, manifest)
    await only.join()
    target = await agents.start("target")

    async def transfer() -> None:
        while True:
            only.process.serving(ServingReport(transfers=True))
            await asyncio.sleep(KV_S / 4)

    transferring = asyncio.create_task(transfer())
    taken = await eventually(lambda: target.event(WeightsTaken), what="a share flows")
    transferring.cancel()
    assert taken is not None
    assert taken.seconds > manifest.size / LEAST_RATE / 2


async def test_without_a_source_the_disk_is_read(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    gone = await agents.start("gone")
    await gone.join(manifest.digest)
    target = await agents.start("target", model, patience_s=0.5)
    assert "no worker offers" in (await answered(target)).disk
    assert target.store().list() == []
    empty = await agents.start("empty", wait_s=0.5)
    assert "no worker offers" in (await answered(empty)).disk


async def test_a_full_store_leads_to_the_disk(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    first = await source(agents, "first", model, manifest)
    await first.join()
    target = await agents.start("target", model, max_bytes=1_000_000)
    assert "max_bytes" in (await answered(target)).disk
    assert target.store().list() == []


async def test_the_nodes_disk_is_a_source_too(agents: Agents, model: Path, bus: Bus) -> None:
    large = make_weights(model.parent / "large", files=3, tensors=2, size=12_000_000)
    manifest = checkpoint_manifest(large, model="m")
    await ManifestStore(bus).put(manifest)
    slow = await source(agents, "slow", large, manifest, upload_bytes_per_s=2_000_000)
    await slow.join()
    target = await agents.start("target", large)
    found = await sources_of(target)
    assert found["disk"] > manifest.size // 2
    assert has_copy(target, manifest, large)
    damaged = make_weights(model.parent / "damaged", files=3, tensors=2, size=12_000_000)
    for file in damaged.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    other = await agents.start("other", damaged, patience_s=60)
    found = await sources_of(other)
    assert has_copy(other, manifest, large)


async def test_a_target_serves_what_it_has_before_it_has_all(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    only = await source(agents, "only", model, manifest, upload_bytes_per_s=2_000_000)
    await only.join()
    one = await agents.start("one")
    other = await agents.start("other")
    found = [await sources_of(one), await sources_of(other)]
    assert has_copy(one, manifest, model)
    assert has_copy(other, manifest, model)
    relayed = found[0].get(other.job.instance, 0) + found[1].get(one.job.instance, 0)
    assert relayed > manifest.size // 4


async def test_a_node_fetches_once_and_another_process_takes_over(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    only = await source(agents, "only", model, manifest, upload_bytes_per_s=2_000_000)
    await only.join()
    one, other = [await agents.start(name, node="n") for name in ("one", "other")]
    for agent in (one, other):
        assert (await answered(agent)).digest == manifest.digest
    reader = other.store().open(manifest.digest)
    assert reader is not None
    await eventually(lambda: one.counts.taken or other.counts.taken)
    if other.counts.taken:
        one, other = other, one
    assert not reader.complete
    one.signal(signal.SIGKILL)
    found = await sources_of(other)
    assert 0 < sum(found.values()) < manifest.size
    assert has_copy(other, manifest, model)
    reader.close()


async def test_another_process_answers_a_loader_that_has_no_folder_to_read(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    first = await source(agents, "first", model, manifest)
    target = await agents.start("target")
    target.signal(signal.SIGKILL)
    await eventually(lambda: target.deaths)
    assert target.answer is None
    await first.join()
    await target.start()
    assert (await answered(target)).digest == manifest.digest
    await sources_of(target)
    assert has_copy(target, manifest, model)


async def test_a_process_before_the_engine_runs_brings_back_a_copy_that_was_answered(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    """Nobody has opened it: its engine is still importing."""
    first = await source(agents, "first", model, manifest)
    await first.join()
    target = await agents.start("target")
    await sources_of(target)
    target.signal(signal.SIGKILL)
    await eventually(lambda: target.deaths)
    await target.start()
    await eventually(lambda: len(target.taken) == 2, what="the copy is there again")
    assert target.taken[1].sources == {}, "the copy that the process has left"
    target.signal(signal.SIGKILL)
    await eventually(lambda: len(target.deaths) == 2)
    assert target.store().evict(manifest.digest)
    await target.start()
    await eventually(lambda: len(target.taken) == 3, what="the copy has been fetched anew")
    assert has_copy(target, manifest, model)


async def test_a_copy_goes_with_its_last_user_unless_it_is_kept(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    first = await source(agents, "first", model, manifest)
    await first.join()
    brief = await agents.start("brief")
    await sources_of(brief)
    reader = brief.store().open(manifest.digest)
    assert reader is not None
    await brief.process.close()
    assert len(brief.store().list()) == 1
    reader.close()
    assert brief.store().list() == []
    keeping = await agents.start("keeping", keep=True)
    await sources_of(keeping)
    await keeping.process.close()
    await eventually(lambda: first.counts.sent >= manifest.size, what="the source tells it")
    await first.close()
    heir = await agents.start("heir", node="keeping")
    assert await sources_of(heir) == {}
    assert (await answered(heir)).digest == manifest.digest
    assert has_copy(heir, manifest, model)


async def test_a_killed_process_leaves_no_copy_for_long(
    agents: Agents, model: Path, manifest: Manifest
) -> None:
    first = await source(agents, "first", model, manifest)
    await first.join()
    killed = await agents.start("killed", node="n")
    await sources_of(killed)
    killed.signal(signal.SIGKILL)
    await eventually(lambda: killed.deaths)
    assert [m.digest for m in killed.store().list()] == [manifest.digest]
    other = await agents.start("other", model, node="n")
    await answered(other)
    await other.process.close()
    await eventually(lambda: killed.store().list() == [])


async def test_a_process_ends_with_its_parent(agents: Agents) -> None:
    agent = await agents.start("orphan")
    process = agent.process._process
    assert process is not None
    pid = process.pid
    assert process.stdin is not None
    process.stdin.close()
    await eventually(lambda: not os.path.exists(f"/proc/{pid}") or process.returncode is not None)


async def test_a_copy_that_is_withdrawn_while_it_arrives_leaves_no_trace(
    agents: Agents, manifest: Manifest, model: Path
) -> None:
    await source(agents, "first", model, manifest, upload_bytes_per_s=300_000)
    target = await agents.start("second")
    wanted = asyncio.create_task(target.process.want_copy(manifest.digest, 60))
    await eventually(lambda: arrived(target, manifest) > 0, what="some of it is there")
    target.process.withdraw_copy(manifest.digest)
    await eventually(lambda: not target.store().list(), what="nothing is left")
    wanted.cancel()
    assert target.deaths == []
    await source(agents, "third", model, manifest)
    await target.process.want_copy(manifest.digest, 60)
    assert has_copy(target, manifest, model)


async def test_several_askers_get_the_answer_of_one_copy(
    agents: Agents, manifest: Manifest, model: Path
) -> None:
    await source(agents, "first", model, manifest)
    target = await agents.start("second")
    await asyncio.gather(*(target.process.want_copy(manifest.digest, 60) for _ in range(3)))
    assert has_copy(target, manifest, model)


async def test_a_frozen_process_is_told_a_bounded_amount(agents: Agents) -> None:
    frozen = await agents.start("frozen")
    frozen.signal(signal.SIGSTOP)
    for _ in range(20_000):
        frozen.process.serving(ServingReport(transfers=True))
    process = frozen.process._process
    assert process is not None
    assert process.stdin is not None
    assert MOST_UNREAD <= process.stdin.transport.get_write_buffer_size() < MOST_UNREAD + 1000
    frozen.signal(signal.SIGCONT)


async def test_files_that_are_offered_stay_open_where_they_are_offered_again(
    bus: Bus, manifest: Manifest, model: Path
) -> None:
    transport = await Transport.open(TransferSettings(via="tcp"))
    offers = Offers(bus, transport, "source", "")
    await offers.add_files(manifest, model)
    decoder, query = MessageDecoder(WeightOffer), WeightQuery(manifest.digest, "q", instance="t")
    offer = await bus.request(bus.subjects.weights(manifest.digest), query, decoder, 10)
    for file in manifest.files:
        (model / file.name).unlink()
    with ThreadPoolExecutor() as pool:
        reader = SourceReader(offer, manifest, pool, ChunkBuffers(CHUNK, transport))
        await reader.read(0, memoryview(bytearray(CHUNK)))
        await offers.add_files(manifest, model)
        await reader.read(1, memoryview(bytearray(CHUNK)))
        reader.close()
    await offers.close()
    await transport.close()


async def test_an_offer_stays_where_its_replacement_fails(
    bus: Bus, manifest: Manifest, model: Path, tmp_path: Path
) -> None:
    transport = await Transport.open(TransferSettings(via="tcp"))
    offers = Offers(bus, transport, "source", "")
    stored_copy(tmp_path / "store", model, manifest)
    copy = WeightStore(tmp_path / "store", 1 << 30).open(manifest.digest)
    assert copy is not None
    await offers.add_copy(copy)
    with pytest.raises(OSError, match="No such file"):
        await offers.add_files(manifest, tmp_path / "nowhere")
    decoder, query = MessageDecoder(WeightOffer), WeightQuery(manifest.digest, "q", instance="t")
    subject = bus.subjects.weights(manifest.digest)
    assert (await bus.request(subject, query, decoder, 10)).complete
    await offers.add_files(manifest, model)
    await offers.remove_copy(manifest.digest)  # which files have replaced
    assert (await bus.request(subject, query, decoder, 10)).complete
    await offers.close()
    copy.close()
    await transport.close()


async def test_a_source_that_permits_more_than_was_asked_is_refused(manifest: Manifest) -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.write(encode_message(TransferReply(agent="x")))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    owner = msgspec.msgpack.encode(Descriptor("127.0.0.1", port, b"t" * 16, True))
    files = [owner] * len(manifest.files)
    offer = WeightOffer("liar", manifest.digest, files, owner, complete=False)
    transport = await Transport.open(TransferSettings(via="tcp"))
    transport._agent = object()  # type: ignore[assignment]
    with ThreadPoolExecutor() as pool:
        reader = SourceReader(offer, manifest, pool, ChunkBuffers(CHUNK, transport))
        with pytest.raises(TransferError, match="not asked for"):
            await reader.have()
        reader.close()
    await transport.close()
    server.close()
    await server.wait_closed()


def arrived(agent: Agent, manifest: Manifest) -> int:
    """The chunks of a copy that an agent's node has."""
    copy = agent.store().open(manifest.digest)
    if copy is None:
        return 0
    found = sum(map(copy.has, range(len(manifest.chunks))))
    copy.close()
    return found
