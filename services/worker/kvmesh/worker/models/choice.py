"""The model folder that a worker serves, and the settings that follow from it."""

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import StartPhase
from kvmesh.bus.storage.tokenizer_file import has_tokenizer, why_no_tokenizer
from kvmesh.demo import model_dir
from kvmesh.runtime.service import StartError
from kvmesh.settings.schema import Settings, WorkerSettings
from kvmesh.weights.errors import WeightsError
from kvmesh.weights.models.reference import name_of_folder
from kvmesh.worker.engine import EngineConfigError, EngineError
from kvmesh.worker.models.mesh_model import MeshModel, mesh_model, mesh_reference
from kvmesh.worker.scratch import ScratchFolder
from kvmesh.worker.start.report import StartReport
from kvmesh.worker.start.timeline import StartTimeline

log = logging.getLogger(__name__)


def default_model(engine: str, cleanup: ExitStack) -> Path:
    """The model folder for an engine without `worker.model`; `cleanup` removes what is created.

    Raises EngineConfigError if the engine needs a model.
    """
    if engine == "mock":
        return model_dir()
    if engine != "torch":
        raise EngineConfigError(f"the {engine} engine needs a model: --model FOLDER")
    from kvmesh.worker.models.tiny_model import make_tiny_model  # loads numpy

    folder = cleanup.enter_context(ScratchFolder()).path / "tiny"
    log.info("no model given: creating a tiny one with random weights")
    make_tiny_model(folder)
    return folder


async def chosen_model(
    bus: Bus, instance: str, settings: Settings, timeline: StartTimeline, cleanup: ExitStack
) -> MeshModel:
    """The folder that the settings name, a model of the mesh, or a default; raises StartError."""
    worker = settings.worker
    reference = mesh_reference(worker)
    if reference is None:
        with timeline.phase(StartPhase.CONFIGURATION):
            folder = await _folder(worker, cleanup)
            name = worker.served_name or name_of_folder(folder)
            found = MeshModel(
                folder, replace(settings, worker=replace(worker, served_name=name)), ""
            )
    else:
        name = worker.served_name or reference.name
        try:
            with StartReport(bus, instance, name, worker.engine, timeline):
                found = await mesh_model(bus, settings, reference, timeline, cleanup)
        except WeightsError as error:
            reason = f"{worker.model} is no folder, and cannot come from the mesh: {error}"
            raise StartError(reason) from error
    if not has_tokenizer(found.folder):
        raise StartError(why_no_tokenizer(worker.model or found.folder), permanent=True)
    return found


async def _folder(worker: WorkerSettings, cleanup: ExitStack) -> Path:
    if worker.model is not None:
        return worker.model
    try:
        return await asyncio.to_thread(default_model, worker.engine, cleanup)
    except EngineError as error:
        raise StartError(str(error), permanent=True) from error
