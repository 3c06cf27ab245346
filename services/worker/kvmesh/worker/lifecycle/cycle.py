"""The states of one worker process: a node for each time that it serves, standby in between."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from kvmesh.bus.discovery.failed_starts import forget_failed_start
from kvmesh.bus.messages import CompiledOffer, StartPhase, StartSource
from kvmesh.runtime.service import Service
from kvmesh.settings import Settings
from kvmesh.worker.capabilities import Sleeping
from kvmesh.worker.engine import Engine, EngineError
from kvmesh.worker.lifecycle.further_engines import FurtherEngines
from kvmesh.worker.lifecycle.standby import Standby
from kvmesh.worker.lora.copies import CopyExchange
from kvmesh.worker.model_card import parked_card
from kvmesh.worker.node import WorkerNode
from kvmesh.worker.requests.serving_sample import ServingSample
from kvmesh.worker.start.before_standby import BeforeStandby
from kvmesh.worker.start.report import StartReport

log = logging.getLogger(__name__)


class WorkerLifecycle:
    """Serves with `engine` until `service.stopping`; in between it may sleep, again and again.

    `node` is the present one, or on standby the next one. `on_end` is that of `WorkerNode`;
    `report` tells observers of the first start, on the `timeline` of all. Files of adapters travel
    through the `exchange`, if any.
    """

    def __init__(
        self,
        service: Service,
        engine: Engine,
        folder: Path,
        model: str,
        on_end: Callable[[EngineError | None], None],
        report: StartReport,
        exchange: CopyExchange | None = None,
    ) -> None:
        self._service = service
        self._engine = engine
        self._folder = folder
        self._model = model
        self._on_end = on_end
        self._report = report
        self._exchange = exchange
        self._standby = Standby(service.bus, service.limits, service.stopping)
        self._weights = ""
        self._sample: ServingSample | None = None
        self._slept = False
        self._compiled: CompiledOffer | None = None
        self._further: FurtherEngines | None = None
        self.sources: Callable[[], list[StartSource]] = list  # of what the engine starts with
        self.timeline = report.timeline
        self.node = self._make_node(None)

    async def run(self, started: Callable[[], None]) -> None:
        """Serve; `started` is called when the worker has joined for the first time.

        Raises EngineError, EngineConfigError and BusError.
        """
        service = self._service
        if service.settings.worker.parked and not await self._wait_parked():
            return
        await self.node.start()
        await self._start_further()
        self._report.close()
        await forget_failed_start(service.bus, service.name)
        started()
        while await self._serve():
            with StartReport(
                service.bus, service.instance, self._model, self._name, self.timeline
            ) as report:
                report.paused = True
                if not await self._sleep(report):
                    return
                await self.node.start()
            if self._compiled is not None:
                await self.node.publish_compiled(self._compiled)
        drain_s = 0 if service.failed else service.settings.worker.drain_timeout_s
        further = self._further
        await asyncio.gather(
            self.node.drain(drain_s), *([further.close(drain_s)] if further is not None else [])
        )

    async def close(self) -> None:
        """Leave the mesh and stop the engine."""
        if self._further is not None:
            await self._further.close(0.0)
        await self.node.close()

    def set_weights(self, digest: str) -> None:
        """Put the digest of the weights on the cards, from now on."""
        self._weights = digest
        self.node.set_weights(digest)

    def watch(self, sample: ServingSample) -> None:
        """Tell `sample` of the requests and their output, from now on."""
        self._sample = sample
        self.node.watch(sample)

    async def publish_compiled(self, offer: CompiledOffer) -> None:
        """Put the compile cache that the worker offers on the cards, from now on."""
        self._compiled = offer
        await self.node.publish_compiled(offer)

    @property
    def standby(self) -> str:
        """The form of its standby, "parked" or "asleep"; empty if the worker is not on standby."""
        present = self.timeline.present()
        if present is None or present[0] != StartPhase.PARKED:
            return ""
        return "asleep" if self._slept else "parked"

    @property
    def _name(self) -> str:
        return self._service.settings.worker.engine

    async def _start_further(self) -> None:
        settings, service = self._service.settings, self._service
        count = settings.mock.engines - 1
        if settings.worker.engine == "mock" and count:
            self._further = FurtherEngines(
                service.bus, settings, self._folder, service.name, count, service.limits
            )
            await self._further.start(self.node.model)

    async def _wait_parked(self) -> bool:
        service = self._service
        card = parked_card(service.settings.worker, self._model, service.instance, service.name)
        return await self._standby.park(self._engine, card, self._report)

    async def _serve(self) -> bool:
        """Serve until the worker has drained to sleep: True; or is to end: False."""
        node, timeout = self.node, self._service.settings.worker.drain_timeout_s
        while await self._standby.await_unless_stopping(node.wants_sleep.wait()):
            if await self._standby.await_unless_stopping(node.drain_to_sleep(timeout)):
                return True
        return False

    async def _sleep(self, report: StartReport) -> bool:
        """Leave the mesh and sleep; True once the worker is promoted, False if it is to end."""
        service, engine = self._service, self._engine
        assert isinstance(engine, Sleeping)
        self._slept = True
        report.timeline.begin_again()
        with report.timeline.phase(StartPhase.PARKED):  # observers count it as waiting at once
            before = await self.node.leave()
            self.node = self._make_node(before)
            worker = self._settings(before).worker
            card = parked_card(worker, self._model, service.instance, service.name)
            card = replace(
                card,
                phases=before.phases,
                startup_s=before.startup_s,
                served=before.model,
                compiled=self._compiled,
            )
            return await self._standby.sleep(engine, card, report)

    def _settings(self, before: BeforeStandby | None) -> Settings:
        """The settings, with the role that the worker had last."""
        settings = self._service.settings
        serves = before.serves if before is not None else ""
        if not serves:
            return settings
        return replace(settings, worker=replace(settings.worker, serves=serves))

    def _make_node(self, before: BeforeStandby | None) -> WorkerNode:
        service = self._service
        node = WorkerNode(
            service.bus,
            self._engine,
            self._settings(before),
            self._folder,
            service.name,
            service.instance,
            service.limits,
            self._on_end,
            service.warnings,
            self.timeline,
            self._exchange,
            before,
        )
        node.sources = lambda: self.sources()
        node.set_weights(self._weights)
        if self._sample is not None:
            node.watch(self._sample)
        return node
