"""Removal of the manifests of former weights, which no process names any more."""

import asyncio
import logging
import random
import time

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Role
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.storage.stored_object import StoredObject
from kvmesh.bus.subjects import manifest_object
from kvmesh.weights.models.catalog import ModelCatalog
from kvmesh.weights.process.search import offered

log = logging.getLogger(__name__)
GRACE_S = 3600.0  # from the last use of a manifest
EVERY_S = 3600.0


async def remove_regularly(bus: Bus, instance: str) -> None:
    """Remove former manifests about every hour while `instance` is the oldest worker."""
    while True:
        await asyncio.sleep(EVERY_S * random.uniform(0.8, 1.2))
        try:
            if await _is_oldest(bus, instance):
                await remove_former_manifests(bus)
        except BusError as error:
            log.info("manifests of former weights stay for now: %s", cause(error))


async def remove_former_manifests(bus: Bus, grace_s: float = GRACE_S) -> int:
    """Remove manifests of weights that nobody has, and return their number; raises BusError.

    Kept are those that a card or an entry of the catalog names, that a worker offers, or that were
    put less than `grace_s` seconds ago.
    """
    bucket = ObjectBucket(bus, bus.subjects.model_bucket)
    prefix, now = manifest_object(""), time.time()
    found = await bucket.complete()
    old: dict[str, StoredObject] = {
        name.removeprefix(prefix): obj
        for name, obj in found.items()
        if name.startswith(prefix) and now - obj.stored > grace_s
    }
    if not old:
        return 0
    cards = await read_bucket(bus, bus.subjects.instances_bucket)
    named = b"\n".join(cards.values())
    entries = {entry.weights for entry in await ModelCatalog(bus).entries()}
    removed = 0
    for digest, obj in old.items():
        if digest in entries or digest.encode() in named or await offered(bus, digest):
            continue
        if await bucket.remove(obj):
            removed += 1
            log.info("removed the manifest of former weights %s", digest[:12])
    return removed


async def _is_oldest(bus: Bus, instance: str) -> bool:
    ages = [(card.started, card.instance) for card in await read_cards(bus, Role.WORKER)]
    return bool(ages) and min(ages)[1] == instance
