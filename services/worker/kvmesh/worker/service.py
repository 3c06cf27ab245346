"""The worker process: builds one engine, serves it on the mesh, and drains it at the end."""

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import REGISTRY

from kvmesh.blocks.attachment import ArenaUser, WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.messages import KvLayout
from kvmesh.runtime.service import Service, StartError
from kvmesh.runtime.status_http import serve_metrics
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.compiled.cache import CompileCache
from kvmesh.worker.compiled.start import compile_cache
from kvmesh.worker.default_model import default_model
from kvmesh.worker.engine import (
    EngineConfigError,
    EngineContext,
    EngineError,
    StoreFactory,
    create_engine,
)
from kvmesh.worker.metrics import (
    HandoffCollector,
    LoadCollector,
    RetentionCollector,
    TierCollector,
    WorkerLabels,
)
from kvmesh.worker.model_card import node_name
from kvmesh.worker.model_folder import has_chat_template
from kvmesh.worker.node import WorkerNode

log = logging.getLogger(__name__)
NO_TEMPLATE = "%s has no chat template: the model serves plain completions only"


async def main(service: Service) -> None:
    """Serve until `service.stopping`, then drain and leave."""
    with ExitStack() as cleanup:
        folder = await _model_folder(service.settings.worker, cleanup)
        async with compile_cache(service.settings, folder, service.bus, None) as cache:
            await _serve_model(service, folder, cache)


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


async def _serve_model(service: Service, folder: Path, cache: CompileCache | None) -> None:
    settings = service.settings

    def on_end(error: EngineError | None) -> None:
        if error is not None:
            log.error("%s", error)
            service.failed = True
        service.stopping.set()

    try:
        if not has_chat_template(folder):
            log.warning(NO_TEMPLATE, folder)
        engine = create_engine(EngineContext(settings, folder, _store_factory(service, folder)))
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
        )
        await _serve(service, node, settings.worker.served_name or folder.name, cache)
    except (EngineError, ModelFilesError) as error:
        raise StartError(str(error), permanent=isinstance(error, EngineConfigError)) from error


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
    service: Service, node: WorkerNode, model: str, cache: CompileCache | None
) -> None:
    worker = service.settings.worker
    labels = WorkerLabels(model, service.name)
    collectors = [
        LoadCollector(labels, node.load),
        RetentionCollector(labels, node.retention),
        TierCollector(labels, node.tier_counts),
        HandoffCollector(labels, node.handoff_counts),
    ]
    for collector in collectors:
        REGISTRY.register(collector)
    http = await serve_metrics(worker, lambda: node.ready, service.warnings)
    try:
        await node.start()
        service.start_watchdog()
        if cache is not None:
            cache.start_offering(node.publish_compiled)
        await service.stopping.wait()
        await node.drain(0 if service.failed else worker.drain_timeout_s)
    finally:
        await node.close()
        for collector in collectors:
            REGISTRY.unregister(collector)
        if http is not None:
            await http.cleanup()
