"""Compile caches that travel between workers by their weights processes, on a real NATS server."""

import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace
from support.wait import eventually
from support.weights import Agent, Agents, make_weights

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import CompiledOffer, Instance, Role
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.settings.schema import WeightsSettings
from kvmesh.worker.compiled.cache import VARIABLES, CompileCache
from kvmesh.worker.compiled.environment import CompileEnvironment
from kvmesh.worker.compiled.exchange import ProcessExchange

KEY = b"k" * 32
ENVIRONMENT = CompileEnvironment({"torch": "2.13"})
KERNEL = "torch_compile_cache/aot/kernel.so"
LARGE = os.urandom(20 << 20)  # three chunks


@dataclass
class CachingWorker:
    """A worker's weights process and compile cache, with an engine that writes one file."""

    bus: Bus
    limits: StreamLimits
    agent: Agent
    cache: CompileCache
    lease: Lease | None = None

    async def start(self, code: bytes) -> bytes:
        """Start the engine, which compiles unless it finds its code; returns the code."""
        await self.cache.open()
        file = Path(os.environ["VLLM_CACHE_ROOT"], KERNEL)
        if not file.exists():  # noqa: ASYNC240
            file.parent.mkdir(parents=True)
            file.write_bytes(code)  # noqa: ASYNC240
        offer = await self.cache.offer()
        await self.join(offer)
        return file.read_bytes()  # noqa: ASYNC240

    async def join(self, offer: CompiledOffer | None) -> None:
        name = self.agent.job.name
        card = Instance(
            instance=self.agent.job.instance,
            role=Role.WORKER,
            name=name,
            version="",
            started=time.time(),
            compiled=offer,
        )
        self.lease = Lease(self.bus, card, self.limits)
        await self.lease.open()

    async def close(self) -> None:
        await self.cache.close()
        if self.lease is not None:
            await self.lease.close()


class CachingWorkers:
    def __init__(self, bus: Bus, limits: StreamLimits, agents: Agents, folder: Path) -> None:
        self._bus = bus
        self._limits = limits
        self._agents = agents
        self._folder = folder
        self._model = make_weights(folder / "model")
        self._started: list[CachingWorker] = []

    async def start(self, name: str, key: bytes = KEY, wait_s: float = 20.0) -> CachingWorker:
        agent = await self._agents.start(name, self._model)
        settings = WeightsSettings(
            directory=self._agents.directory(name),
            cache_directory=self._folder / "compiled" / name,
            cache_wait_s=wait_s,
            max_bytes=1 << 30,
        )
        exchange = ProcessExchange(agent.process, settings)
        cache = CompileCache(
            settings, "vllm", ENVIRONMENT, lambda: read_cards(self._bus, Role.WORKER), exchange, key
        )
        worker = CachingWorker(self._bus, self._limits, agent, cache)
        self._started.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self._started:
            await worker.close()
        await self._agents.close()


@pytest_asyncio.fixture
async def workers(
    bus: Bus, limits: StreamLimits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[CachingWorkers]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    workers = CachingWorkers(bus, limits, Agents(bus, limits, tmp_path), tmp_path)
    yield workers
    await workers.close()


def forget_folders() -> None:
    """Let the next cache of this process set the variables that belong to the engine."""
    for name in VARIABLES:
        os.environ.pop(name, None)


async def test_the_second_worker_gets_the_code_of_the_first_and_passes_it_on(
    workers: CachingWorkers,
) -> None:
    first = await workers.start("first")
    assert await first.start(LARGE) == LARGE
    forget_folders()
    second = await workers.start("second")
    assert await second.start(b"compiled again") == LARGE
    assert second.cache.fetched
    await eventually(lambda: first.agent.counts.sent > len(LARGE))
    forget_folders()
    await first.agent.close()
    await first.close()
    third = await workers.start("third")
    assert await third.start(b"compiled again") == LARGE
    assert third.cache.fetched == second.cache.fetched


async def test_a_worker_of_another_domain_compiles(workers: CachingWorkers) -> None:
    first = await workers.start("first")
    await first.start(b"code")
    forget_folders()
    stranger = await workers.start("stranger", key=b"s" * 32)
    assert await stranger.start(b"own") == b"own"
    assert not stranger.cache.fetched


async def test_a_frozen_source_costs_the_wait_and_a_compilation(
    workers: CachingWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    first = await workers.start("first")
    await first.start(b"code")
    forget_folders()
    second = await workers.start("second", wait_s=1.5)
    await eventually(lambda: second.agent.answer, what="the weights process runs")
    first.agent.signal(signal.SIGSTOP)
    assert await second.start(b"own") == b"own"
    assert not second.cache.fetched
    assert "no compile cache from other workers" in caplog.text


async def test_a_process_that_was_restarted_offers_the_archive_again(
    workers: CachingWorkers,
) -> None:
    first = await workers.start("first")
    await first.start(b"code")
    first.agent.signal(signal.SIGKILL)
    await eventually(lambda: first.agent.deaths)
    await first.agent.start()
    forget_folders()
    second = await workers.start("second")
    assert await second.start(b"own") == b"code"


async def test_an_offer_of_another_archive_under_a_false_proof_is_not_run(
    workers: CachingWorkers,
) -> None:
    liar = await workers.start("liar", key=b"l" * 32)
    await liar.start(b"malicious")
    assert liar.lease is not None
    offer = liar.lease.card.compiled
    assert offer is not None
    forged = replace(offer, environment=ENVIRONMENT.label(KEY))
    await liar.lease.update(replace(liar.lease.card, compiled=forged))
    forget_folders()
    worker = await workers.start("worker")
    assert await worker.start(b"own") == b"own"
