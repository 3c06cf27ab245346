"""Models that a worker takes from the mesh by their name."""

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Role, StartPhase
from kvmesh.runtime.quantities import size
from kvmesh.settings.schema import Settings, WorkerSettings
from kvmesh.weights.errors import ModelStoreError, StoreError
from kvmesh.weights.models.cache import ModelCache
from kvmesh.weights.models.catalog import ModelCatalog, ModelEntry
from kvmesh.weights.models.pull import ModelPull, pulled_text
from kvmesh.weights.models.reference import ModelReference, parse_reference
from kvmesh.weights.models.store import ModelStore
from kvmesh.weights.store import WeightStore
from kvmesh.worker.start.timeline import StartTimeline
from kvmesh.worker.weights import LOADERS

log = logging.getLogger(__name__)
WITHOUT_WEIGHTS = ("mock", "openai")  # engines that read no weights


class MeshModel(NamedTuple):
    """The folder of a model, and the settings of a worker that serves it.

    `weights` is the digest of the manifest of its weights if the engine is to take these through
    the weights process, and empty if the folder has them, or no model of the mesh is served.
    """

    folder: Path
    settings: Settings
    weights: str


def mesh_reference(worker: WorkerSettings) -> ModelReference | None:
    """The model of the mesh that the settings name; None if they name a folder, or nothing."""
    if worker.model is None or worker.model.exists():
        return None
    try:
        return parse_reference(str(worker.model))
    except ModelStoreError:
        return None


async def mesh_model(
    bus: Bus,
    settings: Settings,
    reference: ModelReference,
    timeline: StartTimeline,
    cleanup: ExitStack,
) -> MeshModel:
    """Have the files of a model on this machine; it stays there until `cleanup`.

    Raises a WeightsError.
    """
    worker, weights = settings.worker, settings.weights
    with timeline.phase(StartPhase.CONFIGURATION):
        entry = await _entry(bus, reference, worker.served_name or reference.name)
        if worker.revision and worker.revision != entry.digest:
            raise ModelStoreError(
                f"worker.revision is {worker.revision}, but {reference} has the digest"
                f" {entry.digest}: leave it out"
            )
        manifest = await ModelStore(bus).manifest(entry.digest)
        cache = ModelCache(weights.models_directory, weights.models_bytes)
        streamed = await asyncio.to_thread(_streamed, settings, entry)
        count = entry.size - entry.weights_bytes if streamed else entry.size
        place = await asyncio.to_thread(cache.use, entry.name, entry.digest, count)
        cleanup.callback(place.close)
        pull = ModelPull(bus, entry, manifest, weights.sources)
        await pull.small_files(place)
    if not (streamed or worker.engine in WITHOUT_WEIGHTS):
        with timeline.phase(StartPhase.WEIGHTS):
            log.info("%s", pulled_text(await pull.everything(place)))
    own = replace(
        worker,
        model=place.folder,
        revision=entry.digest,
        served_name=worker.served_name or entry.name,
    )
    return MeshModel(place.folder, replace(settings, worker=own), entry.weights if streamed else "")


async def _entry(bus: Bus, reference: ModelReference, served_name: str) -> ModelEntry:
    """The revision that the oldest worker serves or, asleep, has served; else the newest one.

    So a worker that restarts after a push serves together with the others.
    """
    try:
        if not reference.digest:
            found = {e.digest: e for e in await ModelCatalog(bus).find(reference)}
            cards = await read_cards(bus, Role.WORKER, Role.PARKED)
            for card in sorted(cards, key=lambda c: (c.model is None, c.started, c.instance)):
                model = card.model or card.served
                if model is not None and model.name == served_name and model.revision in found:
                    return found[model.revision]
        return await ModelCatalog(bus).newest(reference)
    except BusError as error:
        raise ModelStoreError(f"cannot read the catalog of models: {cause(error)}") from error


def _streamed(settings: Settings, entry: ModelEntry) -> bool:
    """True if the engine takes the weights through the weights process, into memory."""
    weights = settings.weights
    if not (weights.share and entry.weights and settings.worker.engine in LOADERS):
        return False
    reason = f"{size(entry.weights_bytes)} do not fit into {weights.directory}"
    try:
        store = WeightStore(weights.directory, weights.max_bytes)
        if store.fits(entry.weights, entry.weights_bytes):
            return True
    except StoreError as error:
        reason = str(error)
    log.warning("the weights of %s go to the disk first: %s", entry.reference, reason)
    return False
