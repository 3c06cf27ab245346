"""Mock engines share blocks through the kvbm of their node, in modelled time."""

import json
import urllib.request
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace
from support.mesh import Mesh
from support.nats import NatsServer
from support.recorder import Recorder
from support.small_kvbm import SmallKvbm
from support.wait import PATIENCE_S, eventually

from kvmesh.blocks.attachment import ArenaUser, WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear, Computed, Corrupt, KvLayout, Offer, Sampling, Work
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.demo import model_dir
from kvmesh.settings import Settings
from kvmesh.settings.schema import MockSettings
from kvmesh.worker.capabilities import TierCounts, Tiered
from kvmesh.worker.engine import EngineConfigError, EngineContext, create_engine

PROMPT = "one two three four five six seven eight nine ten " * 60


@pytest.fixture
def mesh(nats_server: NatsServer, tmp_path: Path) -> Iterator[Mesh]:
    env = {
        "KVMESH_MOCK_KVBM": "true",
        "KVMESH_MOCK_SPEEDUP": "4",
        "KVMESH_ROUTER_POLICY": "round-robin",
        "KVMESH_KVBM_HOST_BYTES": str(8 << 20),
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


def ask(mesh: Mesh, prompt: str) -> int:
    """Send a prompt; returns the number of its tokens that were cached."""
    body = json.dumps({"model": "kvmesh-demo", "prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{mesh.url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        usage = json.load(answer)["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def logged(mesh: Mesh, name: str, text: str) -> int:
    return (mesh.folder / f"{name}.log").read_text().count(text)


async def test_workers_share_blocks_and_outlive_the_kvbm(mesh: Mesh) -> None:
    mesh.start("kvbm", "kvbm-0")
    mesh.start_all(2)
    await mesh.ready()
    await eventually(lambda: logged(mesh, "kvbm-0", " attached") == 2, what="workers attach")
    assert ask(mesh, PROMPT) == 0
    written = "kvmesh_worker_write_through_blocks_total"
    await eventually(lambda: mesh.metric(written) > 20, what="blocks are written through")
    cached = ask(mesh, PROMPT)
    assert cached > 0
    onboarded = "kvmesh_worker_onboarded_blocks_total"
    await eventually(lambda: mesh.metric(onboarded) * 16 == cached, what="the other one loads")
    mesh.kill("kvbm-0")
    assert [ask(mesh, PROMPT) for _ in range(2)] == [cached, cached]
    assert ask(mesh, f"other {PROMPT}") == 0
    assert mesh.metric("kvmesh_worker_corrupt_blocks_total") == 0


class MockHost:
    """One mock engine on a node with a small block manager, driven directly.

    It is slow enough to load a prompt before it has computed it.
    """

    def __init__(self, bus: Bus, limits: StreamLimits, name: str, **mock: object) -> None:
        def connect(layout: KvLayout, user: ArenaUser) -> KvbmClient:
            identity = WorkerIdentity(node="here", instance=name, model="m", layout=layout)
            self.client = KvbmClient(bus, limits, identity, user)
            return self.client

        fields = {"kvbm": True, "speedup": 1.0, "blocks": 64, **mock}
        settings = Settings(mock=MockSettings(**fields))  # type: ignore[arg-type]
        self.engine = create_engine(EngineContext(settings, model_dir(), connect))
        self.sink = Recorder()

    async def start(self) -> None:
        await self.engine.start(self.sink)
        await eventually(lambda: self.client.key is not None, what="attached")

    async def run(self, work: Work) -> list[int]:
        """Run a request to its end; returns its cached tokens by tier."""
        self.engine.submit(work)
        await eventually(lambda: self.finished(work.request), what="the request ends")
        return next(d.cached for d in self.sink.deltas[work.request] if d.cached is not None)

    def finished(self, request: str) -> bool:
        return any(delta.finish for delta in self.sink.deltas.get(request, ()))

    @property
    def counts(self) -> TierCounts:
        assert isinstance(self.engine, Tiered)
        found = self.engine.tier_counts()
        assert found is not None
        return found


@pytest_asyncio.fixture
async def kvbm(bus: Bus, limits: StreamLimits, tmp_path: Path) -> AsyncIterator[SmallKvbm]:
    kvbm = SmallKvbm(bus, limits, tmp_path)
    await kvbm.start()
    yield kvbm
    await kvbm.stop()


@pytest_asyncio.fixture
async def host(kvbm: SmallKvbm, bus: Bus, limits: StreamLimits) -> AsyncIterator[MockHost]:
    host = MockHost(bus, limits, "w")
    await host.start()
    yield host
    await host.engine.close()


TOKENS = list(range(1000, 1100))


def make_work(name: str, tokens: list[int], tenant: str = "") -> Work:
    return Work(
        request=name,
        frontend="f",
        tokens=array("I", tokens).tobytes(),
        sampling=Sampling(max_tokens=4, ignore_eos=True),
        tenant=tenant,
    )


async def test_evicted_blocks_come_back(kvbm: SmallKvbm, host: MockHost) -> None:
    assert await host.run(make_work("first", TOKENS)) == [0]
    await eventually(lambda: len(kvbm.blocks) == 6)
    await host.engine.clear(Clear())
    assert await host.run(make_work("again", TOKENS)) == [0, 96]
    assert host.counts.loaded == [0, 6, 0, 0]
    assert (host.counts.written, host.counts.corrupt) == (6, 0)
    await eventually(lambda: not kvbm.tickets, what="tickets are returned")
    await eventually(lambda: kvbm.count(Computed) >= 2)


async def test_blocks_of_an_ephemeral_request_are_loaded_but_not_written(
    kvbm: SmallKvbm, host: MockHost
) -> None:
    await host.run(replace(make_work("passing", TOKENS), ephemeral=True))
    await eventually(lambda: kvbm.count(Computed) == 1)
    assert not kvbm.count(Offer)
    await host.run(make_work("lasting", TOKENS))
    await eventually(lambda: len(kvbm.blocks) == 6)
    await host.engine.clear(Clear())
    again = replace(make_work("again", [*TOKENS, *range(64)]), ephemeral=True)
    assert await host.run(again) == [0, 96]
    await eventually(lambda: kvbm.count(Computed) == 3)
    assert len(kvbm.blocks) == 6


async def test_a_block_with_other_content_is_computed(kvbm: SmallKvbm, host: MockHost) -> None:
    await host.run(make_work("first", TOKENS))
    await eventually(lambda: len(kvbm.blocks) == 6)
    third = list(kvbm.blocks.values())[2]
    with kvbm.arena.open("r+b") as arena:
        arena.seek(third[0])
        arena.write(b"damage")
    await host.engine.clear(Clear())
    cached = await host.run(make_work("again", TOKENS))
    assert cached in ([0, 16], [0, 48])  # the blocks behind it, or those in the same part
    assert host.counts.corrupt == 1
    await eventually(lambda: kvbm.count(Corrupt) == 1)


async def test_blocks_beyond_the_arena_are_computed(
    kvbm: SmallKvbm, host: MockHost, caplog: pytest.LogCaptureFixture
) -> None:
    await host.run(make_work("first", TOKENS))
    await eventually(lambda: len(kvbm.blocks) == 6)
    for digest, (_, checksum) in list(kvbm.blocks.items()):
        kvbm.blocks[digest] = (kvbm.arena.stat().st_size, checksum)
    await host.engine.clear(Clear())
    assert await host.run(make_work("again", TOKENS)) == [0]
    assert caplog.text.count("request again: cannot copy blocks") == 1


async def test_an_abort_ends_a_load(kvbm: SmallKvbm, bus: Bus, limits: StreamLimits) -> None:
    host = MockHost(bus, limits, "slow", host_bytes_per_s=3e9, speedup=0.01)
    await host.start()
    try:
        await host.run(make_work("first", TOKENS))
        await eventually(lambda: len(kvbm.blocks) == 6)
        await host.engine.clear(Clear())
        host.engine.submit(make_work("again", TOKENS))
        await eventually(lambda: bool(kvbm.tickets), what="the load has begun")
        host.engine.abort("again")
        assert await host.run(make_work("other", TOKENS[50:])) == [0]
        await eventually(lambda: not kvbm.tickets, what="tickets are returned")
    finally:
        await host.engine.close()


async def test_tenants_share_no_blocks(kvbm: SmallKvbm, host: MockHost) -> None:
    await host.run(make_work("first", TOKENS, tenant="a"))
    await eventually(lambda: len(kvbm.blocks) == 6)
    await host.engine.clear(Clear())
    assert await host.run(make_work("other", TOKENS, tenant="b")) == [0]


def test_the_mock_has_one_kind_of_lower_tiers() -> None:
    settings = Settings(mock=MockSettings(kvbm=True, host_blocks=4))
    with pytest.raises(EngineConfigError, match="excludes"):
        create_engine(EngineContext(settings, model_dir()))
