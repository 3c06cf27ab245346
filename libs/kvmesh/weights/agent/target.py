"""The choice of the copy of weights that a starting worker takes. No transfer happens here."""

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.compatibility import Compatibility
from kvmesh.bus.discovery.directory import worker_cards
from kvmesh.weights.frames import WeightsJob
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.store import WeightStore


async def digest_on_cards(bus: Bus, job: WeightsJob) -> str:
    """The digest on the oldest card of the model; empty if no card has one. Raises BusError.

    A worker that is pinned to a revision follows no card with another one.
    """
    workers = Compatibility()
    for card in await worker_cards(bus):
        if card.model is not None and card.model.name == job.model:
            workers.join(card)
    for card in workers.fitting:
        model = card.model
        if model is not None and model.weights and card.instance != job.instance:
            if job.revision and model.revision and model.revision != job.revision:
                continue
            return model.weights
    return ""


def stored_manifest(store: WeightStore, job: WeightsJob) -> Manifest | None:
    """The complete copy of a model that was used last on this node, found by its labels."""
    for manifest in reversed(store.list()):
        labels = (manifest.form, manifest.model, manifest.revision)
        if labels == ("checkpoint", job.model, job.revision):
            copy = store.open(manifest.digest)
            if copy is not None:
                complete = copy.complete
                copy.close()
                if complete:
                    return manifest
    return None
