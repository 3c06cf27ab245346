"""Starts of workers whose sources of weights are harmed at random points.

Each worker that has started is a source of the next ones, so a wrong byte would travel on. Whatever
happens, the engine has the parameters of the model, and no store declares a wrong byte present.
"""

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
import pytest_asyncio
from support.nats import NatsServer
from support.wait import eventually
from support.weights import CHUNK, stored_copy
from support.weights_fleet import Fleet, FleetWorker, call_in_child
from support.weights_worker import parameters_digest, write_model

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.process.manifests import ManifestStore
from kvmesh.weights.stored_copy import HELD

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=1 << 20, seq_bytes=1 << 20, lease_s=10.0)
RATE = 12_000_000  # bytes/s that one source sends
SOURCES = 3
MANY = 100
ALTERED = 0.3  # of the chunks of a source
BEFORE, AFTER = 0.15, 0.1  # of the faults come before or after the transfer
OWN_FOLDER = 0.3  # of the workers have the weights on their disk too
TWIN = 0.2  # of the workers start together with another one of their node
SETTINGS = {
    "KVMESH_WEIGHTS_UPLOAD_BYTES_PER_S": str(RATE),
    "KVMESH_WEIGHTS_PATIENCE_S": "3",
    "KVMESH_WEIGHTS_WAIT_S": "50",
}


class Starts:
    """Starts of one model, one after the other, with what became of them."""

    def __init__(
        self, fleet: Fleet, server: NatsServer, model: Path, manifest: Manifest, truth: str
    ) -> None:
        self.fleet = fleet
        self.server = server
        self.model = model
        self.bare = model.with_name("bare")
        shutil.copytree(model, self.bare, ignore=shutil.ignore_patterns("*.safetensors*"))
        self.manifest = manifest
        self.truth = truth
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []

    async def found(self) -> None:
        """Let the first worker find a copy in its memory, and a second one take it."""
        directory = self.fleet.directory("first")
        stored_copy(directory, self.model, self.manifest)
        await self.joined(self.fleet.start(self.bare, SETTINGS, directory))
        await self._renew()

    async def joined(self, worker: FleetWorker) -> None:
        """The worker has started with the right parameters; it is a source from now on."""
        loaded = await eventually(lambda: worker.loaded, what="the engine has started")
        assert loaded is not None
        assert loaded.error == "", f"{loaded.error}\n{worker.log()}"
        assert loaded.digest == self.truth, worker.log()

    async def one(
        self, random_: random.Random, given: Sequence["Fault"] = (), share: float | None = None
    ) -> None:
        """One start, with one or two faults unless they are `given`.

        They come when a `share` of the chunks is there, or each at a random point.
        """
        own = not given and random_.random() < OWN_FOLDER
        drawn = random_.choices(FAULTS_ON_DISK if own else FAULTS, k=random_.choice((1, 1, 2)))
        faults = given or drawn
        small = fill_the_store in faults
        twin = random_.random() < TWIN
        sources = list(self.fleet.workers)
        spared = random_.choice(sources)
        others = [source for source in sources if source is not spared]
        directory = self.fleet.directory(f"target-{self.counts['starts']}")
        began = time.monotonic()
        with small_store(directory, self.manifest.size * 3 // 2 if small else 0) as env:
            folder, settings = self.model if own else self.bare, SETTINGS | env
            target = self.fleet.start(folder, settings, directory)
            twins = [self.fleet.start(folder, settings, directory)] if twin else []
            harms = []
            for fault in faults:
                struck = sources if own and fault is not alter else others
                harms.append(self._harm(fault, target, struck, random_, share))
            await asyncio.gather(*map(self.joined, [target, *twins]), *harms)
            self.seconds.append(time.monotonic() - began)
            self.counts["starts"] += 1
            self.counts["with the disk"] += own
            self.counts["with another worker of the node"] += twin
            for worker in self.fleet.workers:
                worker.signal(SIGCONT)
                worker.proxy.release()
            await self._check(target)
            for worker in twins:
                await self._remove(worker)
            if small or not target.chunks(self.manifest.digest):
                await self._remove(target)
        await self._renew()

    async def close(self) -> None:
        for worker in list(self.fleet.workers):
            await self._remove(worker)

    async def _harm(
        self,
        fault: "Fault",
        target: FleetWorker,
        sources: list[FleetWorker],
        random_: random.Random,
        share: float | None,
    ) -> None:
        if share is None:
            draw = random_.random()
            share = 0.0 if draw < BEFORE else 2.0 if draw > 1 - AFTER else random_.random()
        count = share * len(self.manifest.chunks)
        victims = random_.sample(sources, random_.randint(1, len(sources))) if sources else []

        def reached() -> bool:
            held = target.chunks(self.manifest.digest).count(HELD)
            return held >= count or target.loaded is not None

        await eventually(reached)
        for victim in victims if fault in ON_SOURCES else [target]:
            await fault(self, victim, random_)
            self.counts[fault.__name__] += 1

    async def _check(self, target: FleetWorker) -> None:
        """No chunk that is declared present differs from the model's."""
        wrong = await asyncio.to_thread(target.wrong_bytes, self.manifest, self.model)
        self.counts["wrong bytes"] += wrong
        assert wrong == 0

    async def _renew(self) -> None:
        """Keep as many sources as there were, without those of altered bytes."""
        for worker in [worker for worker in self.fleet.workers if worker.altered]:
            await self._remove(worker)
        while len(self.fleet.workers) > SOURCES:
            await self._remove(self.fleet.workers[0])
        while len(self.fleet.workers) < 2:
            await self.joined(self.fleet.start(self.bare, SETTINGS))

    async def _remove(self, worker: FleetWorker) -> None:
        await self.fleet.remove(worker)
        for reason, count in worker.failed.items():
            self.counts[f"chunks {reason}"] += count


Fault = Callable[[Starts, FleetWorker, random.Random], Awaitable[None]]


async def kill(starts: Starts, worker: FleetWorker, _: random.Random) -> None:
    """Kill a source's weights process; its worker starts another one."""
    worker.signal(SIGKILL)


async def freeze(starts: Starts, worker: FleetWorker, _: random.Random) -> None:
    worker.signal(SIGSTOP)


async def cut(starts: Starts, worker: FleetWorker, _: random.Random) -> None:
    """Break the connections to a source, in the middle of chunks."""
    worker.proxy.cut()


async def partition(starts: Starts, worker: FleetWorker, _: random.Random) -> None:
    worker.proxy.hold()


async def alter(starts: Starts, worker: FleetWorker, random_: random.Random) -> None:
    """Change bytes in the memory from which a source serves."""
    manifest, worker.altered = starts.manifest, True
    chunks = random_.sample(manifest.chunks, max(int(ALTERED * len(manifest.chunks)), 1))
    for file, offset, size in chunks:
        path = worker.directory / manifest.digest / "files" / manifest.files[file].name
        at = offset + random_.randrange(size)
        with path.open("rb+") as content:
            before = os.pread(content.fileno(), 1, at)[0]
            os.pwrite(content.fileno(), bytes([before ^ random_.randint(1, 255)]), at)


async def kill_target(starts: Starts, worker: FleetWorker, _: random.Random) -> None:
    """Kill the weights process of the worker that starts."""
    await eventually(lambda: worker.weights_pid or worker.loaded)
    worker.signal(SIGKILL)


async def fill_the_store(starts: Starts, worker: FleetWorker, _: random.Random) -> None:
    """Leave no byte to the store of the worker that starts."""
    await asyncio.to_thread(_fill, worker.directory)


async def restart_nats(starts: Starts, worker: FleetWorker, _: random.Random) -> None:
    await asyncio.to_thread(starts.server.restart)


ON_SOURCES = (kill, freeze, cut, partition, alter)
FEW: tuple[tuple[float, tuple[Fault, ...]], ...] = (
    (0.0, (alter,)),
    (0.5, (kill, cut)),
    (0.4, (freeze,)),
    (0.3, (kill_target,)),
)
FAULTS: tuple[Fault, ...] = (*ON_SOURCES, kill, alter, kill_target, restart_nats)
FAULTS_ON_DISK: tuple[Fault, ...] = (*FAULTS, fill_the_store)


@contextmanager
def small_store(directory: Path, size: int) -> Iterator[dict[str, str]]:
    """A store on a file system of `size` bytes, unless that is 0; yields further settings."""
    if not size:
        yield {}
        return
    directory.mkdir(mode=0o700)
    options = f"size={size},mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield {"KVMESH_WEIGHTS_MAX_BYTES": str(size // 2)}  # it may not mount: less than a copy
        return
    try:
        yield {}
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def _fill(directory: Path) -> None:
    if not directory.is_mount():
        return
    try:
        with (directory / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(64 << 10)):
                pass
    except OSError:
        return


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("weights") / "model"
    call_in_child(write_model, folder, 192, 6)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own, which is restarted."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture
async def starts(
    server: NatsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Starts]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bus = await Bus.connect(BusOptions(url=server.url, namespace="chaos"), "test")
    await ensure_streams(bus, LIMITS)
    manifest = checkpoint_manifest(model, model="m", chunk_bytes=CHUNK)
    await ManifestStore(bus).put(manifest)
    truth = call_in_child(parameters_digest, model)
    fleet = Fleet(bus, tmp_path)
    starts = Starts(fleet, server, model, manifest, truth)
    card = await fleet.publish(LIMITS, manifest.digest)
    await starts.found()
    yield starts
    await starts.close()
    await card.close()
    await bus.close()


async def test_starts_survive_their_sources(starts: Starts) -> None:
    random_ = random.Random(1)
    for share, faults in FEW:
        await starts.one(random_, faults, share)
        for fault in faults:
            assert starts.counts[fault.__name__] >= 1
    assert starts.counts["starts"] == len(FEW)
    await starts.close()
    assert starts.counts["chunks corrupt"]


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_a_hundred_starts_survive_their_sources(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("WEIGHTS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    random_ = random.Random(seed)
    try:
        for _ in range(MANY):
            await starts.one(random_)
    finally:
        with capsys.disabled():
            took = sorted(starts.seconds) or [0.0]
            print(f"\nseed {seed}: {dict(starts.counts)}")
            print(f"seconds of a start: median {took[len(took) // 2]:.1f}, most {took[-1]:.1f}")
    assert starts.counts["starts"] == MANY
