"""The choice of the copy of weights that a starting worker takes. No transfer happens here."""

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.discovery.compatibility import WITNESSES, Compatibility, Statements
from kvmesh.bus.messages import Instance, Role
from kvmesh.weights.frames import WeightsJob
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.store import WeightStore


async def digest_on_cards(bus: Bus, job: WeightsJob) -> str:
    """The digest on the oldest card of the model; empty if no card has one. Raises BusError.

    Where none that serves decides, the worker that has been asleep longest does. A worker that is
    pinned to a revision follows no card with another one.
    """
    cards = await read_cards(bus, Role.WORKER, Role.PARKED, *WITNESSES)
    workers, asleep = Compatibility(Statements(cards).of(job.model)), list[Instance]()
    for card in cards:
        if card.model is not None and card.model.name == job.model:
            workers.join(card)
        elif card.served is not None and card.served.name == job.model:
            asleep.append(card)
    asleep.sort(key=lambda card: (card.started, card.instance))
    for card in (*workers.fitting, *asleep):
        model = card.model or card.served
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
