"""The worker process: builds one engine, serves it on the mesh, and drains it at the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from kvmesh.blocks.attachment import ArenaUser, WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.messages import KvLayout, StartPhase
from kvmesh.runtime.process_start import FIRST_LINE, process_created
from kvmesh.runtime.service import Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.compiled.cache import CompileCache
from kvmesh.worker.compiled.start import compile_cache
from kvmesh.worker.default_model import default_model
from kvmesh.worker.engine import (
    Engine,
    EngineConfigError,
    EngineContext,
    EngineError,
    StoreFactory,
    engine_factory,
)
from kvmesh.worker.metrics import (
    HandoffCollector,
    LoadCollector,
    RetentionCollector,
    StartCollector,
    TierCollector,
    WeightsCollector,
    WorkerLabels,
)
from kvmesh.worker.model_card import node_name, parked_card
from kvmesh.worker.model_folder import has_chat_template
from kvmesh.worker.node import WorkerNode
from kvmesh.worker.parking import wait_parked
from kvmesh.worker.start.report import StartReport
from kvmesh.worker.start.timeline import StartTimeline
from kvmesh.worker.weights import WorkerWeights, kept_access

log = logging.getLogger(__name__)
# libraries that may install signal handlers when they are imported
IMPORTED_BY_MAIN_THREAD = ("sglang", "trtllm")
WITHOUT_FILES = ("openai",)  # engines whose weights are elsewhere
NO_TEMPLATE = "%s has no chat template: the model serves plain completions only"


async def main(service: Service) -> None:
    """Serve until `service.stopping`, then drain and leave."""
    timeline = _timeline(service)
    with ExitStack() as cleanup:
        with timeline.phase(StartPhase.CONFIGURATION):
            folder = await _model_folder(service.settings.worker, cleanup)
        async with (
            _weights(service, folder) as weights,
            _compile_cache(service, folder, weights, timeline) as cache,
        ):
            await _serve_model(service, folder, timeline, weights, cache)


def _timeline(service: Service) -> StartTimeline:
    """The start of this process, which has connected to the mesh."""
    timeline = StartTimeline(process_created())
    timeline.add(StartPhase.PROCESS, timeline.created, FIRST_LINE)
    timeline.add(StartPhase.IMPORTS, FIRST_LINE, service.entered)
    timeline.add(StartPhase.REGISTRATION, service.entered, time.monotonic())
    return timeline


async def _model_folder(worker: WorkerSettings, cleanup: ExitStack) -> Path:
    folder = worker.model
    try:
        if folder is None:
            folder = await asyncio.to_thread(default_model, worker.engine, cleanup)
    except EngineError as error:
        raise StartError(str(error), permanent=True) from error
    if not (folder / "tokenizer.json").is_file():
        reason = f"{folder} is not a Hugging Face model folder: it has no tokenizer.json"
        raise StartError(reason, permanent=True)
    return folder


async def _serve_model(
    service: Service,
    folder: Path,
    timeline: StartTimeline,
    weights: WorkerWeights | None,
    cache: CompileCache | None,
) -> None:
    settings = service.settings
    model = settings.worker.served_name or folder.name

    def on_end(error: EngineError | None) -> None:
        if error is not None:
            log.error("%s", error)
            service.failed = True
        service.stopping.set()

    start = StartReport(service.bus, service.instance, model, settings.worker.engine, timeline)
    with start:
        if not has_chat_template(folder):
            log.warning(NO_TEMPLATE, folder)
        access = weights.access if weights is not None else kept_access(settings.weights)
        store = _store_factory(service, folder)
        try:
            engine = await _create_engine(EngineContext(settings, folder, store, timeline, access))
        except EngineError as error:
            raise StartError(str(error), permanent=True) from error
        try:
            node = WorkerNode(
                service.bus,
                engine,
                settings,
                folder,
                service.name,
                service.instance,
                service.limits,
                on_end,
                service.warnings,
                timeline,
            )
            labels = WorkerLabels(model, service.name)
            await _serve(service, engine, node, labels, start, weights, cache)
        except (EngineError, ModelFilesError) as error:
            permanent = isinstance(error, EngineConfigError)
            raise StartError(str(error), permanent=permanent) from error


@asynccontextmanager
async def _weights(service: Service, folder: Path) -> AsyncIterator[WorkerWeights | None]:
    """The weights process, if weights are to be shared; it starts before the engine."""
    settings = service.settings
    if not settings.weights.share or settings.worker.engine in WITHOUT_FILES:
        yield None
        return
    weights = WorkerWeights(settings, folder, service.name, service.instance)
    await weights.start()
    try:
        yield weights
    finally:
        await weights.close()


@asynccontextmanager
async def _compile_cache(
    service: Service, folder: Path, weights: WorkerWeights | None, timeline: StartTimeline
) -> AsyncIterator[CompileCache | None]:
    """The engine's compile cache; it travels with the weights."""
    archives = weights.archives if weights is not None else None
    opening = ExitStack()
    if service.settings.weights.compile_cache:
        opening.enter_context(timeline.phase(StartPhase.COMPILE))
    with opening:
        async with compile_cache(service.settings, folder, service.bus, archives) as cache:
            opening.close()
            yield cache


async def _create_engine(context: EngineContext) -> Engine:
    name = context.settings.worker.engine
    with context.timeline.phase(StartPhase.IMPORTS):
        if name in IMPORTED_BY_MAIN_THREAD:
            factory = engine_factory(name)
        else:  # the loop goes on telling observers the phase
            factory = await asyncio.to_thread(engine_factory, name)
    with context.timeline.phase(StartPhase.CONFIGURATION):
        return factory(context)


def _store_factory(service: Service, folder: Path) -> StoreFactory:
    """Return a factory of clients of the kvbm on this worker's node."""
    worker = service.settings.worker

    def connect(layout: KvLayout, user: ArenaUser) -> KvbmClient:
        identity = WorkerIdentity(
            node=node_name(worker),
            instance=service.instance,
            model=worker.served_name or folder.name,
            layout=layout,
        )
        return KvbmClient(service.bus, service.limits, identity, user)

    return connect


async def _serve(
    service: Service,
    engine: Engine,
    node: WorkerNode,
    labels: WorkerLabels,
    start: StartReport,
    weights: WorkerWeights | None,
    cache: CompileCache | None,
) -> None:
    worker = service.settings.worker
    collectors: list[Collector] = [
        StartCollector(labels, start.timeline.row),
        LoadCollector(labels, node.load),
        RetentionCollector(labels, node.retention),
        TierCollector(labels, node.tier_counts),
        HandoffCollector(labels, node.handoff_counts),
    ]
    if weights is not None:
        collectors.append(WeightsCollector(labels, lambda: weights.counts))
        weights.tell(node.set_weights)
    for collector in collectors:
        REGISTRY.register(collector)
    http = await serve_metrics(worker, lambda: node.ready, service.warnings)
    try:
        if worker.parked:
            card = parked_card(worker, labels.model, service.instance, service.name)
            promoted = await wait_parked(
                service.bus, engine, card, service.limits, start, service.stopping
            )
            if not promoted:
                return
        await node.start()
        start.close()
        if weights is not None:
            weights.engine_runs()
            node.watch(weights.sample)
        service.start_watchdog()
        if cache is not None:
            cache.start_offering(node.publish_compiled)
        await service.stopping.wait()
        await node.drain(0 if service.failed else worker.drain_timeout_s)
    finally:
        if cache is not None and node.info is not None:
            cache.engine_runs()
        await node.close()
        for collector in collectors:
            REGISTRY.unregister(collector)
        if http is not None:
            await http.cleanup()
