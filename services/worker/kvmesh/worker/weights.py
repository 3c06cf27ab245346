"""The weights process of a worker: its start, its restarts, and its reports."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.messages import StartSource
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.runtime.quantities import size
from kvmesh.settings.load import to_env
from kvmesh.settings.schema import Settings, WeightsSettings
from kvmesh.weights.answer import WeightsAccess
from kvmesh.weights.checkpoint import weight_files
from kvmesh.weights.client import WorkersProcess, access
from kvmesh.weights.errors import CheckpointError, StoreError
from kvmesh.weights.frames import (
    DISK,
    STORE,
    ServingReport,
    SubjectsRefused,
    WeightsCounts,
    WeightsEvent,
    WeightsFromDisk,
    WeightsJob,
    WeightsKnown,
    WeightsTaken,
)
from kvmesh.weights.store import WeightStore
from kvmesh.worker.compiled.exchange import ProcessExchange
from kvmesh.worker.model_card import node_name
from kvmesh.worker.model_folder import weights_revision
from kvmesh.worker.requests.serving_sample import ServingSample

log = logging.getLogger(__name__)
LOADERS = ("torch", "vllm", "sglang", "trtllm")  # that read the answer; others only offer files
WEIGHTS = "weights"
PROCESS = "weights process"
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 30.0
MAX_DEATHS = 5
REPORT_S = 0.2


class WorkerWeights:
    """Runs a weights process; its failure never harms the worker."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        name: str,
        instance: str,
        pinned: str = "",
        on_refused: Callable[[str, Mapping[str, str]], None] = lambda _, __: None,
    ) -> None:
        """`pinned` is the digest of the weights to take, if the model comes from the mesh.

        `on_refused` gets its name and the present refusals of its subjects, at each change.
        """
        self._on_refused = on_refused
        worker, weights = settings.worker, settings.weights
        self._settings = weights
        self._folder = Path(tempfile.mkdtemp(prefix="kvmesh-weights-"))
        self._model = folder
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        self._deaths = 0
        self._tasks = BackgroundTasks()
        self._digest = ""
        self._takes = worker.engine in LOADERS
        self._on_disk = _weight_bytes(folder) > 0
        self._told: Callable[[str], None] | None = None
        self._sources: list[StartSource] = []
        self.counts = WeightsCounts()
        job = WeightsJob(
            env=to_env(settings),
            name=name,
            instance=instance,
            model=worker.served_name or folder.name,
            folder=str(folder.resolve()),
            revision=weights_revision(worker, folder),
            node=node_name(worker),
            answer_file=str(self._folder / "answer"),
            pinned=pinned,
            take=self._takes,
        )
        longest_s = weights.patience_s if self._on_disk else weights.wait_s
        self.access = access(
            self._folder / "answer",
            weights.directory,
            weights.max_bytes,
            weights.keep,
            longest_s,
        )
        self._process = WorkersProcess(job, self._report, self._restart)
        self.sample = ServingSample(self._report_transfers)
        self.archives = ProcessExchange(self._process, weights)

    @property
    def sources(self) -> list[StartSource]:
        """The sources of the engine's weights, as far as known."""
        return self._sources

    def stored_bytes(self) -> int:
        """Bytes of all copies in the node's memory; 0 if they cannot be read."""
        weights = self._settings
        with suppress(StoreError):
            return WeightStore(weights.directory, weights.max_bytes).used()
        return 0

    def tell(self, on_digest: Callable[[str], None]) -> None:
        """Pass the digest of the worker's weights on, now or once it is known."""
        self._told = on_digest
        if self._digest:
            on_digest(self._digest)

    async def start(self) -> None:
        """Start the process; if that fails, the engine reads its folder."""
        try:
            await self._process.start()
        except OSError as error:
            self._restart(f"the weights process does not start: {error}")

    def engine_runs(self) -> None:
        """The engine has loaded its weights: offer them, and serving comes first."""
        self._process.engine_runs()
        self._tasks.start(self._report_often(), "reports to the weights process")

    async def close(self) -> None:
        """End the process; its copy goes unless it is kept or used."""
        await self._tasks.close()
        await self._process.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _report(self, event: WeightsEvent) -> None:
        match event:
            case WeightsCounts():
                self.counts = event
            case SubjectsRefused():
                self._on_refused(PROCESS, event.texts)
            case WeightsKnown():
                self._digest = event.digest
                if self._told is not None:
                    self._told(event.digest)
            case WeightsFromDisk() if self._takes:
                log.info("weights come from the model folder: %s", event.reason)
                if not self._sources:
                    self._sources = [StartSource(WEIGHTS, DISK, _weight_bytes(self._model))]
            case WeightsTaken():
                log.info("%s", _taken_text(event))
                if not self._sources:
                    self._sources = _sources(event)

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            report = self.sample.take(asyncio.get_running_loop().time())
            if report is not None:
                self._process.serving(report)

    def _report_transfers(self) -> None:
        self._process.serving(ServingReport(transfers=True))

    def _restart(self, reason: str) -> None:
        """Start another process after a while, a few times; the first death is logged."""
        self._deaths += 1
        self._on_refused(PROCESS, {})
        if self._deaths == 1:
            log.warning("%s; the engine does not need it once it has its weights", reason)
        if self._on_disk or self._deaths > MAX_DEATHS:  # else only the next process brings them
            self._process.read_folder(reason)
        if self._deaths > MAX_DEATHS:
            log.warning("weights are not shared any more: %s", reason)
            return
        self._tasks.start(self._start_later(self._backoff.delay()), "weights process")

    async def _start_later(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self.start()


def kept_access(weights: WeightsSettings) -> WeightsAccess | None:
    """Access to what an earlier start has kept, for a worker without a weights process."""
    if not weights.keep:
        return None
    nowhere = weights.directory / "no-answer"
    return WeightsAccess(nowhere, weights.directory, weights.max_bytes, keep=True, timeout_s=0.0)


def _weight_bytes(folder: Path) -> int:
    """Bytes of the folder's weights; 0 if there are none."""
    with suppress(CheckpointError, OSError):
        return sum(file.stat().st_size for file in weight_files(folder))
    return 0


def _sources(event: WeightsTaken) -> list[StartSource]:
    near = {name: event.sources.get(name, 0) for name in (DISK, STORE)}
    taken = sum(event.sources.values())
    found = {"workers": taken - sum(near.values()), **near, "memory": event.size - taken}
    return [StartSource(WEIGHTS, source, count) for source, count in found.items() if count > 0]


def _taken_text(event: WeightsTaken) -> str:
    """One line about a complete copy: its bytes, seconds and sources."""
    if not event.sources:
        return f"weights {event.digest[:12]} were in this node's memory"
    total = sum(event.sources.values())
    parts = ", ".join(f"{name} {size(count)}" for name, count in sorted(event.sources.items()))
    nixl = f", {size(event.direct)} of it through NIXL" if event.direct else ""
    return f"weights {event.digest[:12]}: {size(total)} in {event.seconds:.1f} s ({parts}){nixl}"
