"""The worker process: builds one engine, serves it on the mesh, and drains it at the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from kvmesh.blocks.attachment import ArenaUser, WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.discovery.failed_starts import record_failed_start
from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.messages import FailedStart, KvLayout, StartPhase, StartSource
from kvmesh.runtime.process_start import FIRST_LINE, process_created
from kvmesh.runtime.service import Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.worker.compiled.cache import CompileCache
from kvmesh.worker.compiled.start import compile_cache
from kvmesh.worker.engine import (
    Engine,
    EngineConfigError,
    EngineContext,
    EngineError,
    StoreFactory,
    begin_processes,
    engine_factory,
)
from kvmesh.worker.lifecycle.cycle import WorkerLifecycle
from kvmesh.worker.metrics import (
    EventCollector,
    HandoffCollector,
    LoadCollector,
    RetentionCollector,
    SourceCollector,
    StartCollector,
    TierCollector,
    WeightsCollector,
    WorkerLabels,
)
from kvmesh.worker.model_card import node_name
from kvmesh.worker.model_folder import has_chat_template
from kvmesh.worker.models.choice import chosen_model
from kvmesh.worker.start.report import StartReport
from kvmesh.worker.start.timeline import StartTimeline
from kvmesh.worker.weights import WorkerWeights, kept_access

log = logging.getLogger(__name__)
# libraries that may install signal handlers when they are imported
IMPORTED_BY_MAIN_THREAD = ("sglang", "trtllm")
ELSEWHERE = ("openai",)  # engines that may not reach the files which this process stores
FAILURE_S = 2.0  # to store why a start has failed
NO_TEMPLATE = "%s has no chat template: the model serves plain completions only"


async def main(service: Service) -> None:
    """Serve until `service.stopping`, then drain and leave."""
    timeline = _timeline(service)
    try:
        await _start(service, timeline)
    except StartError as error:
        await _record_failure(service, timeline, error)
        raise


async def _start(service: Service, timeline: StartTimeline) -> None:
    with ExitStack() as cleanup:
        folder, service.settings, pinned = await chosen_model(
            service.bus, service.instance, service.settings, timeline, cleanup
        )
        async with (
            _weights(service, folder, pinned) as weights,
            _compile_cache(service, folder, weights, timeline) as cache,
        ):
            await _serve_model(service, folder, timeline, weights, cache)


async def _record_failure(service: Service, timeline: StartTimeline, error: StartError) -> None:
    """Tell observers why this start has failed: the process ends, and may start again."""
    worker, now = service.settings.worker, time.time()
    failed = FailedStart(
        instance=service.instance,
        model=worker.served_name or str(worker.model or ""),
        engine=worker.engine,
        phase=timeline.last,
        started=now - time.monotonic() + timeline.created,
        failed=now,
        error=str(error),
        final=error.permanent,
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(FAILURE_S):
            await record_failed_start(service.bus, failed)


def _timeline(service: Service) -> StartTimeline:
    """The start of this process, which has connected to the mesh."""
    timeline = StartTimeline(process_created())
    timeline.add(StartPhase.PROCESS, timeline.created, FIRST_LINE)
    timeline.add(StartPhase.IMPORTS, FIRST_LINE, service.entered)
    timeline.add(StartPhase.REGISTRATION, service.entered, time.monotonic())
    return timeline


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
            context = EngineContext(
                settings,
                folder,
                store,
                timeline,
                access,
                cache.files if cache is not None else None,
                on_refused=service.bus.refusals.add,
            )
            engine = await _create_engine(context)
        except EngineError as error:
            raise StartError(str(error), permanent=True) from error
        try:
            local = weights if settings.worker.engine not in ELSEWHERE else None
            exchange = local.archives if local is not None else None
            lifecycle = WorkerLifecycle(service, engine, folder, model, on_end, start, exchange)
            await _serve(service, lifecycle, WorkerLabels(model, service.name), weights, cache)
        except (EngineError, ModelFilesError) as error:
            permanent = isinstance(error, EngineConfigError)
            raise StartError(str(error), permanent=permanent) from error


@asynccontextmanager
async def _weights(
    service: Service, folder: Path, pinned: str
) -> AsyncIterator[WorkerWeights | None]:
    """The weights process, if weights are to be shared; it starts before the engine.

    `pinned` is the digest of the weights of a model of the mesh.
    """
    settings = service.settings
    if not settings.weights.share:
        yield None
        return
    weights = WorkerWeights(
        settings, folder, service.name, service.instance, pinned, service.bus.refusals.add
    )
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
        context = begin_processes(context)
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
    lifecycle: WorkerLifecycle,
    labels: WorkerLabels,
    weights: WorkerWeights | None,
    cache: CompileCache | None,
) -> None:
    collectors: list[Collector] = [
        StartCollector(labels, lifecycle.timeline.row),
        LoadCollector(labels, lambda: lifecycle.node.load()),
        RetentionCollector(labels, lambda: lifecycle.node.retention()),
        TierCollector(labels, lambda: lifecycle.node.tier_counts()),
        EventCollector(labels, lambda: lifecycle.node.event_counts()),
        HandoffCollector(labels, lambda: lifecycle.node.handoff_counts()),
    ]

    def sources() -> list[StartSource]:
        code = [cache.source] if cache is not None and cache.source is not None else []
        return [*(weights.sources if weights is not None else ()), *code]

    lifecycle.sources = sources
    collectors.append(SourceCollector(labels, sources))
    if weights is not None:
        collectors.append(WeightsCollector(labels, lambda: weights.counts, weights.stored_bytes))
        weights.tell(lifecycle.set_weights)
    for collector in collectors:
        REGISTRY.register(collector)
    http = await serve_metrics(
        service.settings.process,
        service.settings.worker.metrics_port,
        lambda: lifecycle.node.ready,
        service.warnings,
        lambda: lifecycle.standby,
    )

    def started() -> None:
        if weights is not None:
            weights.engine_runs()
            lifecycle.watch(weights.sample)
        service.start_watchdog()
        if cache is not None:
            cache.start_offering(lifecycle.publish_compiled)

    try:
        await lifecycle.run(started)
    finally:
        if cache is not None and lifecycle.node.info is not None:
            cache.engine_runs()
        await lifecycle.close()
        for collector in collectors:
            REGISTRY.unregister(collector)
        if http is not None:
            await http.cleanup()
